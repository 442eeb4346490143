"""``job.json`` in a run's folder: what the API was asked for, so that any process of the API can go on with it; and the run's state.

The run file that was sent is beside it (``run.toml``), as are the settings that were checked (``planned-config.json``) and what
became of the process (``launch.json``, written by `launchers/run_process.py`). All are written whole or not at all. A job counts only
with the seal of this user (`protocol/seals.py`): in a folder that somebody else sent it is no job, and what an earlier release queued
waits for `penstock runs trust`. The state is that of these files, of the run's lock and of its launcher; `decide` is pure.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.console.report import curves
from penstock.console.report.event_fields import read_object
from penstock.console.tools import runs
from penstock.console.web.launchers.launcher import Found, launcher_of, scheduler_options
from penstock.console.web.launchers.run_process import LAUNCH
from penstock.console.web.problems import Problem
from penstock.protocol import seals
from penstock.protocol.errors import ConfigError, UntrustedFolder
from penstock.protocol.files import atomic_write, read_regular
from penstock.protocol.record import run_folder

JOB = "job.json"
TRAIN = "train"  # the command of a run with rollouts; all others train on given answers
_LOCK = "job.lock"
_LOCK_S = 10.0
_MAX_BYTES = 1024 * 1024
_MAX_KNOWN = 20_000
Intent = Literal["none", "run", "pause", "stop"]
_intents: dict[Path, tuple[tuple[int, int, int, int], Intent]] = {}  # by folder: the file's stamp, and what it says
State = Literal[
    "created", "queued", "waiting", "running", "pausing", "paused", "stopping", "stopped", "failed", "finished"
]
ALIVE = frozenset[State]({"waiting", "running", "pausing", "stopping"})
_STOPPED_BY_SIGNAL = (130, 143)  # what `penstock train` returns after SIGINT and SIGTERM


class Job(BaseModel):
    """What was asked for. ``starts`` counts requests to run: one whose number ``launch.json`` lacks was not started yet."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run: str
    created_at: float
    launcher: str = "local"
    options: dict[str, Any] = Field(default={}, description="Options of the launcher.")
    command: str = Field(default=TRAIN, description="The command of penstock that trains: train, sft, dpo or rm.")
    workers: int | None = None  # None: as penstock train decides
    serve: tuple[str, ...] = ()
    num_gpus: int = 0
    description: str = ""
    intent: Intent = "none"
    starts: int = 0
    queued_ns: int = Field(default=0, description="When the run was queued; the smallest is started first.")
    handle: str = Field(default="", description="The scheduler's id of the newest start.")
    handle_start: int = Field(default=0, description="The start that it belongs to.")
    directory: str = Field(default="", description="Working directory: relative paths of the run file start there.")
    error: str = Field(default="", description="Why the newest start failed.")


class Launch(BaseModel):
    """What became of the newest process."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    start: int
    pid: int = 0
    pid_started: int = 0
    child: int = 0
    child_started: int = 0
    host: str = ""
    started_at: float = 0.0
    ended_at: float | None = None
    exit_code: int | None = None


def read(folder: Path) -> Job | None:
    """Return the job of a run's folder; None unless an API of this user created the run. Raises ConfigError for a damaged file."""
    try:
        content = seals.read(folder / JOB, _MAX_BYTES)
    except UntrustedFolder:
        return None
    if content is None:
        return None
    try:
        return Job.model_validate_json(content)
    except ValidationError as err:
        raise ConfigError(
            f"{folder / JOB} cannot be read ({err.error_count()} errors); restore it, or remove it and start the run by hand"
        ) from None


def intent_of(folder: Path) -> Intent:
    """Return what a run was last asked for, ``none`` for a damaged file; a file that did not change is not read again."""
    try:
        stat = (folder / JOB).lstat()
    except OSError:
        return "none"
    stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size, seals.changed_ns(folder / JOB))
    known = _intents.get(folder)
    if known is None or known[0] != stamp:
        try:
            job = read(folder)
        except ConfigError:
            job = None
        if len(_intents) > _MAX_KNOWN:
            _intents.clear()
        known = _intents[folder] = (stamp, job.intent if job else "none")
    return known[1]


def read_launch(folder: Path) -> Launch | None:
    try:
        return Launch.model_validate_json(read_regular(folder / LAUNCH, _MAX_BYTES))
    except (OSError, ValidationError):
        return None


def write(folder: Path, job: Job, *, at: Path | None = None) -> None:
    """Write the job of a folder, which has the path ``at`` later. Raises ConfigError when this user can have no key of seals."""
    path = None if at is None else at / JOB
    seals.write(folder / JOB, job.model_dump_json(indent=1) + "\n", at=path, sync=True)


