"""The routes that change something: create, start, pause, resume, stop and remove a run; its state and its settings."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field

from penstock.console.web.context import Admin, Context, Reader, RunFolder, Runner
from penstock.console.web.jobs import actions, job_file, queue
from penstock.console.web.jobs.job_file import Job, RunState, State
from penstock.console.web.jobs.job_request import RunRequest
from penstock.console.web.problems import RESPONSES
from penstock.protocol.record import run_folder
from penstock.protocol.secret_values import scrub

router = APIRouter(prefix="/v1", tags=["control"], responses=RESPONSES)
_LOG_BYTES = 4000
_SEARCH_BYTES = 4 * 1024**2
_Word = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f-]")]  # no option of a command


class RunStatus(BaseModel):
    """The state of one run."""

    run: str
    uuid: str = Field(description="The run's name again: the guide's job API calls it so.")
    state: State = Field(
        description="created, queued (waits for the runs before it), waiting (for its scheduler), running, pausing, paused, "
        "stopping, stopped, failed, finished."
    )
    detail: str = Field("", description="What is known about the state.")
    exit_code: int | None = None
    created_at: float | None = Field(None, description="Unix seconds; null for a run that the API did not create.")
    started_at: float | None = None
    ended_at: float | None = None
    launcher: str | None = None
    position: int | None = Field(None, description="How many runs are started before it; null when it is not queued.")
    description: str = ""
    log: str = Field("", description="The last lines of the process, when the run failed.")
    logs: list[str] = Field([], description="Names of the logs of its services and tasks.")
    tasks: list[dict[str, Any]] = Field([], description="The newest evaluation and export, with their exit codes.")
    request: dict[str, Any] = Field(
        {}, description="What else than settings it was created with; a copy sends it again."
    )
    tags: list[str] = []
    notes: str = ""


@router.post("/runs", status_code=201)
def create_run(_: Runner, body: RunRequest, web: Context, response: Response) -> RunStatus:
    """Create a run from a run file, from settings, or from the platform guide's job fields; with ``start`` start it too.

    The settings are checked by the code that penstock train uses. Whoever may create runs may execute code as the
    console's user: a run file can name Python files.
    """
    folder = actions.create(web, body)
    response.headers["location"] = f"/v1/runs/{folder.name}"
    state = actions.start(web, folder) if body.start else actions.read_state(folder)
    return _status(web, folder, state)


@router.get("/runs/{run}")
def read_run(_: Reader, folder: RunFolder, web: Context) -> RunStatus:
    """Return the state of a run."""
    return _status(web, folder, actions.read_state(folder))


@router.get("/runs/{run}/config")
def read_config(_: Reader, folder: RunFolder) -> dict[str, Any]:
    """Return every setting with the origin of its value; secrets are masked.

    ``source`` is ``started`` for the settings the trainer was last started with, ``planned`` before the first start.
    """
    return actions.config(folder)


@router.post("/runs/{run}/resume", name="resume_run")
@router.post("/runs/{run}/start")
def start_run(_: Runner, folder: RunFolder, web: Context) -> RunStatus:
    """Start a run, or continue it from its last checkpoint; it is queued while another one uses this machine. Repeating changes nothing."""
    return _status(web, folder, actions.start(web, folder))


@router.post("/runs/{run}/pause")
def pause_run(_: Runner, folder: RunFolder, web: Context) -> RunStatus:
    """Pause a run: no new tasks, what is under way is trained, a checkpoint is written, all processes exit.

    Returns at once, with the state ``pausing``; it is ``paused`` when the engines are free.
    """
    return _status(web, folder, actions.pause(web, folder))


@router.post("/runs/{run}/stop")
def stop_run(
    _: Runner,
    folder: RunFolder,
    web: Context,
    force: Annotated[bool, Query(description="Kill it instead; it resumes from its last checkpoint.")] = False,
) -> RunStatus:
    """Stop a run: it writes a checkpoint and exits. It can be resumed."""
    return _status(web, folder, actions.stop(web, folder, force=force))


class Task(BaseModel):
    """An evaluation (`penstock eval`) or an export of a version (`penstock weights export`)."""

    model_config = ConfigDict(extra="forbid")

    task: Literal["evaluate", "export"]
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "best"
    data: list[_Word] = Field([], max_length=20, description="Files with held-out prompts to evaluate on.")
    samples: int = Field(1, ge=1, le=1024)
    to: _Word = Field("", description="Folder to export to, seen from the console's working directory.")

    def words(self, run: str) -> list[str]:
        if self.task == "export":
            version = ["--best"] if self.version == "best" else ["--version", self.version]
            return ["weights", "export", run, *version, "--to", self.to or f"models/{run}-{self.version}"]
        files = [word for file in self.data for word in ("--data", file)]
        return ["eval", f"{run}@{self.version}", *files, "--samples", str(self.samples)]


@router.post("/runs/{run}/tasks", status_code=202)
def start_task(_: Runner, folder: RunFolder, web: Context, body: Task) -> RunStatus:
    """Evaluate or export a version in a process of its own; its output is the log of the task's name."""
    actions.begin_task(web, folder, body.task, body.words(folder.name))
    return _status(web, folder, actions.read_state(folder))


