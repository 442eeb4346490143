"""Real runs through the Runs API: a console killed again and again, pause, audit, resume, the queue, delete. `make proof NAME=runs-api`.

    python -m tests.rigs.proofs.runs_api [FOLDER]

Two small runs are created with job fields and started; the second waits for the first. While the first trains, the console is
killed with SIGKILL and started anew (the run goes on); then it is paused. The audit must close with no group in flight before the
resume and after it, and every step must have happened once, in order. Prints a line for each step of the proof; exit code 1
when one does not hold.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from tests.rigs.proofs.proof import Console, folder_of
from tests.servers import wait_for
from tests.small_run import report_of, steps_of

from penstock.deploy import quickstart_task

_DEADLINE_S = 240.0
STEPS = 120


class RunsApi(Console):
    """The Runs API of a console that is killed and started anew."""

    def __init__(self, base: Path) -> None:
        self.runs = base / "runs"
        super().__init__(base, role="admin")

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

        wait_for(is_there, f"{run} {states}", _DEADLINE_S)
        return status

    def audit(self, run: str) -> dict[str, Any]:
        report = report_of("audit", run, self.runs)
        assert report["closes"], report
        return report

    def steps(self, run: str) -> list[int]:
        return steps_of(self.runs, run)

    def has_steps(self, run: str, count: int) -> bool:
        """Whether a run has made so many steps; fails when it ended before, by the files alone: the console may be dead."""
        launch = self.runs / run / "launch.json"
        code = json.loads(launch.read_text()).get("exit_code") if launch.exists() else None
        assert code is None or len(self.steps(run)) >= count, f"{run} ended with {code}"
        return len(self.steps(run)) >= count


def main() -> int:
    base = folder_of("runs-api")
    quickstart_task.write_model(base / "model", seed=0)
    pq.write_table(pa.Table.from_pylist([_row(n) for n in range(40)]), base / "train.parquet")
    console = RunsApi(base)
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


def prove(console: RunsApi, base: Path) -> None:
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
    wait_for(lambda: console.has_steps("first", 2), "steps", _DEADLINE_S)
    for _ in range(2):
        before = len(console.steps("first"))
        console.kill()
        wait_for(lambda count=before: console.has_steps("first", count + 1), "steps without a console", _DEADLINE_S)
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
