"""The GET routes with the figures of runs, and the two requests of the page that change something outside of them.

Every answer is bounded: points, rows, texts, bytes read of S3 and seconds. Nothing here writes to a run but `resend`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from penstock.console.tools.rewards import RewardServiceError
from penstock.console.web.reading import dead_letter_pages, reward_endpoints, settings_difference, token_texts
from penstock.console.web.reading.group_detail import MAX_TOKENS, group_document, token_document
from penstock.console.web.reading.open_runs import OpenRuns, UnknownRun
from penstock.console.web.reading.recorded_groups import GroupFilter, QueryRefused
from penstock.console.web.reading.step_series import MAX_POINTS
from penstock.protocol.errors import BlobError, BusError, ConfigError, MissingStream, PenstockError, RecordBroken
from penstock.protocol.subjects import RUN_ID

_MAX = 2**53
_MAX_SCANS = 4  # requests that read S3 at a time
_SCAN_WAIT_S = 10.0

RunId = Annotated[str, Path(pattern=f"^{RUN_ID.pattern}$")]
Step = Annotated[int | None, Query(ge=0, le=_MAX)]
Limit = Annotated[int, Query(ge=1, le=100)]
Number = Annotated[int, Path(ge=1, le=_MAX)]
GroupId = Annotated[str, Query(min_length=1, max_length=200)]
Finite = Annotated[float | None, Query(allow_inf_nan=False)]
Text = Annotated[str, Query(max_length=200)]


@dataclass(frozen=True, slots=True)
class ReadingContext:
    """What the routes read, and the reward service that the page's test calls."""

    runs: OpenRuns
    arguments: Sequence[str]
    environ: Mapping[str, str]
    reward_url: str | None = None
    reward_token: FilePath | None = None


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


def router(context: ReadingContext, *, may_read: Callable[..., Any], may_run: Callable[..., Any]) -> APIRouter:
    """Return the routes; ``may_read`` and ``may_run`` are dependencies that check the role of the caller."""
    found = APIRouter(prefix="/v1/runs/{run_id}", dependencies=[Depends(may_read)])
    _figures(found, context)
    _groups(found, context)
    _rewards(found, context, may_run)
    _dead_letters(found, context, may_run)
    return found


def comparison_router(context: ReadingContext, *, may_read: Callable[..., Any]) -> APIRouter:
    """Return the route that compares runs."""
    found = APIRouter(dependencies=[Depends(may_read)])

    @found.get("/v1/settings-differences")
    def settings_differences(
        run: Annotated[list[Annotated[str, Field(pattern=f"^{RUN_ID.pattern}$")]], Query(min_length=2, max_length=4)],
    ) -> dict[str, Any]:
        """Return the settings in which two to four runs differ."""
        with _answering():
            return settings_difference.differences({one: context.runs.get(one).config() for one in run})

    return found


def _figures(routes: APIRouter, context: ReadingContext) -> None:
    runs = context.runs

    @routes.get("/summary")
    def summary(run_id: RunId) -> dict[str, Any]:
        """Return the overview: state, reward, held-out accuracy, staleness, who waits, healthy bands, diagnoses."""
        with _answering():
            return runs.get(run_id).summary()

    @routes.get("/metrics")
    def metrics(
        run_id: RunId,
        first: Annotated[int, Query(alias="from", ge=0, le=_MAX)] = 0,
        last: Annotated[int | None, Query(alias="to", ge=0, le=_MAX)] = None,
        points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 600,
        name: Annotated[list[Annotated[str, Field(max_length=120)]] | None, Query(max_length=60)] = None,
    ) -> dict[str, Any]:
        """Return the figures of the steps in at most ``points`` buckets, each with its mean, least and greatest value."""
        with _answering():
            return runs.get(run_id).metrics(name, first=first, last=last, points=points)

    @routes.get("/workers")
    def workers(run_id: RunId) -> dict[str, Any]:
        """Return every service with its figures, and the least, mean and greatest of each by role."""
        with _answering():
            return runs.get(run_id).fleet()

    @routes.get("/versions")
    def versions(run_id: RunId, before: Step = None, limit: Limit = 50) -> dict[str, Any]:
        """Return the newest versions: published, adopted by which worker, bytes and pauses."""
        with _answering():
            return runs.get(run_id).versions(before=before, limit=limit)


