"""Create, start, pause, resume, stop and remove a run. Each action may be repeated, and returns the run's state.

Run files are checked by the settings code of every service, in a separate process.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from pydantic import BaseModel, ValidationError

from penstock.console import connections, launch
from penstock.console.connections import RUN_FILE
from penstock.console.report import curves
from penstock.console.tools import removal, runs
from penstock.console.web.context import WebContext
from penstock.console.web.jobs import job_file, queue
from penstock.console.web.jobs.job_file import Job, RunState
from penstock.console.web.jobs.job_request import RunRequest, refuse_rollouts, run_file_text, run_name
from penstock.console.web.launchers.launcher import Start, installed, scheduler_options
from penstock.console.web.launchers.local import LOCAL, LocalOptions
from penstock.console.web.launchers.run_process import LOCK
from penstock.console.web.problems import Problem
from penstock.protocol import files, seals
from penstock.protocol.errors import ConfigError
from penstock.protocol.record import run_folder

_CHECK_S = 60.0
_at_a_time = threading.BoundedSemaphore(2)  # each takes a second of one core
_MAX_RUNS = 10_000


def check(
    arguments: Sequence[str], environ: Mapping[str, str], directory: Path, hide: Path, *, command: str
) -> dict[str, Any]:
    """Return settings and origins; a problem 422 that lists every error. Errors name files without the folder ``hide``.

    ``command`` is the command of penstock that is to read them: train, sft, dpo or rm; ``unread`` lists the keys of files in
    ``hide`` that it does not read.
    """
    if not _at_a_time.acquire(timeout=_CHECK_S / 2):
        raise Problem(429, "many requests check settings now", fix="try again in a few seconds")
    try:
        answer = subprocess.run(
            launch.module("penstock.deploy.config_show", *arguments, "--command", command, "--json"),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_CHECK_S,
            check=False,
            env=dict(environ),
            cwd=directory,
        )
    except subprocess.TimeoutExpired:
        raise Problem(503, f"the settings were not checked within {_CHECK_S:.0f} s", fix="try again") from None
    finally:
        _at_a_time.release()
    if answer.returncode == 0:
        return hidden(json.loads(answer.stdout), hide)
    errors = [line.replace(f"{hide}/", "") for line in answer.stderr.splitlines() if line.strip()]
    if answer.returncode != 2:
        raise Problem(500, "the settings could not be checked", got="\n".join(errors[-5:]), fix="report it, please")
    raise Problem(
        422,
        errors[0] if errors else "the settings are refused",
        expected=f"settings that penstock {command} accepts",
        errors=errors,
        fix="correct each key; every error names its key and what to write",
    )


def hidden(document: dict[str, Any], hide: Path) -> dict[str, Any]:
    """Return the document that `penstock config show --json` prints without the folder ``hide``."""
    unread_keys = [key for key in document.get("unread", []) if document["origins"][key].startswith(f"{hide}/")]
    return json.loads(json.dumps({**document, "unread": unread_keys}).replace(f"{hide}/", ""))


def create(web: WebContext, request: RunRequest) -> Path:
    options = _options(request)
    command = request.command_name
    if command != job_file.TRAIN:
        refuse_rollouts(request, command)
    if request.serve and request.workers == 0:
        fix = "serve them where the reward service runs (penstock reward serve), or set workers to 1 or more"
        raise Problem(422, "serve comes with workers = 0", expected="workers of at least 1", got="workers = 0", fix=fix)
    content, settings = _parsed_run_file(request)
    run = run_name(request, settings)
    folder = web.runs_dir / run
    _refuse_existing(folder)
    web.runs_dir.mkdir(parents=True, exist_ok=True)
    refuse_too_many(web)
    new = Path(mkdtemp(prefix=f".new-{run}-", dir=web.runs_dir))
    try:
        _write_job(web, request, new, run, content, options)
        new.chmod(0o755)
        try:
            files.replace(new, folder)
        except OSError:  # another request was faster
            _refuse_existing(folder)
            raise
    finally:
        if new.exists():
            shutil.rmtree(new, ignore_errors=True)
    return folder


def refuse_too_many(web: WebContext) -> None:
    if web.runs_dir.is_dir() and sum(1 for _ in web.runs_dir.iterdir()) > _MAX_RUNS:
        raise Problem(429, f"{web.runs_dir.name}/ has more than {_MAX_RUNS} entries", fix="remove runs that ended")


def _parsed_run_file(request: RunRequest) -> tuple[bytes, dict[str, Any]]:
    try:
        text = run_file_text(request)
        content = text.encode()
    except (RecursionError, UnicodeEncodeError) as err:
        got = type(err).__name__
        raise Problem(422, "the settings are nested too deeply, or no UTF-8", got=got, fix="correct them") from None
    try:
        return content, tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as err:
        detail = f"run_file is not valid TOML: {err}"
        raise Problem(422, detail, expected="TOML", fix="correct the place named") from None


def _write_job(web: WebContext, request: RunRequest, new: Path, run: str, content: bytes, options: BaseModel) -> None:
    directory, command = Path.cwd(), request.command_name
    folder = web.runs_dir / run
    seals.write(new / RUN_FILE, content, at=folder / RUN_FILE)
    arguments = queue.run_arguments(web.arguments, new / RUN_FILE, run, web.runs_dir, command)
    document = check(arguments, web.environ, directory, new, command=command)
    if (unread := document.pop("unread", [])) and request.run_file is None:
        # Settings of a request that do nothing are refused; a run_file may be shared with other commands.
        raise Problem(
            422,
            f"{unread[0]} is not read by penstock {command}",
            expected=f"settings that penstock {command} reads, or a run_file that other commands share",
            got=", ".join(unread),
            fix=f"leave them out, or set what {command} has instead in the section {command}",
        )
    job_file.write_document(new / runs.PLANNED, document)
    job = Job(
        run=run,
        created_at=time.time(),
        launcher=request.launcher,
        options=options.model_dump(exclude_none=True),
        command=command,
        workers=request.workers,
        serve=tuple(str(directory / file) for file in request.serve),
        num_gpus=request.num_gpus or 0,
        description=" ".join(part for part in (request.model_size, request.description) if part),
        directory=str(directory),
    )
    job_file.write(new, job, at=folder)


def start(web: WebContext, folder: Path) -> RunState:
    """Queue a run, and start it if the machine is free; also resumes it. No change for one that is queued or running."""
    with job_file.changing(folder) as job:
        state = job_file.run_state(folder, job)
        if state.state in {"pausing", "stopping"}:
            raise _wrong_state(folder, state, "start", "a run that has ended its pause or stop", "repeat it then")
        if state.state == "finished":
            raised = "raise trainer.steps in its run.toml and start it with penstock train, or "
            fix = f"{raised if job.command == job_file.TRAIN else ''}create another run"
            raise _wrong_state(folder, state, "start", "a run with steps left", fix)
        if state.state not in {"queued", "waiting", "running"}:
            changed = {"intent": "run", "starts": job.starts + 1, "queued_ns": time.time_ns(), "error": ""}
            job_file.write(folder, job.model_copy(update=changed))
    queue.advance(web)
    return read_state(folder)


def pause(web: WebContext, folder: Path) -> RunState:
    """Let a run issue no new tasks, train what is under way, write a checkpoint and exit; one that is queued leaves the queue."""
    with job_file.changing(folder) as job:
        state = job_file.run_state(folder, job)
        if state.state == "queued":
            job_file.write(folder, job.model_copy(update={"intent": "stop", "starts": job.starts - 1}))
        elif state.state in {"running", "waiting"}:
            job_file.write(folder, job.model_copy(update={"intent": "pause"}))
            run_folder.request_pause(folder)
        elif state.state == "pausing":
            run_folder.request_pause(folder)  # an API that was killed may not have written it
        elif state.state != "paused":
            raise _wrong_state(folder, state, "pause", "a run that is running or queued", "start it first")
    return read_state(folder)


def stop(web: WebContext, folder: Path, *, force: bool) -> RunState:
    """Let a run write a checkpoint and exit at once; with ``force`` it is killed, and resumes from its last checkpoint."""
    with job_file.changing(folder) as job:
        state = job_file.run_state(folder, job)
        if state.state == "queued":
            job_file.write(folder, job.model_copy(update={"intent": "stop", "starts": job.starts - 1}))
        elif state.is_alive:
            launcher = installed(job.launcher)
            if state.state != "stopping" or force:
                job_file.write(folder, job.model_copy(update={"intent": "stop"}))
                options = scheduler_options(job.options, launcher.options)
                launcher.stop(folder, options, job.handle, force=force)
    return read_state(folder)


def remove(web: WebContext, folder: Path, *, force: bool) -> None:
    """Remove a run: its objects, its streams and its folder. Raises Problem while it runs, and what `remove_run` raises."""
    job = job_file.read(folder)
    with job_file.changing(folder) if job is not None else contextlib.nullcontext():  # the queue must not start it
        _remove(web, folder, job_file.read(folder), force=force)


def _remove(web: WebContext, folder: Path, job: Job | None, *, force: bool) -> None:
    state = job_file.run_state(folder, job)
    if state.is_alive:
        raise _wrong_state(
            folder, state, "delete", "a run without a process", f"POST /v1/runs/{folder.name}/stop first"
        )
    has_no_rollouts = job is not None and (job.starts == 0 or job.command != job_file.TRAIN)
    never_ran = (
        has_no_rollouts and not (folder / "metrics.jsonl").exists() and not (folder / connections.STORE).exists()
    )
    if never_ran or curves.command_of(folder) == curves.LOG or (job is not None and _left_nothing(web, folder)):
        shutil.rmtree(folder)
        return
    run = connections.NamedRun(folder.name, [*web.arguments, f"run.dir={web.runs_dir}"], web.environ)
    done = removal.remove_run(run, yes=True, folder=True, force=force)
    if done:
        raise Problem(409, f"run {folder.name} was not removed", fix="see the log of penstock console")


def begin_task(web: WebContext, folder: Path, task: str, words: Sequence[str]) -> None:
    """Start a command of penstock for a run, such as its evaluation, in a process that outlives this API.

    A Problem 409 while the run's last one of this name is running.
    """
    place = folder / "tasks" / task
    run_folder.refuse_links(place.parent)
    place.mkdir(parents=True, exist_ok=True)
    if run_folder.is_locked(place / LOCK):
        raise Problem(409, f"{task} of run {folder.name} is running", expected="one at a time", fix="wait for its end")
    before = job_file.read_launch(place)
    command = launch.module("penstock", *words, *web.arguments, f"run.dir={web.runs_dir}")
    number = before.start + 1 if before else 1
    LOCAL.start(Start(folder=place, number=number, command=tuple(command), environ=web.environ, options=LocalOptions()))


def tasks(folder: Path) -> list[dict[str, Any]]:
    """Return the newest task of each name: whether it is running, when it began and ended, and its exit code."""
    found = sorted(place for place in (folder / "tasks").glob("*") if place.is_dir() and not place.is_symlink())
    notes = [(place, job_file.read_launch(place)) for place in found]
    return [
        {"task": place.name, "running": run_folder.is_locked(place / LOCK)}
        | (one.model_dump(include={"started_at", "ended_at", "exit_code"}) if one else {})
        for place, one in notes
    ]


def read_state(folder: Path, *, ask: bool = True) -> RunState:
    return job_file.run_state(folder, job_file.read(folder), ask=ask)


def config(folder: Path) -> dict[str, Any]:
    """Return the settings with their origins: those the trainer was last started with, or those that were checked."""
    if (document := runs.stored_config(folder)) is None:
        raise Problem(404, f"run {folder.name} has no stored settings", fix="start it once")
    return {"run": folder.name, **document}


def _left_nothing(web: WebContext, folder: Path) -> bool:
    """Return True if a run has no local store and no servers are configured: it failed before it made either."""
    if (folder / "store").is_dir():
        return False
    with contextlib.suppress(ConfigError):
        return web.settings_of(folder.name).origins["nats.url"] == "default"
    return False


def _options(request: RunRequest) -> BaseModel:
    try:
        return installed(request.launcher).options.model_validate(request.launcher_options)
    except ValidationError as err:
        errors = [f"launcher_options.{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in err.errors()]
        known = ", ".join(installed(request.launcher).options.model_fields) or "none"
        raise Problem(
            422,
            errors[0],
            expected=f"options of the launcher {request.launcher}: {known}",
            errors=errors,
            fix="correct them",
        ) from None


def _refuse_existing(folder: Path) -> None:
    if folder.exists() or folder.is_symlink():
        raise Problem(
            409,
            f"run {folder.name} exists",
            expected="a new name",
            got=folder.name,
            fix=f"choose another name, start it with POST /v1/runs/{folder.name}/start, or DELETE it first",
        )


def _wrong_state(folder: Path, state: RunState, what: str, expected: str, fix: str) -> Problem:
    detail = f"{what} of run {folder.name} is not possible now"
    return Problem(409, detail, expected=expected, got=f"state {state.state}", fix=fix)
