"""The routes that read: the list of runs, and what a run's folder, NATS and S3 have about it; and the page's two actions.

Every answer is bounded: points, rows, texts, bytes read of S3 and seconds. Nothing here writes to a run but `resend`.
``routers`` are the routers of this and of further files; `app.create_app` serves the routes of each of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field

from penstock.console.tools.rewards import RewardServiceError
from penstock.console.web import reading_group_routes
from penstock.console.web.context import Context, Reader, Runner, WebContext
from penstock.console.web.jobs import job_file, job_state
from penstock.console.web.problems import RESPONSES, Problem
from penstock.console.web.reading import dead_letter_pages, reward_endpoints, run_list, settings_difference
from penstock.console.web.reading.run_reading import RunReading
from penstock.console.web.reading.step_series import MAX_POINTS
from penstock.console.web.reading_context import MAX_NUMBER, Limit, Reading, Runs, Step, open_run, where
from penstock.protocol.errors import PenstockError
from penstock.protocol.subjects import RUN_ID

_REWARD_URL, _REWARD_TOKEN = "PENSTOCK_CONSOLE_REWARD_URL", "PENSTOCK_CONSOLE_REWARD_TOKEN_FILE"

Number = Annotated[int, PathParameter(ge=1, le=MAX_NUMBER)]


router = APIRouter(prefix="/v1", tags=["read"], responses=RESPONSES)
routers = [router, reading_group_routes.router]


class RunItem(BaseModel):
    """One run of the list."""

    run: str = Field(description="Its name.")
    state: str = Field(description="created, queued, running, paused, stopped, failed or finished.")
    step: int | None = None
    accuracy: float | None = None
    reward: float | None = None
    eval_reward: float | None = None
    loss: float | None = Field(None, description="Of the last step, for sft, dpo and rm, which have no rewards.")
    eval_loss: float | None = None
    when: str = Field("", description="ISO 8601: when it last changed.")
    curve: list[float] = Field(
        [],
        description="The reward, or the loss of sft, dpo and rm, at no more than 60 points of the run, for a small drawing.",
    )


class TestedCompletions(BaseModel):
    """Completions of one prompt to score by hand."""

    model_config = ConfigDict(extra="forbid")

    reward: str = Field(min_length=1, max_length=200)
    prompt: str = Field("", max_length=20_000)
    completions: list[Annotated[str, Field(max_length=20_000)]] = Field(min_length=1, max_length=16)
    data_source: str = Field("", max_length=200)
    ground_truth: str | None = Field(None, max_length=20_000)


def _state(folder: Path, otherwise: str) -> str:
    """Return the state of a run's job; a run that was stopped here may be running elsewhere."""
    try:
        found = job_state.of_folder(folder, job_file.read(folder), ask=False).state
    except PenstockError:
        return otherwise
    return otherwise if found == "stopped" else found


@router.get("/runs")
def list_runs(web: Context, _: Reader) -> list[RunItem]:
    """List the runs in the folder of runs, and those on the NATS server that was configured, newest first."""
    rows = run_list.rows(*where(web))
    return [RunItem(**{**row, "state": _state(web.runs_dir / row["run"], row["state"])}) for row in rows]


@router.get("/settings-differences")
def settings_differences(
    runs: Runs,
    _: Reader,
    run: Annotated[list[Annotated[str, Field(pattern=f"^{RUN_ID.pattern}$")]], Query(min_length=2, max_length=4)],
) -> dict[str, Any]:
    """Return the settings in which two to four runs differ."""
    return settings_difference.differences({one: open_run(runs, one).config() for one in run})


@router.get("/runs/{run}/summary")
def summary(reading: Reading) -> dict[str, Any]:
    """Return the overview: state, reward, held-out accuracy, staleness, who waits, healthy bands, diagnoses."""
    found = reading.summary()
    return found | {"state": _state(reading.folder, found["state"])}


@router.get("/runs/{run}/metrics")
def metrics(
    reading: Reading,
    first: Annotated[int, Query(alias="from", ge=0, le=MAX_NUMBER)] = 0,
    last: Annotated[int | None, Query(alias="to", ge=0, le=MAX_NUMBER)] = None,
    points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 600,
    name: Annotated[list[Annotated[str, Field(max_length=120)]] | None, Query(max_length=60)] = None,
) -> dict[str, Any]:
    """Return the figures of the steps in at most ``points`` buckets, each with its mean, least and greatest value."""
    return reading.metrics(name, first=first, last=last, points=points)


@router.get("/runs/{run}/workers")
def workers(reading: Reading) -> dict[str, Any]:
    """Return every service with its figures, and the least, mean and greatest of each by role."""
    return reading.fleet()


@router.get("/runs/{run}/versions")
def versions(reading: Reading, before: Step = None, limit: Limit = 50) -> dict[str, Any]:
    """Return the newest versions: published, adopted by which worker, bytes and pauses."""
    return reading.versions(before=before, limit=limit)


@router.get("/runs/{run}/rewards")
def rewards(reading: Reading, web: Context) -> dict[str, Any]:
    """Return errors by reason, scorers, the distribution of the newest rewards, and the reward service's endpoints."""
    return reading.rewards() | {"service": reward_endpoints.endpoints(*_reward_service(reading, web))}


@router.post("/runs/{run}/rewards/test")
def score_by_hand(_: Runner, reading: Reading, web: Context, tested: TestedCompletions) -> dict[str, Any]:
    """Score completions by hand, by the code that scores the run's groups."""
    body = {"reward": tested.reward, "groups": [tested.model_dump(exclude={"reward"})]}
    try:
        return reward_endpoints.score(*_reward_service(reading, web), body)
    except RewardServiceError as err:
        raise Problem(503, str(err)) from None


@router.get("/runs/{run}/dead-letters")
def dead_letters(reading: Reading, web: Context, before: Step = None, limit: Limit = 50) -> dict[str, Any]:
    """Return the newest dead letters."""
    return dead_letter_pages.page(reading.run_id, *where(web), before=before, limit=limit)


@router.get("/runs/{run}/dead-letters/{number}")
def dead_letter(reading: Reading, web: Context, number: Number) -> dict[str, Any]:
    """Return one dead letter with its prompts and completions."""
    return dead_letter_pages.show(reading.run_id, number, *where(web))


@router.post("/runs/{run}/dead-letters/{number}/resend")
def resend(_: Runner, reading: Reading, web: Context, number: Number, once_more: bool = False) -> dict[str, Any]:
    """Send one dead letter again."""
    return dead_letter_pages.resend(reading.run_id, number, *where(web), once_more=once_more)


def _reward_service(reading: RunReading, web: WebContext) -> tuple[str, Path | None]:
    """Return the URL of a run's reward service and the file of its token, which is sent to the URL that was set only."""
    url = web.environ.get(_REWARD_URL)
    file = web.environ.get(_REWARD_TOKEN)
    return reward_endpoints.service_url(reading.folder, url), Path(file) if url and file else None
