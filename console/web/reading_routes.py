"""The routes that read: the list of runs, and what a run's folder, NATS and S3 have about it; and the page's two actions.

Every answer is bounded: points, rows, texts, bytes read of S3 and seconds. Nothing here writes to a run but `resend`.
``routers`` are the routers of this and of further files; `app.create_app` includes each of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field

from penstock.console.tools.rewards import RewardServiceError
from penstock.console.web.context import Context, Reader, RunName, Runner, WebContext
from penstock.console.web.jobs import job_file, job_state
from penstock.console.web.problems import RESPONSES, Problem
from penstock.console.web.reading import dead_letter_pages, reward_endpoints, run_list, settings_difference, token_texts
from penstock.console.web.reading.group_detail import MAX_TOKENS, group_document, token_document
from penstock.console.web.reading.open_runs import OpenRuns, UnknownRun
from penstock.console.web.reading.recorded_groups import GroupFilter, QueryRefused
from penstock.console.web.reading.run_reading import RunReading
from penstock.console.web.reading.step_series import MAX_POINTS
from penstock.protocol.errors import PenstockError
from penstock.protocol.subjects import RUN_ID

_MAX = 2**53
_MAX_SCANS = 4  # requests that read S3 at a time
_SCAN_WAIT_S = 10.0
_REWARD_URL, _REWARD_TOKEN = "PENSTOCK_CONSOLE_REWARD_URL", "PENSTOCK_CONSOLE_REWARD_TOKEN_FILE"

Step = Annotated[int | None, Query(ge=0, le=_MAX)]
Limit = Annotated[int, Query(ge=1, le=100)]
Number = Annotated[int, PathParameter(ge=1, le=_MAX)]
GroupId = Annotated[str, Query(min_length=1, max_length=200)]
Finite = Annotated[float | None, Query(allow_inf_nan=False)]
Text = Annotated[str, Query(max_length=200)]


@contextlib.asynccontextmanager
async def _closing_runs(app: FastAPI) -> AsyncIterator[None]:
    yield
    opened: OpenRuns | None = getattr(app.state, "open_runs", None)
    if opened is not None:
        opened.close()


router = APIRouter(prefix="/v1", tags=["read"], responses=RESPONSES, lifespan=_closing_runs)
routers = [router]
_scans = threading.BoundedSemaphore(_MAX_SCANS)
_opening = threading.Lock()


def open_runs(request: Request, web: Context) -> OpenRuns:
    """Return the runs that this server watches."""
    state = request.app.state
    with _opening:
        if not hasattr(state, "open_runs"):
            state.open_runs = OpenRuns(*_where(web))
        return state.open_runs


Runs = Annotated[OpenRuns, Depends(open_runs)]


def reading_of(run: RunName, runs: Runs, _: Reader) -> RunReading:
    """Return the reader of a run, opening it if nobody looked at it before; a problem 404 if there is no such run."""
    return _open(runs, run)


def _open(runs: OpenRuns, run: str) -> RunReading:
    try:
        return runs.get(run)
    except UnknownRun as err:
        raise Problem(404, str(err), fix="list the runs with GET /v1/runs") from None


Reading = Annotated[RunReading, Depends(reading_of)]


class RunItem(BaseModel):
    """One run of the list."""

    run: str = Field(description="Its name.")
    state: str = Field(description="created, queued, running, paused, stopped, failed or finished.")
    step: int | None = None
    accuracy: float | None = None
    reward: float | None = None
    eval_reward: float | None = None
    when: str = Field("", description="ISO 8601: when it last changed.")
    curve: list[float] = Field([], description="The reward of at most 60 points of the run, for a small drawing.")


class TestedCompletions(BaseModel):
    """Completions of one prompt to score by hand."""

    model_config = ConfigDict(extra="forbid")

    reward: str = Field(min_length=1, max_length=200)
    prompt: str = Field("", max_length=20_000)
    completions: list[Annotated[str, Field(max_length=20_000)]] = Field(min_length=1, max_length=16)
    data_source: str = Field("", max_length=200)
    ground_truth: str | None = Field(None, max_length=20_000)


@dataclass(frozen=True, slots=True)
class _Filter:
    """The query of a list of groups or trajectories."""

    step_from: Step = None
    step_to: Step = None
    reward_min: Finite = None
    reward_max: Finite = None
    status: Literal["trained", "evaluated", "dropped", "in_flight", ""] = ""
    prompt: Text = ""
    cursor: Annotated[str, Query(max_length=40)] = ""
    limit: Limit = 50
    texts: bool = True

    def wanted(self, *, each_trajectory: bool) -> GroupFilter:
        return GroupFilter(
            step_from=self.step_from, step_to=self.step_to, reward_min=self.reward_min, reward_max=self.reward_max,
            status=self.status or None, text=self.prompt, each_trajectory=each_trajectory,
        )  # fmt: skip


Wanted = Annotated[_Filter, Depends()]


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
    rows = run_list.rows(*_where(web))
    return [RunItem(**{**row, "state": _state(web.runs_dir / row["run"], row["state"])}) for row in rows]


@router.get("/settings-differences")
def settings_differences(
    runs: Runs,
    _: Reader,
    run: Annotated[list[Annotated[str, Field(pattern=f"^{RUN_ID.pattern}$")]], Query(min_length=2, max_length=4)],
) -> dict[str, Any]:
    """Return the settings in which two to four runs differ."""
    return settings_difference.differences({one: _open(runs, one).config() for one in run})


@router.get("/runs/{run}/summary")
def summary(reading: Reading) -> dict[str, Any]:
    """Return the overview: state, reward, held-out accuracy, staleness, who waits, healthy bands, diagnoses."""
    found = reading.summary()
    return found | {"state": _state(reading.folder, found["state"])}


@router.get("/runs/{run}/metrics")
def metrics(
    reading: Reading,
    first: Annotated[int, Query(alias="from", ge=0, le=_MAX)] = 0,
    last: Annotated[int | None, Query(alias="to", ge=0, le=_MAX)] = None,
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


@router.get("/runs/{run}/groups")
def groups(reading: Reading, query: Wanted) -> dict[str, Any]:
    """Return the groups of the run's record, the newest first; ``next`` is the cursor of the rest."""
    with _scanning(), reading.groups() as found:
        wanted = query.wanted(each_trajectory=False)
        return found.page(wanted, cursor=query.cursor, limit=query.limit, texts=query.texts)


