"""Real runs through the Runs API: a console killed again and again, pause, audit, resume, the queue, delete. `make proof NAME=runs-api`.

    python -m tests.rigs.proofs.runs_api [FOLDER]

Two small runs are created with job fields and started; the second waits for the first. While the first trains, the console is
killed with SIGKILL and started anew (the run goes on); then it is paused. The audit must close with no group in flight before the
resume and after it, and every step must have happened once, in order. Prints a line for each step of the proof; exit code 1
when one does not hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from tests.rigs.proofs.proof import folder_of

from penstock.deploy import quickstart_task

_DEADLINE_S = 240.0
STEPS = 120
_PENSTOCK = [sys.executable, "-P", "-m", "penstock"]


class Console:
    """`penstock console` on a folder, which is killed and started anew."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.dir = f"run.dir={base / 'runs'}"
        self.num_starts = 0
        self.start()
        made = [*_PENSTOCK, "console", "token", "proof", "--role", "admin", self.dir]
        self.token = subprocess.run(made, capture_output=True, text=True, check=True).stdout.strip()

    def start(self) -> None:
        self.num_starts += 1
        command = [*_PENSTOCK, "console", "--port", "0", "--json", self.dir]
        with (self.base / "console.log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=self.base)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, method: str, path: str, expected: int = 200, **more: Any) -> Any:
        headers = {"authorization": f"Bearer {self.token}"}
        answer = httpx.request(method, self.url + path, headers=headers, timeout=60, **more)
        assert answer.status_code == expected, (method, path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def until(self, run: str, *states: str) -> dict[str, Any]:
        status: dict[str, Any] = {}

        def is_there() -> bool:
            nonlocal status
            status = self.ask("GET", f"/v1/runs/{run}")
            assert status["state"] != "failed", status
            return status["state"] in states

        wait(is_there, f"{run} {states}")
        return status

    def audit(self, run: str) -> dict[str, Any]:
        done = subprocess.run(
            [*_PENSTOCK, "audit", run, "--json", self.dir], capture_output=True, text=True, check=False, timeout=120
        )
        found = json.loads(done.stdout.splitlines()[-1])
        assert done.returncode == 0, (found, done.stderr)
        assert found["closes"], found
        return found

    def steps(self, run: str) -> list[int]:
        path = self.base / "runs" / run / "metrics.jsonl"
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        return [row["step"] for row in map(json.loads, whole.splitlines()) if row["kind"] == "step"]

    def has_steps(self, run: str, count: int) -> bool:
        """Whether a run has made so many steps; fails when it ended before, by the files alone: the console may be dead."""
        launch = self.base / "runs" / run / "launch.json"
        code = json.loads(launch.read_text()).get("exit_code") if launch.exists() else None
        assert code is None or len(self.steps(run)) >= count, f"{run} ended with {code}"
        return len(self.steps(run)) >= count


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; AssertionError after the deadline."""
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)


def main() -> int:
    base = folder_of("runs-api")
    quickstart_task.write_model(base / "model", seed=0)
    pq.write_table(pa.Table.from_pylist([_row(n) for n in range(40)]), base / "train.parquet")
    console = Console(base)
    try:
        prove(console, base)
    finally:
        for run in ("first", "second"):
            if (base / "runs" / run).is_dir() and console.process.poll() is None:
                console.ask("POST", f"/v1/runs/{run}/stop?force=true")
        console.process.terminate()
        console.process.communicate(timeout=20)
    return 0


def _row(number: int) -> dict[str, Any]:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"what is {number} + {number}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"index": number},
    }


def prove(console: Console, base: Path) -> None:
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", flush=True)

    job = {
        "model_path": str(base / "model"), "train_data_path": str(base / "train.parquet"), "batch_size": 4, "rollout_n": 2,
        "learning_rate": 1e-4, "workers": 1, "start": True,
        "settings": {
            "data": {"max_prompt_tokens": 64}, "rollout": {"max_new_tokens": 12}, "reward": {"name": "math"},
            "trainer": {"checkpoint_every": 1000},
        },
    }  # fmt: skip
    first = console.ask("POST", "/v1/runs", 201, json={**job, "name": "First", "num_epochs": STEPS / 10})
    assert (first["uuid"], first["state"]) == ("first", "running"), first
    second = console.ask("POST", "/v1/runs", 201, json={**job, "name": "second", "num_epochs": 0.2})
    assert (second["state"], second["position"]) == ("queued", 0), second
    say("created and started two runs: one runs, one is queued")
    wait(lambda: console.has_steps("first", 2), "steps")
    for _ in range(2):
        before = len(console.steps("first"))
        console.kill()
        wait(lambda count=before: console.has_steps("first", count + 1), "steps without a console")
        console.start()
        assert console.ask("GET", "/v1/runs/first")["state"] == "running"
        assert console.ask("GET", "/v1/runs/second")["state"] == "queued"
    say("killed the console twice: the run went on, its state and the queue were found again")
    assert console.ask("POST", "/v1/runs/first/pause")["state"] == "pausing"
    console.kill()
    console.start()
    console.until("first", "paused")
    at_pause = len(console.steps("first"))
    account = console.audit("first")
    train = next(one for one in account["splits"] if one["split"] == "train")
    closed = train["used"] + sum(train["dropped"].values())
    left = train["issued"] - closed
    say(
        f"paused after {at_pause} steps: issued {train['issued']}, trained {train['used']}, in flight {left}; the audit closes"
    )
    assert at_pause < STEPS, "the run ended before it was paused"
    assert left < 4, "what was under way was not trained"
    assert console.ask("POST", "/v1/runs/first/resume")["state"] in {"queued", "running"}
    console.until("second", "finished")
    console.until("first", "finished")
    assert console.steps("first") == list(range(1, STEPS + 1)), console.steps("first")
    account = console.audit("first")
    train = next(one for one in account["splits"] if one["split"] == "train")
    say(f"resumed and finished: steps 1 to {STEPS}, each once; trained {train['used']} groups; the audit closes")
    console.ask("DELETE", "/v1/runs/second", 204)
    console.ask("GET", "/v1/runs/second", 404)
    say(f"deleted the second run; {console.num_starts} consoles served all this")


if __name__ == "__main__":
    sys.exit(main())