def _groups(routes: APIRouter, context: ReadingContext) -> None:
    runs, scans = context.runs, threading.BoundedSemaphore(_MAX_SCANS)

    @routes.get("/groups")
    def groups(run_id: RunId, query: Wanted) -> dict[str, Any]:
        """Return the groups of the run's record, the newest first; ``next`` is the cursor of the rest."""
        with _answering(), _one_of(scans), runs.get(run_id).groups() as found:
            wanted = query.wanted(each_trajectory=False)
            return found.page(wanted, cursor=query.cursor, limit=query.limit, texts=query.texts)

    @routes.get("/trajectories")
    def trajectories(run_id: RunId, query: Wanted) -> dict[str, Any]:
        """Return trajectories one by one, the newest first; a group's are never divided between two pages."""
        with _answering(), _one_of(scans), runs.get(run_id).groups() as found:
            wanted = query.wanted(each_trajectory=True)
            return found.page(wanted, cursor=query.cursor, limit=query.limit, texts=query.texts)

    @routes.get("/group")
    def group(
        run_id: RunId, group_id: GroupId, chapter: Annotated[int | None, Query(ge=1, le=10**9)] = None
    ) -> dict[str, Any]:
        """Return one group with its trajectories: texts, rewards and parts, turns of an episode."""
        with _answering(), _one_of(scans), runs.get(run_id).groups() as found:
            entry = found.find(group_id, chapter=chapter)
            return group_document(entry, *found.group(entry))

    @routes.get("/tokens")
    def tokens(
        run_id: RunId,
        group_id: GroupId,
        trajectory: Annotated[int, Query(ge=0, le=10**6)] = 0,
        row: Annotated[int, Query(ge=0, le=10**6)] = 0,
        first: Annotated[int, Query(alias="from", ge=0, le=10**9)] = 0,
        count: Annotated[int, Query(ge=1, le=MAX_TOKENS)] = 1024,
        chapter: Annotated[int | None, Query(ge=1, le=10**9)] = None,
    ) -> dict[str, Any]:
        """Return the tokens of one row: behaviour log-probabilities, loss mask, the version that sampled each."""
        with _answering(), _one_of(scans):
            reading = runs.get(run_id)
            with reading.groups() as found:
                entry = found.find(group_id, chapter=chapter)
                stored, problem = found.group(entry)
            if stored is None:
                raise QueryRefused(f"the tokens of group {group_id} cannot be shown: {problem}")
            texts = token_texts.reader(reading.folder, reading.known_config())
            return token_document(stored, trajectory, row, first, count, texts)

    @routes.get("/lineage")
    def lineage(run_id: RunId, version: Step = None) -> dict[str, Any]:
        """Return the groups, rewards and parents of a version; without one, of the last."""
        with _answering(), _one_of(scans), runs.get(run_id).groups() as found:
            return found.lineage(version)


def _rewards(routes: APIRouter, context: ReadingContext, may_run: Callable[..., Any]) -> None:
    def service(run_id: str) -> tuple[str, FilePath | None]:
        url = reward_endpoints.service_url(context.runs.get(run_id).folder, context.reward_url)
        return url, context.reward_token if context.reward_url is not None else None

    @routes.get("/rewards")
    def rewards(run_id: RunId) -> dict[str, Any]:
        """Return errors by reason, scorers, the distribution of the newest rewards, and the reward service's endpoints."""
        with _answering():
            return context.runs.get(run_id).rewards() | {"service": reward_endpoints.endpoints(*service(run_id))}

    @routes.post("/rewards/test", dependencies=[Depends(may_run)])
    def test_reward(run_id: RunId, tested: TestedCompletions) -> Any:
        """Score completions by hand, by the code that scores the run's groups."""
        with _answering():
            group = tested.model_dump(exclude={"reward"})
            return reward_endpoints.score(*service(run_id), {"reward": tested.reward, "groups": [group]})


def _dead_letters(routes: APIRouter, context: ReadingContext, may_run: Callable[..., Any]) -> None:
    where = context.arguments, context.environ

    @routes.get("/dead-letters")
    def dead_letters(run_id: RunId, before: Step = None, limit: Limit = 50) -> dict[str, Any]:
        """Return the newest dead letters."""
        with _answering():
            context.runs.get(run_id)
            return dead_letter_pages.page(run_id, *where, before=before, limit=limit)

    @routes.get("/dead-letters/{number}")
    def dead_letter(run_id: RunId, number: Number) -> dict[str, Any]:
        """Return one dead letter with its prompts and completions."""
        with _answering():
            context.runs.get(run_id)
            return dead_letter_pages.show(run_id, number, *where)

    @routes.post("/dead-letters/{number}/resend", dependencies=[Depends(may_run)])
    def resend(run_id: RunId, number: Number, once_more: bool = False) -> dict[str, Any]:
        """Send one dead letter again."""
        with _answering():
            context.runs.get(run_id)
            return dead_letter_pages.resend(run_id, number, *where, once_more=once_more)


@contextlib.contextmanager
def _one_of(scans: threading.BoundedSemaphore) -> Iterator[None]:
    if not scans.acquire(timeout=_SCAN_WAIT_S):
        raise HTTPException(503, f"{_MAX_SCANS} other requests are reading groups; try again")
    try:
        yield
    finally:
        scans.release()


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    """Answer the errors of the readers with their status and text."""
    try:
        yield
    except PenstockError as err:
        raise HTTPException(_status(err), str(err)[:2000]) from None


def _status(err: PenstockError) -> int:
    if isinstance(err, (UnknownRun, RecordBroken, MissingStream)):
        return 404
    if isinstance(err, QueryRefused):
        return 409
    if isinstance(err, RewardServiceError):
        return 502
    if isinstance(err, (BusError, BlobError)):
        return 503
    return 400 if isinstance(err, ConfigError) else 500