@router.get("/runs/{run}/logs/{log}")
def read_log(
    _: Reader,
    folder: RunFolder,
    log: Annotated[str, PathParameter(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}$")],
    search: Annotated[str, Query(max_length=200, description="Only lines with this text, in any case.")] = "",
) -> list[str]:
    """Return the last 500 lines of a log, of its newest 4 MB."""
    path = folder / "logs" / log if "." in log else folder / "tasks" / log / "logs" / "launch.log"
    lines = scrub(_tail(path, _SEARCH_BYTES)).splitlines()
    return [line[:2000] for line in lines if search.lower() in line.lower()][-500:]


class Notes(BaseModel):
    """What its user writes about a run."""

    model_config = ConfigDict(extra="forbid")

    tags: list[Annotated[str, Field(min_length=1, max_length=40)]] = Field([], max_length=20)
    notes: str = Field("", max_length=10_000)


@router.put("/runs/{run}/notes")
def write_notes(_: Runner, folder: RunFolder, body: Notes) -> Notes:
    """Replace the notes and tags of a run."""
    job_file.write_document(folder / run_folder.NOTES, body.model_dump())
    return body


@router.get("/caller")
def read_caller(caller: Reader) -> dict[str, str]:
    """Return the name and the role of the token."""
    return {"name": caller.name, "role": caller.role.text}


@router.delete("/runs/{run}", status_code=204, response_class=Response)
def delete_run(
    _: Admin,
    folder: RunFolder,
    web: Context,
    force: Annotated[bool, Query(description="Also when other runs depend on it.")] = False,
) -> None:
    """Remove a run that is not running: its objects, its streams and its folder."""
    actions.remove(web, folder, force=force)
    shutil.rmtree(folder, ignore_errors=True)  # what was written while it was removed


def _status(web: Context, folder: RunFolder, state: RunState) -> RunStatus:
    job: Job | None = job_file.read(folder)
    launch = job_file.read_launch(folder)
    order = [name.name for name, _ in queue.queued(web.runs_dir)] if state.state == "queued" else []
    is_current = launch is not None and job is not None and launch.start == job.starts
    return RunStatus(
        run=folder.name,
        uuid=folder.name,
        state=state.state,
        detail=state.detail,
        exit_code=state.exit_code,
        created_at=job.created_at if job else None,
        started_at=launch.started_at if launch and is_current else None,
        ended_at=launch.ended_at if launch and is_current else None,
        launcher=job.launcher if job else None,
        position=order.index(folder.name) if folder.name in order else None,
        description=job.description if job else "",
        log=_tail(folder / "logs" / "launch.log", _LOG_BYTES) if state.state == "failed" else "",
        logs=sorted(path.name for path in (*folder.glob("logs/*.*"), *folder.glob("tasks/*"))),
        tasks=actions.tasks(folder),
        request={**job.model_dump(include={"command", "workers", "serve", "launcher"}), "launcher_options": job.options}
        if job
        else {},
        **job_file.notes(folder),
    )


def _tail(path: Path, most: int) -> str:
    """Return the end of a file; empty for one that is missing, a link or no file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - most))
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""
