"""The state of a run, from its folder, its lock and its launcher. `decide` is pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.console.report import fine_tuned
from penstock.console.tools import runs
from penstock.console.web.jobs import job_file
from penstock.console.web.jobs.job_file import Job, Launch
from penstock.console.web.launchers.launcher import Found, launcher_of, scheduler_options
from penstock.protocol.record import run_folder

State = Literal[
    "created", "queued", "waiting", "running", "pausing", "paused", "stopping", "stopped", "failed", "finished"
]
ALIVE = frozenset[State]({"waiting", "running", "pausing", "stopping"})
_STOPPED_BY_SIGNAL = (130, 143)  # what `penstock train` returns after SIGINT and SIGTERM


@dataclass(frozen=True, slots=True)
class RunState:
    """A state, and what is known about it in words."""

    state: State
    detail: str = ""
    exit_code: int | None = None

    @property
    def is_alive(self) -> bool:
        """True while the run has a process, or its scheduler will start one."""
        return self.state in ALIVE


def of_folder(folder: Path, job: Job | None, *, ask: bool = True) -> RunState:
    """Return the state of a run; without ``ask`` no scheduler is asked, and ``launch.json`` decides. Raises Problem."""
    held = run_folder.is_lock_held(folder)
    if job is None:
        return RunState("running" if held else "finished" if runs.is_finished(folder) else "stopped")
    launch = job_file.read_launch(folder)
    found = Found("absent")
    launcher = launcher_of(job.launcher)
    if launcher is not None and (ask or launcher.uses_this_machine):
        found = launcher.find(folder, scheduler_options(job.options, launcher.options), job.handle)
    elif launch is not None and launch.start == job.starts and launch.ended_at is None:
        found = Found("running")
    if held and not found.is_alive:
        found = Found("running", "started outside of this API")
    is_run = job.command == job_file.TRAIN
    is_finished = runs.is_finished(folder) if is_run else fine_tuned.is_finished(folder, job.command)
    return decide(job, launch, found, is_finished=is_finished)


def is_launched(job: Job, launch: Launch | None) -> bool:
    """Return True if the newest request to run has been carried out."""
    return job.handle_start >= job.starts or (launch is not None and launch.start >= job.starts)


def decide(job: Job, launch: Launch | None, found: Found, *, is_finished: bool) -> RunState:
    """Return the state that a job, its newest process and its launcher add up to."""
    if found.is_alive:
        return _alive(job, found)
    if job.error:
        return RunState("failed", job.error)
    if job.intent == "run" and not is_launched(job, launch):
        return RunState("queued", "starts when the runs before it have ended")
    if is_finished:
        return RunState("finished", exit_code=0)
    if job.starts == 0:
        return RunState("created")
    if launch is None or launch.start < job.starts:
        return RunState("stopped", found.detail)
    return _ended(job, launch, found)


def _alive(job: Job, found: Found) -> RunState:
    if job.intent == "pause":
        return RunState("pausing", "trains what is under way, then writes a checkpoint and exits")
    if job.intent == "stop":
        return RunState("stopping", "writes a checkpoint and exits")
    return RunState("waiting" if found.state == "waiting" else "running", found.detail)


def _ended(job: Job, launch: Launch, found: Found) -> RunState:
    code = launch.exit_code
    if code is None:
        what = found.detail or "its process was killed, or the machine restarted"
        return RunState("stopped" if job.intent in {"stop", "pause"} else "failed", what)
    if code == 0:
        return RunState("paused" if job.intent == "pause" else "stopped", exit_code=code)
    if job.intent == "stop" or code in _STOPPED_BY_SIGNAL:
        return RunState("stopped", exit_code=code)
    return RunState("failed", f"ended with exit code {code}; its log is logs/launch.log", exit_code=code)
