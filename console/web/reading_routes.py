"""Serve the routes that read: the list of runs, and what a run's folder, NATS and S3 have about it.

Every answer is bounded: points, rows, texts, bytes read of S3 and seconds. The routes about groups
read the record and packs in S3: each request has a budget, and few run at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from pydantic import BaseModel, Field

from penstock.console.web.context import Context, Reader, RunName, WebContext
from penstock.console.web.jobs import job_file
from penstock.console.web.problems import RESPONSES, Problem
from penstock.console.web.reading import documents, recorded_groups
from penstock.console.web.reading.open_runs import OpenRuns, UnknownRun, listed_runs
from penstock.console.web.reading.page_view import MAX_POINTS
from penstock.console.web.reading.recorded_groups import (
    MAX_NUMBER,
    MAX_TOKENS,
    GroupQuery,
    Limit,
    QueryRefused,
    Step,
    TrajectoryQuery,
    group_document,
    token_document,
)
from penstock.console.web.reading.run_reading import RunReading
from penstock.protocol.errors import PenstockError
from penstock.protocol.subjects import RUN_ID

router = APIRouter(prefix="/v1", tags=["read"], responses=RESPONSES)
_MAX_SCANS = 4  # requests that read S3 at a time
_SCAN_WAIT_S = 10.0
GroupId = Annotated[str, Query(min_length=1, max_length=200)]
Chapter = Annotated[int | None, Query(ge=1, le=10**9)]
_GUIDE_NAMES = {"loss": "policy_loss", "kl_behaviour": "kl_divergence", "kl_reference": "kl_divergence"}
_scans = threading.BoundedSemaphore(_MAX_SCANS)


@contextlib.asynccontextmanager
async def closing_runs(app: FastAPI) -> AsyncIterator[None]:
    yield
    opened: OpenRuns | None = getattr(app.state, "open_runs", None)
    if opened is not None:
        opened.close()


def where(web: WebContext) -> tuple[tuple[str, ...], Mapping[str, str]]:
    return (*web.arguments, f"run.dir={web.runs_dir}"), web.environ


async def open_runs(request: Request, web: Context) -> OpenRuns:
    state = request.app.state
    if not hasattr(state, "open_runs"):
        state.open_runs = OpenRuns(*where(web))
    return state.open_runs


Runs = Annotated[OpenRuns, Depends(open_runs)]


def reading_of(run: RunName, runs: Runs, _: Reader) -> RunReading:
    """Return the reader of a run, opening it at its first request; a problem 404 if there is no such run."""
    return open_run(runs, run)


def open_run(runs: OpenRuns, run: str) -> RunReading:
    """Return the reader of a run; a problem 404 if there is no such run."""
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
    loss: float | None = Field(None, description="Of the last step, for sft, dpo and rm, which have no rewards.")
    eval_loss: float | None = None
    tags: list[str] = Field([], description="Words that its user gave it.")
    varied: dict[str, Any] = Field({}, description="The settings that its name has, as of a sweep: NAME-lr-1e-6.")
    when: str = Field("", description="ISO 8601: when it last changed.")
    curve: list[float] = Field(
        [],
        description="The reward, or the loss of sft, dpo and rm, at no more than 60 points of the run, for a small drawing.",
    )


def _state(folder: Path, otherwise: str) -> str:
    """Return the state of a run's job; a run that was stopped here may be running elsewhere."""
    try:
        state = job_file.run_state(folder, job_file.read(folder), ask=False).state
    except PenstockError:
        return otherwise
    return otherwise if state == "stopped" else state


@router.get("/runs")
def list_runs(web: Context, _: Reader) -> list[RunItem]:
    """List the runs in the folder of runs, and those on the NATS server that was configured, newest first."""
    rows = listed_runs(*where(web))
    folders = [web.runs_dir / row["run"] for row in rows]
    more = [
        {"state": _state(f, row["state"]), "tags": job_file.notes(f)["tags"]}
        for f, row in zip(folders, rows, strict=True)
    ]
    return [RunItem(**{**row, **own}) for row, own in zip(rows, more, strict=True)]


@router.get("/settings-differences")
def settings_differences(
    runs: Runs,
    _: Reader,
    run: Annotated[list[Annotated[str, Field(pattern=f"^{RUN_ID.pattern}$")]], Query(min_length=2, max_length=20)],
) -> dict[str, Any]:
    """Return the settings in which two to twenty runs differ."""
    return documents.differences({run_id: open_run(runs, run_id).config() for run_id in run})


