"""The routes that change something: create, start, pause, resume, stop and remove a run; its state and its settings."""

from __future__ import annotations

import os
import shutil
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field

from penstock.console.web.context import Admin, Context, Reader, RunFolder, Runner
from penstock.console.web.jobs import actions, job_file, queue
from penstock.console.web.jobs.job_file import Job, RunState, State
from penstock.console.web.jobs.job_request import RunRequest
from penstock.console.web.problems import RESPONSES

router = APIRouter(prefix="/v1", tags=["control"], responses=RESPONSES)
_LOG_BYTES = 4000


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


@router.post("/runs/{run}/start")
def start_run(_: Runner, folder: RunFolder, web: Context) -> RunStatus:
    """Start a run, or queue it while another one uses this machine. Repeating it changes nothing."""
    return _status(web, folder, actions.start(web, folder))


@router.post("/runs/{run}/pause")
def pause_run(_: Runner, folder: RunFolder, web: Context) -> RunStatus:
    """Pause a run: no new tasks, what is under way is trained, a checkpoint is written, all processes exit.

    Returns at once, with the state ``pausing``; it is ``paused`` when the engines are free.
    """
    return _status(web, folder, actions.pause(web, folder))


@router.post("/runs/{run}/resume")
def resume_run(_: Runner, folder: RunFolder, web: Context) -> RunStatus:
    """Continue a run from its last checkpoint, with the same account; the same as start."""
    return _status(web, folder, actions.start(web, folder))


@router.post("/runs/{run}/stop")
def stop_run(
    _: Runner,
    folder: RunFolder,
    web: Context,
    force: Annotated[bool, Query(description="Kill it instead; it resumes from its last checkpoint.")] = False,
) -> RunStatus:
    """Stop a run: it writes a checkpoint and exits. It can be resumed."""
    return _status(web, folder, actions.stop(web, folder, force=force))


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
        log=_log_tail(folder) if state.state == "failed" else "",
    )


def _log_tail(folder: RunFolder) -> str:
    try:
        handle = os.open(folder / "logs" / "launch.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LOG_BYTES))
            return file.read(_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
