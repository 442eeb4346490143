"""The scoring of one pack: each group is announced as scored, dead-lettered, or delivered again.

fetch its texts ─▶ score its groups ─▶ announce those that are scored ─▶ dead-letter those that cannot be ─▶ ack or requeue
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from penstock.protocol.errors import BlobCorrupt, BlobDenied, BlobMissing, PackError, PenstockError
from penstock.protocol.facts import GroupGenerated
from penstock.protocol.groups import BlobRef, GeneratedGroup
from penstock.protocol.heartbeats import Activity
from penstock.protocol.packs import group_pack, pack_bounds
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.protocol.traces.traces import NO_TRACES, Traces, Value
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.delivery import Delivery
from penstock.reward_service import pack_progress
from penstock.reward_service.announce import Announcer
from penstock.reward_service.errors import NotCalled, RewardCrashed, RewardError
from penstock.reward_service.metrics import ServiceMetrics
from penstock.reward_service.pack_progress import PackProgress, ProgressStore
from penstock.reward_service.pack_trace import CURRENT_TRACE, PackTrace
from penstock.reward_service.registry.reward_registry import RewardRegistry
from penstock.reward_service.scores import Outcome, Scorer

_TOGETHER_S = 0.1  # outcomes that are ready within this time are yielded together
_MAX_DELAY_S = 60.0
_NOT_CALLED_S = 0.5
_NOT_CALLED_MAX_S = 8.0
log = structlog.get_logger("reward_service.pack_scoring")


async def score_groups(reward_registry: RewardRegistry, groups: Sequence[GroupTexts]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    async for some in as_scored(reward_registry, groups, attempts=[1] * len(groups)):
        outcomes |= some
    return [outcomes[index] for index in range(len(groups))]


async def as_scored(
    reward_registry: RewardRegistry, groups: Sequence[GroupTexts], *, attempts: Sequence[int],
    only_slow_left: Callable[[], None] = lambda: None,
) -> AsyncGenerator[dict[int, Outcome], None]:  # fmt: skip
    """Yield outcomes by the groups' indices as they get ready, so that no group waits for another's slow endpoint.

    Groups of one reward at the same attempt (from 1) are scored together. ``only_slow_left`` is called as soon as all
    that is left is waiting for other processes.
    """
    done: dict[int, Outcome] = {}
    by_scorer: dict[tuple[Scorer, int], list[int]] = {}
    for index, group in enumerate(groups):
        try:
            by_scorer.setdefault((await reward_registry.find(group.reward), attempts[index]), []).append(index)
        except RewardError as err:
            done[index] = err

    async def score(scorer: Scorer, attempt: int, indices: list[int]) -> dict[int, Outcome]:
        outcomes = await scorer.score([groups[index] for index in indices], attempt=attempt)
        return dict(zip(indices, outcomes, strict=True))

    under_way = {
        asyncio.create_task(score(scorer, attempt, indices))
        for (scorer, attempt), indices in by_scorer.items()
        if scorer.slow
    }
    try:
        for (scorer, attempt), indices in by_scorer.items():
            if not scorer.slow:
                done |= await score(scorer, attempt, indices)
        only_slow_left()
        ready, under_way = await asyncio.wait(under_way, timeout=_TOGETHER_S) if under_way else (set(), set())
        yield done | {index: outcome for task in ready for index, outcome in task.result().items()}
        while under_way:
            ready, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            yield {index: outcome for task in ready for index, outcome in task.result().items()}
    finally:
        for task in under_way:
            task.cancel()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits of redelivery.

    Attributes:
        attempts: Attempts at scoring a group before it is dead-lettered.
        delay_s: Wait after the first failed attempt.
        not_called_limit_s: How long a group may wait for an endpoint that is not called before it is dead-lettered.
    """

    attempts: int
    delay_s: float
    not_called_limit_s: float

    def delay_after(self, attempt: int) -> float:
        """Return the wait in seconds after a failed attempt: doubled each time, at most a minute (or ``delay_s``)."""
        return min(self.delay_s * 2.0 ** min(attempt - 1, 30), max(_MAX_DELAY_S, self.delay_s))

    def delay_not_called(self, err: NotCalled, num_before: int) -> float:
        """Return the wait in seconds when no endpoint was called, after ``num_before`` deliveries of that kind.

        It is what the error says, doubled each time, with jitter of a quarter so that groups do not come in step.
        """
        first_s, most_s = max(err.retry_in_s, _NOT_CALLED_S), max(err.retry_in_s, _NOT_CALLED_MAX_S)
        return min(first_s * 2.0 ** min(num_before, 30), most_s) * random.uniform(0.75, 1.25)  # noqa: S311 no secret