@contextlib.contextmanager
def changing(folder: Path) -> Iterator[Job]:
    """Hold the lock of a run's job, also against other processes of the API, and give the job; a problem if there is none."""
    with locked(folder / _LOCK, f"run {folder.name}"):
        job = read(folder)
        if job is None:
            is_foreign = (folder / JOB).exists()
            raise Problem(
                409,
                f"run {folder.name} was not created by {'this user, or by an earlier release' if is_foreign else 'this API'}",
                expected=f"a file {JOB} in its folder"
                + (f", sealed by this user; users of one folder share one {seals.KEY_FILE}" if is_foreign else ""),
                fix=f"see what it starts, and accept it: penstock runs trust {folder.name} run.dir={folder.parent}"
                if is_foreign
                else "control it where it was started, or create a run with POST /v1/runs",
            )
        yield job


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of a file; a problem 503 when another process holds it for too long."""
    deadline = time.monotonic() + _LOCK_S
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except FileNotFoundError:
        raise Problem(404, f"{what} was removed meanwhile", fix="list the runs with GET /v1/runs") from None
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Problem(503, f"another request changes {what}", fix="try again") from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def write_document(path: Path, document: dict[str, Any]) -> None:
    atomic_write(path, json.dumps(document, indent=1) + "\n", sync=True)


def notes(folder: Path) -> dict[str, Any]:
    """Return what its user wrote about a run: ``tags`` and ``notes``."""
    stored = read_object(folder / run_folder.NOTES) or {}
    tags = stored.get("tags")
    return {"tags": [str(tag) for tag in tags] if isinstance(tags, list) else [], "notes": str(stored.get("notes", ""))}


@dataclass(frozen=True, slots=True)
class RunState:
    state: State
    detail: str = ""
    exit_code: int | None = None

    @property
    def is_alive(self) -> bool:
        """True while the run has a process, or its scheduler will start one."""
        return self.state in ALIVE


def run_state(folder: Path, job: Job | None, *, ask: bool = True) -> RunState:
    """Return the state of a run; without ``ask`` no scheduler is asked, and ``launch.json`` decides. Raises Problem."""
    held = run_folder.is_lock_held(folder)
    if job is None:
        what = f"{JOB} is not this user's: penstock runs trust {folder.name}" if (folder / JOB).exists() else ""
        if curves.command_of(folder) == curves.LOG:
            state, what = curves.logged_state(folder)
            return RunState(cast("State", state), what)
        otherwise: State = "running" if held else "finished" if runs.is_finished(folder) else "stopped"
        if not what and otherwise == "stopped":
            what = "it was started in a terminal: the same command there resumes it"
        return RunState("failed", failed[0]) if (failed := runs.failure_of(folder)) else RunState(otherwise, what)
    launch = read_launch(folder)
    process = Found("absent")
    launcher = launcher_of(job.launcher)
    if launcher is not None and (ask or launcher.uses_this_machine):
        process = launcher.find(folder, scheduler_options(job.options, launcher.options), job.handle)
    elif launch is not None and launch.start == job.starts and launch.ended_at is None:
        process = Found("running")
    if held and not process.is_alive:
        process = Found("running", "started outside of this API")
    is_run = job.command == TRAIN
    is_finished = runs.is_finished(folder) if is_run else curves.is_training_finished(folder, job.command)
    state = decide(job, launch, process, is_finished=is_finished)
    failed = runs.failure_of(folder)
    return replace(state, detail=f"{failed[0]}; {state.detail}") if failed and state.state == "failed" else state


def is_launched(job: Job, launch: Launch | None) -> bool:
    return job.handle_start >= job.starts or (launch is not None and launch.start >= job.starts)


def decide(job: Job, launch: Launch | None, process: Found, *, is_finished: bool) -> RunState:
    """Return the state that a job, its newest process and its launcher add up to."""
    if process.is_alive:
        return _alive(job, process)
    if job.error:
        return RunState("failed", job.error)
    if job.intent == "run" and not is_launched(job, launch):
        return RunState("queued", "starts when the runs before it have ended")
    if is_finished:
        return RunState("finished", exit_code=0)
    if job.starts == 0:
        return RunState("created")
    if launch is None or launch.start < job.starts:
        return RunState("stopped", process.detail)
    return _ended(job, launch, process)


def _alive(job: Job, process: Found) -> RunState:
    if job.intent == "pause":
        return RunState("pausing", "trains what is under way, then writes a checkpoint and exits")
    if job.intent == "stop":
        return RunState("stopping", "writes a checkpoint and exits")
    return RunState("waiting" if process.state == "waiting" else "running", process.detail)


def _ended(job: Job, launch: Launch, process: Found) -> RunState:
    code = launch.exit_code
    if code is None:
        what = process.detail or "its process was killed, or the machine restarted"
        return RunState("stopped" if job.intent in {"stop", "pause"} else "failed", what)
    if code == 0:
        return RunState("paused" if job.intent == "pause" else "stopped", exit_code=code)
    if job.intent == "stop" or code in _STOPPED_BY_SIGNAL:
        return RunState("stopped", exit_code=code)
    return RunState("failed", f"ended with exit code {code}; its log is logs/launch.log", exit_code=code)