@router.get("/runs/{run}/summary")
def summary(reading: Reading) -> dict[str, Any]:
    """Return the overview: state, reward, held-out accuracy, staleness, who waits, healthy bands, diagnoses."""
    document = reading.summary()
    return document | {"state": _state(reading.folder, document["state"])}


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


@router.get("/runs/{run}/checkpoints")
def checkpoints(reading: Reading) -> list[dict[str, Any]]:
    """Return the checkpoints that a script logged, or the versions of a run: step, path and results of evaluations."""
    return reading.checkpoints()


@router.get("/runs/{run}/rows")
def metric_rows(
    reading: Reading, limit: Annotated[int, Query(ge=1, le=MAX_POINTS)] = MAX_POINTS
) -> list[dict[str, Any]]:
    """Return the newest steps one by one, with their figures, also under the names of the platform guide."""
    last = reading.metrics([], first=0, last=None, points=2)["last"] or 0
    found = reading.metrics(None, first=max(0, last + 1 - limit), last=None, points=MAX_POINTS)
    figures = {name: series["mean"] for name, series in found["figures"].items()}
    columns = {guide: figures[own] for own, guide in _GUIDE_NAMES.items() if own in figures} | figures
    columns |= {"step": found["steps"], "at": found["at"]}
    return [
        {name: values[row] for name, values in columns.items() if values[row] is not None}
        for row in range(len(found["steps"]))
    ]


@router.get("/runs/{run}/services")
@router.get("/runs/{run}/workers", include_in_schema=False)  # its name in earlier releases
def services(reading: Reading) -> dict[str, Any]:
    """Return every service with its figures, and the least, mean and greatest of each by role."""
    return reading.services()


@router.get("/runs/{run}/versions")
def versions(reading: Reading, before: Step = None, limit: Limit = 50) -> dict[str, Any]:
    """Return the newest versions: published, adopted by which worker, bytes and pauses."""
    return reading.versions(before=before, limit=limit)


@router.get("/runs/{run}/groups")
def groups(reading: Reading, query: Annotated[GroupQuery, Depends()]) -> dict[str, Any]:
    """Return the groups of the run's record, the newest first; ``next`` is the cursor of the rest."""
    with _scanning(), reading.groups() as stored_groups:
        return stored_groups.page(query)


@router.get("/runs/{run}/trajectories")
def trajectories(reading: Reading, query: Annotated[TrajectoryQuery, Depends()]) -> dict[str, Any]:
    """Return trajectories one by one, the newest first; a group's are never divided between two pages."""
    return groups(reading, query)


@router.get("/runs/{run}/group")
def group(reading: Reading, group_id: GroupId, chapter: Chapter = None) -> dict[str, Any]:
    """Return one group with its trajectories: texts, rewards and parts, ratios, turns of an episode."""
    with _scanning():
        return group_document(*reading.group(group_id, chapter))


@router.get("/runs/{run}/tokens")
def tokens(
    reading: Reading,
    group_id: GroupId,
    trajectory: Annotated[int, Query(ge=0, le=10**6)] = 0,
    row: Annotated[int, Query(ge=0, le=10**6)] = 0,
    first: Annotated[int, Query(alias="from", ge=0, le=10**9)] = 0,
    count: Annotated[int, Query(ge=1, le=MAX_TOKENS)] = 1024,
    chapter: Chapter = None,
) -> dict[str, Any]:
    """Return the tokens of one row: log-probabilities of sampler and trainer, their ratio, loss mask, the version that sampled each.

    ``current_logprobs`` are those of the policy in training before it learned from the token, ``ratios`` are exp(current -
    behaviour), ``outcomes`` say whether the loss clipped or rejected the token; where they are missing ``current_problem`` says why.
    """
    with _scanning():
        _, stored, current, problem = reading.group(group_id, chapter)
        if stored is None or current is None:
            raise QueryRefused(f"the tokens of group {group_id} cannot be shown: {problem}")
        texts = recorded_groups.token_reader(reading.folder, reading.known_config())
        return token_document(stored, current, trajectory, row, first, count, texts)


@router.get("/runs/{run}/lineage")
def lineage(reading: Reading, version: Step = None) -> dict[str, Any]:
    """Return the groups, rewards and parents of a version; without one, of the last."""
    with _scanning(), reading.groups() as stored_groups:
        return stored_groups.lineage(version)


@contextlib.contextmanager
def _scanning() -> Iterator[None]:
    if not _scans.acquire(timeout=_SCAN_WAIT_S):
        raise Problem(503, f"{_MAX_SCANS} other requests are reading groups", fix="try again")
    try:
        yield
    finally:
        _scans.release()