def is_permanent(err: Exception) -> bool:
    """Return True for an error that another attempt cannot remove."""
    return err.permanent if isinstance(err, RewardError) else not isinstance(err, BlobDenied)


def fetch_texts(blobs: Blobs, pack: BlobRef, groups: Sequence[GeneratedGroup]) -> list[GroupTexts]:
    """Return the texts of the groups, in order; token columns are never read.

    Raises BlobMissing, BlobCorrupt or BlobStoreUnreachable for the object, and PackError when it differs from the message.
    """
    pack_bounds.check_message(pack, groups)
    try:
        texts = group_pack.decode_texts(blobs.get(pack), [group.row_group for group in groups], described=groups)
    except PackError as err:
        raise PackError(f"{pack.key}: {err}") from None
    return [
        dataclasses.replace(text, completion_tokens=group.completion_tokens)
        for group, text in zip(groups, texts, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class ScoringContext:
    blobs: Blobs
    reward_registry: RewardRegistry
    announcer: Announcer
    retry: RetryPolicy
    progress: ProgressStore
    metrics: ServiceMetrics
    activity: Activity
    traces: Traces = NO_TRACES


@dataclass(slots=True)
class Pack:
    delivery: Delivery[GroupGenerated]
    progress: PackProgress

    @property
    def unsettled(self) -> list[GeneratedGroup]:
        return [group for group in self.delivery.fact.groups if group.group_id not in self.progress.settled]

    def attempts(self) -> dict[str, int]:
        num_delivered = self.delivery.num_delivered
        ids = [group.group_id for group in self.delivery.fact.groups]
        return {group_id: self.progress.attempt(group_id, num_delivered) for group_id in ids}


async def score_pack(pack: Pack, context: ScoringContext, release_slot: Callable[[], None]) -> None:
    """Score the unsettled groups of one message, announce them, and acknowledge or requeue the message.

    ``release_slot`` is called when all that is left is waiting for other processes.
    """
    started = time.monotonic()
    delivery, groups = pack.delivery, pack.unsettled
    trace = PackTrace.start(
        context.traces,
        delivery.traceparent,
        [group.group_id for group in groups],
        {"pack_id": delivery.fact.pack_id, "num_delivered": delivery.num_delivered},
    )
    CURRENT_TRACE.set(trace if context.traces.is_on else None)  # for the tasks of this pack
    try:
        failed = await _score(pack, groups, context, release_slot, trace)
    except PenstockError:
        raise
    except Exception as err:
        log.exception("a pack could not be scored", pack_id=delivery.fact.pack_id)
        crash = RewardCrashed(f"scoring pack {delivery.fact.pack_id} raised {type(err).__name__}: {err}")
        failed = dict.fromkeys((group.group_id for group in pack.unsettled), crash)

    dead = _final_failures(pack, failed, context.retry)
    await _dead_letter(delivery, dead, context)
    pack.progress = pack.progress.settle(dead)
    waiting = {group_id: err for group_id, err in failed.items() if group_id not in dead}
    for group_id, err in failed.items():
        trace.failed(group_id, type(err).__name__, "dead-lettered" if group_id in dead else "requeued")
    context.metrics.packs.record(time.monotonic() - started, failed=bool(failed))
    context.metrics.waited.update(type(err).__name__ for err in waiting.values())
    log.info(
        "pack", run_id=delivery.fact.run_id, pack_id=delivery.fact.pack_id, scored=len(groups) - len(failed),
        waiting=len(waiting), dead=len(dead), num_delivered=delivery.num_delivered,
        ms=round(1000 * (time.monotonic() - started), 1),
    )  # fmt: skip
    if waiting:
        await _requeue(pack, waiting, context)
    else:
        await delivery.ack()
        await context.progress.forget(delivery.sequence, delivery.num_delivered)


async def _requeue(pack: Pack, waiting: Mapping[str, Exception], context: ScoringContext) -> None:
    delivery = pack.delivery
    delay_s = _delay_s(pack, waiting, context.retry)
    pack.progress = pack.progress.excuse(name for name, err in waiting.items() if isinstance(err, NotCalled))
    await context.progress.save(delivery.sequence, pack.progress)
    await context.announcer.waiting(delivery, waiting, delay_s=delay_s)
    await delivery.give_back(delay_s)


def _final_failures(pack: Pack, failed: Mapping[str, Exception], retry: RetryPolicy) -> dict[str, Exception]:
    """Return the failed groups to dead-letter, and record since when the others wait for an endpoint that is not called."""
    clock = pack_progress.now()
    not_called = {name for name, err in failed.items() if isinstance(err, NotCalled) and err.has_limit}
    pack.progress = pack.progress.called(failed.keys() - not_called).not_called(not_called, clock)
    attempts = pack.attempts()
    return {
        name: err
        for name, err in failed.items()
        if is_permanent(err)
        or (not isinstance(err, NotCalled) and attempts[name] >= retry.attempts)
        or (name in not_called and clock - pack.progress.refused_since[name] >= retry.not_called_limit_s)
    }


def _delay_s(pack: Pack, waiting: Mapping[str, Exception], retry: RetryPolicy) -> float:
    attempts = pack.attempts()
    return max(
        retry.delay_not_called(err, pack.progress.excused.get(name, 0))
        if isinstance(err, NotCalled)
        else retry.delay_after(attempts[name])
        for name, err in waiting.items()
    )


async def _score(
    pack: Pack, groups: Sequence[GeneratedGroup], context: ScoringContext, release_slot: Callable[[], None],
    trace: PackTrace,
) -> dict[str, Exception]:  # fmt: skip
    failed: dict[str, Exception] = {}
    async for some in _outcomes(pack, groups, context, release_slot):
        scored = [outcome.announce(group) for group, outcome in some if not isinstance(outcome, Exception)]
        wrong: dict[str, Exception] = {
            group.group_id: outcome for group, outcome in some if isinstance(outcome, Exception)
        }
        if scored:
            wrong |= await context.announcer.scored(pack.delivery, scored)
        announced = [group for group in scored if group.generated.group_id not in wrong]
        context.metrics.groups_scored(announced)
        for group in announced:
            attributes: dict[str, Value] = {"scorer": group.scorer, "num_completions": len(group.rewards)}
            trace.scored(group.generated.group_id, attributes)
        pack.progress = pack.progress.settle({group.group_id for group, _ in some} - wrong.keys())
        failed |= wrong
    return failed


async def _outcomes(
    pack: Pack, groups: Sequence[GeneratedGroup], context: ScoringContext, release_slot: Callable[[], None]
) -> AsyncIterator[list[tuple[GeneratedGroup, Outcome | PackError | BlobMissing | BlobCorrupt]]]:
    """Yield groups with their outcomes; a pack that cannot be read is the same error for all of them."""
    try:
        texts = await asyncio.to_thread(fetch_texts, context.blobs, pack.delivery.fact.pack, groups)
    except (PackError, BlobMissing, BlobCorrupt) as err:
        yield [(group, err) for group in groups]
        return
    attempts = pack.attempts()
    scoring = as_scored(
        context.reward_registry,
        texts,
        attempts=[attempts[group.group_id] for group in groups],
        only_slow_left=release_slot,
    )
    async with contextlib.aclosing(scoring) as batches:
        async for batch in batches:
            yield [(groups[index], outcome) for index, outcome in sorted(batch.items(), key=lambda item: item[0])]


async def _dead_letter(
    delivery: Delivery[GroupGenerated], dead: Mapping[str, Exception], context: ScoringContext
) -> None:
    by_error: dict[tuple[str, str], list[GeneratedGroup]] = {}
    for group in delivery.fact.groups:
        if group.group_id in dead:
            err = dead[group.group_id]
            by_error.setdefault((type(err).__name__, str(err)), []).append(group)
    for (reason, detail), groups in by_error.items():
        await context.announcer.dead(delivery, groups, reason=reason, detail=detail)
        context.metrics.dead[reason] += len(groups)
        log.warning("dead", reason=reason, detail=detail, group_ids=[group.group_id for group in groups])
