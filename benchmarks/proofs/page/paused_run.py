"""A local run that is paused when it has made its steps, and what its steps cost."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from penstock.deploy import quickstart, quickstart_task
from penstock.deploy.local_run import TRAINER, LocalRun
from penstock.protocol.record import pause_request

DEADLINE_S = 900.0
PENSTOCK = [sys.executable, "-P", "-m", "penstock"]
_RUN_S = 1800.0  # for the steps of a run
_STEPS = 20_000  # more than a run makes before it is paused
_PROMPTS = 20_000
_SAMPLE_S = 0.5


class Meter:
    """When a run made each step, and the CPU seconds of its processes by then; a context manager that samples on a thread."""

    def __init__(self, base: Path, run: LocalRun) -> None:
        self._base = base
        self._run = run
        self._cpu_s: dict[int, float] = {}  # of each process id, when it was sampled last
        self._at: dict[int, tuple[float, float]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._begun = time.monotonic()

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._closed.wait(_SAMPLE_S):
            for one in self._run.processes():
                with contextlib.suppress(psutil.Error):
                    times = psutil.Process(one.pid).cpu_times()
                    self._cpu_s[one.pid] = sum(times[:4])  # its own and its children's, user and system
            if step := steps_of(self._base, self._run.run_id):
                self._at.setdefault(step, (time.monotonic() - self._begun, sum(self._cpu_s.values())))

    def until(self, step: int) -> tuple[float, float]:
        """Return the wall and CPU seconds until a step was seen."""
        return self._at[min(one for one in self._at if one >= step)]

    @property
    def last(self) -> int:
        """The newest step that was seen."""
        return max(self._at)


@contextlib.contextmanager
def training(base: Path, run_id: str) -> Iterator[LocalRun]:
    """A local run of the quickstart's task on an untrained model; started, but for its trainer."""
    folder = base / "runs" / run_id
    options = quickstart.Options(
        seed=0, steps=_STEPS, workers=1, folder=folder, run_id=run_id, as_json=True, kill=False, engine="embedded"
    )
    options.task.write_data(folder / "data", seed=0, num_sft=1, num_train=_PROMPTS, num_eval=50)
    quickstart_task.write_model(folder / "sft", seed=0)
    file = folder / "run.toml"
    file.write_text(quickstart.run_file_text(options, file).replace("[trainer]\n", "[trainer]\ncheckpoint_every = 5\n"))
    with LocalRun([str(file), "eval.every=40"], num_workers=1) as run:
        run.start_services()
        yield run


def pause(base: Path, run: LocalRun, steps: int) -> None:
    """Have a run end once it has made its steps: what is under way is trained first. Its accounting must close."""
    wait(lambda: steps_of(base, run.run_id) >= steps, f"step {steps}", deadline_s=_RUN_S)
    pause_request.request(run.folder)
    code = run.wait(DEADLINE_S)
    assert code == 0, f"the trainer ended with {code}\n{run.log_tail(TRAINER)}"
    audit(base, run.run_id)


def steps_of(base: Path, run: str) -> int:
    """Return the newest step in metrics.jsonl."""
    path = base / "runs" / run / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return max((row["step"] for row in map(json.loads, whole.splitlines()) if row["kind"] == "step"), default=0)


def audit(base: Path, run: str) -> None:
    """Audit a run; fails unless its accounting closes."""
    command = [*PENSTOCK, "audit", run, "--json", f"run.dir={base / 'runs'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert json.loads(done.stdout.splitlines()[-1])["closes"], done.stdout


def wait(condition: Callable[[], bool], what: str, *, deadline_s: float = DEADLINE_S) -> None:
    """Wait for a condition; AssertionError after the deadline."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)
