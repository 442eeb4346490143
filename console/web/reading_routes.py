"""The routes that read: the list of runs, and what a run's folder, NATS and S3 have about it.

``routers`` are the routers of this and of further files; `app.create_app` includes each of them.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from pydantic import BaseModel, Field

from penstock.console.tools import runs
from penstock.console.web.context import Context, Reader
from penstock.console.web.jobs import job_file, job_state
from penstock.console.web.problems import RESPONSES
from penstock.protocol.errors import PenstockError

router = APIRouter(prefix="/v1", tags=["read"], responses=RESPONSES)
routers = [router]


class RunItem(BaseModel):
    """One run of the list."""

    run: str = Field(description="Its name.")
    state: str = Field(description="created, queued, running, paused, stopped, failed or finished.")
    step: int | None = None
    accuracy: float | None = None
    reward: float | None = None
    eval_reward: float | None = None
    when: str = Field("", description="ISO 8601: when it last changed.")


def _state(folder: Path, otherwise: str) -> str:
    try:
        return job_state.of_folder(folder, job_file.read(folder), ask=False).state
    except PenstockError:
        return otherwise


@router.get("/runs")
def list_runs(web: Context, _: Reader) -> list[RunItem]:
    """List the runs in the folder of runs, newest first."""
    lines = runs.list_folder(web.runs_dir)
    return [
        RunItem(
            run=line.run,
            state=_state(Path(line.folder), line.state),
            step=line.step,
            accuracy=line.accuracy,
            reward=line.reward,
            eval_reward=line.eval_reward,
            when=line.when,
        )
        for line in lines
    ]
