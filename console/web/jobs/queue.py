"""Starts what is queued: one run at a time on this machine, in the order in which they were queued.

The queue is the jobs' files: `advance` reads them, so it goes on after a kill of the API where it was, and processes that serve
the same folder take turns (a lock). Jobs and run files that this user did not seal are not started (`protocol/seals.py`). Runs of
schedulers are handed to these at once.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from penstock.console import launch as command_line
from penstock.console.connections import RUN_FILE
from penstock.console.web.context import WebContext
from penstock.console.web.jobs import job_file
from penstock.console.web.jobs.job_file import Job, is_launched
from penstock.console.web.launchers.launcher import Start, installed, launcher_of, scheduler_options
from penstock.console.web.launchers.run_process import LOCK
from penstock.console.web.problems import Problem, of_error
from penstock.protocol import seals
from penstock.protocol.config.sources import split_arguments
from penstock.protocol.errors import PenstockError
from penstock.protocol.record import run_folder
from penstock.protocol.subjects import RUN_ID

log = structlog.get_logger("console.queue")
UNFINISHED = ".new-"  # a run that is being created has a folder of this name and no other
_UNFINISHED_S = 3600.0
QUEUE_LOCK = ".console-queue.lock"


def folders(runs_dir: Path) -> list[Path]:
    try:
        paths = list(runs_dir.iterdir())
    except OSError:
        return []
    named = [path for path in paths if RUN_ID.fullmatch(path.name) and not path.is_symlink()]
    return [path for path in named if (path / job_file.JOB).exists()]


def remove_unfinished(runs_dir: Path) -> None:
    """Remove what a killed API left of runs that it was creating for more than an hour."""
    for folder in runs_dir.glob(f"{UNFINISHED}*"):
        if folder.is_dir() and not folder.is_symlink() and time.time() - folder.stat().st_mtime > _UNFINISHED_S:
            shutil.rmtree(folder, ignore_errors=True)


def queued(runs_dir: Path) -> list[tuple[Path, Job]]:
    return sorted(_to_start(runs_dir), key=lambda one: (one[1].queued_ns, one[1].run))


def advance(web: WebContext) -> int:
    """Start what may start now; return how many were started. Never raises for one run's failure."""
    waiting = queued(web.runs_dir)
    if not waiting:
        return 0
    num_started = 0
    with job_file.locked(web.runs_dir / QUEUE_LOCK, "the queue"):
        free = web.at_a_time - _num_running(web.runs_dir)
        for folder, job in queued(web.runs_dir):
            is_local = installed(job.launcher).uses_this_machine
            if is_local and free <= 0:
                continue
            try:
                if _start(web, folder):
                    num_started += 1
                    free -= is_local
            except Problem as problem:  # removed meanwhile, or another request holds it
                log.warning("a run is not started now", run=folder.name, error=problem.body.detail)
    return num_started


def repeat_pauses(runs_dir: Path) -> None:
    """Write the request of every run that is to pause again.

    An API that was killed may not have written it, and `penstock train` removes one that it finds when it starts.
    """
    for folder in folders(runs_dir):
        if job_file.intent_of(folder) == "pause" and _has_process(folder):
            with contextlib.suppress(PenstockError):
                run_folder.request_pause(folder)


def _has_process(folder: Path) -> bool:
    """Return True while the process that the API started runs, here or on another machine, which does not show its lock."""
    launch = job_file.read_launch(folder)
    return run_folder.is_locked(folder / LOCK) or (launch is not None and launch.ended_at is None)


def command(web: WebContext, folder: Path, job: Job) -> list[str]:
    """Return the command that trains a run, as a person would type it; without workers the trainer alone."""
    words = run_arguments(web.arguments, folder / RUN_FILE, folder.name, folder.parent, job.command)
    if job.command != job_file.TRAIN:
        return command_line.trainer_command(words, web.environ, job.command)
    if job.workers != 0:
        words += ["--local", *(() if job.workers is None else ("--workers", str(job.workers)))]
    for file in job.serve:
        words += ["--serve", file]
    return command_line.module("penstock", "train", *words)


def run_arguments(arguments: Sequence[str], run_file: Path, run: str, runs_dir: Path, command: str) -> list[str]:
    """Return run files and overrides of a run: those of the console, its run file, and its name and folder.

    A training on given answers takes the run files of the console alone: overrides such as nats.url are for services, and
    its command refuses what it does not read.
    """
    console_arguments = (
        arguments if command == job_file.TRAIN else [str(file) for file in split_arguments(arguments)[0]]
    )
    return [*console_arguments, str(run_file), f"run.id={run}", f"run.dir={runs_dir}"]


def _to_start(runs_dir: Path) -> Iterator[tuple[Path, Job]]:
    for folder in folders(runs_dir):
        if job_file.intent_of(folder) != "run":
            continue  # also one whose file is damaged: its state says so
        job = job_file.read(folder)
        if job is None or job.intent != "run" or job.error or launcher_of(job.launcher) is None:
            continue
        if not is_launched(job, job_file.read_launch(folder)):
            yield folder, job


def _num_running(runs_dir: Path) -> int:
    return sum(
        run_folder.is_locked(folder / LOCK) or run_folder.is_lock_held(folder)
        for folder in runs_dir.iterdir()
        if RUN_ID.fullmatch(folder.name)
    )


def _start(web: WebContext, folder: Path) -> bool:
    with job_file.changing(folder) as job:
        if job.intent != "run" or is_launched(job, job_file.read_launch(folder)):
            return False  # stopped meanwhile
        launcher = installed(job.launcher)
        try:
            run_folder.withdraw_pause(folder)
            seals.read(folder / RUN_FILE)  # raises unless this user wrote it
            start = Start(
                folder=folder,
                number=job.starts,
                command=tuple(command(web, folder, job)),
                environ=web.environ,
                options=scheduler_options(job.options, launcher.options),
                num_gpus=job.num_gpus,
                directory=Path(job.directory) if job.directory else None,
            )
            handle = launcher.start(start)
        except (Problem, PenstockError, OSError) as err:
            problem = err if isinstance(err, Problem) else of_error(err) if isinstance(err, PenstockError) else None
            body = None if problem is None else problem.body
            text = str(err) if body is None else ". ".join(part for part in (body.detail, body.got, body.fix) if part)
            log.warning("a run was not started", run=folder.name, error=text)
            job_file.write(folder, job.model_copy(update={"error": f"not started: {text}"}))
            return False
        job_file.write(folder, job.model_copy(update={"handle": handle, "handle_start": job.starts}))
    return True
