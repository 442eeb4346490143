"""The reading routes about groups: lists with filters, one group, its tokens, and the lineage of a version.

They read the record and packs in S3; each request has a budget, and few run at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query

from penstock.console.web.problems import RESPONSES, Problem
from penstock.console.web.reading import token_texts
from penstock.console.web.reading.group_detail import MAX_TOKENS, group_document, token_document
from penstock.console.web.reading.recorded_groups import GroupFilter, QueryRefused
from penstock.console.web.reading_context import Limit, Reading, Step

_MAX_SCANS = 4  # requests that read S3 at a time
_SCAN_WAIT_S = 10.0

GroupId = Annotated[str, Query(min_length=1, max_length=200)]
Finite = Annotated[float | None, Query(allow_inf_nan=False)]
Text = Annotated[str, Query(max_length=200)]

router = APIRouter(prefix="/v1", tags=["read"], responses=RESPONSES)
_scans = threading.BoundedSemaphore(_MAX_SCANS)


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
    """Return one group with its trajectories: texts, rewards and parts, ratios, turns of an episode."""
    with _scanning():
        storing = reading.storing()
        with reading.groups() as found:
            entry = found.find(group_id, chapter=chapter)
            stored, problem = found.group(entry)
            current = None if stored is None else found.current(entry, stored, storing)
        return group_document(entry, stored, current, problem)


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
    """Return the tokens of one row: log-probabilities of sampler and trainer, their ratio, loss mask, the version that sampled each.

    ``current_logprobs`` are those of the policy in training before it learned from the token, ``ratios`` are exp(current -
    behaviour), ``outcomes`` say whether the loss clipped or rejected the token; where they are missing ``current_problem`` says why.
    """
    with _scanning():
        storing = reading.storing()
        with reading.groups() as found:
            entry = found.find(group_id, chapter=chapter)
            stored, problem = found.group(entry)
            if stored is None:
                raise QueryRefused(f"the tokens of group {group_id} cannot be shown: {problem}")
            current = found.current(entry, stored, storing)
        texts = token_texts.reader(reading.folder, reading.known_config())
        return token_document(stored, current, trajectory, row, first, count, texts)


@router.get("/runs/{run}/lineage")
def lineage(reading: Reading, version: Step = None) -> dict[str, Any]:
    """Return the groups, rewards and parents of a version; without one, of the last."""
    with _scanning(), reading.groups() as found:
        return found.lineage(version)


@contextlib.contextmanager
def _scanning() -> Iterator[None]:
    if not _scans.acquire(timeout=_SCAN_WAIT_S):
        raise Problem(503, f"{_MAX_SCANS} other requests are reading groups", fix="try again")
    try:
        yield
    finally:
        _scans.release()