@router.get("/runs/{run}/trajectories")
def trajectories(reading: Reading, query: Wanted) -> dict[str, Any]:
    """Return trajectories one by one, the newest first; a group's are never divided between two pages."""
    with _scanning(), reading.groups() as found:
        wanted = query.wanted(each_trajectory=True)
        return found.page(wanted, cursor=query.cursor, limit=query.limit, texts=query.texts)


@router.get("/runs/{run}/group")
def group(
    reading: Reading, group_id: GroupId, chapter: Annotated[int | None, Query(ge=1, le=10**9)] = None
) -> dict[str, Any]:
    """Return one group with its trajectories: texts, rewards and parts, turns of an episode."""
    with _scanning(), reading.groups() as found:
        entry = found.find(group_id, chapter=chapter)
        return group_document(entry, *found.group(entry))


@router.get("/runs/{run}/tokens")
def tokens(
    reading: Reading,
    group_id: GroupId,
    trajectory: Annotated[int, Query(ge=0, le=10**6)] = 0,
    row: Annotated[int, Query(ge=0, le=10**6)] = 0,
    first: Annotated[int, Query(alias="from", ge=0, le=10**9)] = 0,
    count: Annotated[int, Query(ge=1, le=MAX_TOKENS)] = 1024,
    chapter: Annotated[int | None, Query(ge=1, le=10**9)] = None,
) -> dict[str, Any]:
    """Return the tokens of one row: behaviour log-probabilities, loss mask, the version that sampled each."""
    with _scanning():
        with reading.groups() as found:
            entry = found.find(group_id, chapter=chapter)
            stored, problem = found.group(entry)
        if stored is None:
            raise QueryRefused(f"the tokens of group {group_id} cannot be shown: {problem}")
        texts = token_texts.reader(reading.folder, reading.known_config())
        return token_document(stored, trajectory, row, first, count, texts)


@router.get("/runs/{run}/lineage")
def lineage(reading: Reading, version: Step = None) -> dict[str, Any]:
    """Return the groups, rewards and parents of a version; without one, of the last."""
    with _scanning(), reading.groups() as found:
        return found.lineage(version)


@router.get("/runs/{run}/rewards")
def rewards(reading: Reading, web: Context) -> dict[str, Any]:
    """Return errors by reason, scorers, the distribution of the newest rewards, and the reward service's endpoints."""
    return reading.rewards() | {"service": reward_endpoints.endpoints(*_reward_service(reading, web))}


@router.post("/runs/{run}/rewards/test")
def score_by_hand(reading: Reading, web: Context, _: Runner, tested: TestedCompletions) -> dict[str, Any]:
    """Score completions by hand, by the code that scores the run's groups."""
    body = {"reward": tested.reward, "groups": [tested.model_dump(exclude={"reward"})]}
    try:
        return reward_endpoints.score(*_reward_service(reading, web), body)
    except RewardServiceError as err:
        raise Problem(503, str(err)) from None


@router.get("/runs/{run}/dead-letters")
def dead_letters(reading: Reading, web: Context, before: Step = None, limit: Limit = 50) -> dict[str, Any]:
    """Return the newest dead letters."""
    return dead_letter_pages.page(reading.run_id, *_where(web), before=before, limit=limit)


@router.get("/runs/{run}/dead-letters/{number}")
def dead_letter(reading: Reading, web: Context, number: Number) -> dict[str, Any]:
    """Return one dead letter with its prompts and completions."""
    return dead_letter_pages.show(reading.run_id, number, *_where(web))


@router.post("/runs/{run}/dead-letters/{number}/resend")
def resend(reading: Reading, web: Context, _: Runner, number: Number, once_more: bool = False) -> dict[str, Any]:
    """Send one dead letter again."""
    return dead_letter_pages.resend(reading.run_id, number, *_where(web), once_more=once_more)


def _where(web: WebContext) -> tuple[tuple[str, ...], Mapping[str, str]]:
    return (*web.arguments, f"run.dir={web.runs_dir}"), web.environ


def _reward_service(reading: RunReading, web: WebContext) -> tuple[str, Path | None]:
    """Return the URL of a run's reward service and the file of its token, which is sent to the URL that was set only."""
    url = web.environ.get(_REWARD_URL)
    file = web.environ.get(_REWARD_TOKEN)
    return reward_endpoints.service_url(reading.folder, url), Path(file) if url and file else None


@contextlib.contextmanager
def _scanning() -> Iterator[None]:
    if not _scans.acquire(timeout=_SCAN_WAIT_S):
        raise Problem(503, f"{_MAX_SCANS} other requests are reading groups", fix="try again")
    try:
        yield
    finally:
        _scans.release()
