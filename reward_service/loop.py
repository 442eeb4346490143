"""take → fetch → score → announce → acknowledge.

One task for each pack under way. A message is acknowledged only after every one of its groups was
either announced as scored or stored as a dead letter; until then it is kept alive, given back with a
delay, or, if this process dies, delivered again by the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

import structlog

from protocol.activity import Activity
from protocol.errors import (
    BlobCorrupt,
    BlobMissing,
    BlobStoreUnreachable,
    BusUnreachable,
    PackError,
    PenstockError,
)
from protocol.facts import GeneratedGroup, GroupGenerated
from protocol.transport.blobs import Blobs
from protocol.transport.delivery import Delivery
from protocol.transport.inbox import Inbox
from reward_service import pack_texts
from reward_service.announce import Announcer
from reward_service.catalogue import Catalogue
from reward_service.errors import RewardCrashed, RewardError
from reward_service.figures import Figures
from reward_service.progress import Progress
from reward_service.scores import Outcome
from reward_service.scoring import as_scored

log = structlog.get_logger("reward_service")

_FETCH_WAIT_S = 1.0  # also how long a stop may take to be noticed
_MAX_DELAY_S = 60.0
_BACK_SOON_S = 5.0  # S3 or NATS is away: nobody's group is to blame


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how soon a group that got no reward comes again."""

    attempts: int
    delay_s: float

    def next_delay_s(self, attempt: int) -> float:
        """Return the wait after a failed attempt: doubled each time, at most a minute (or the first wait)."""
        return min(self.delay_s * 2.0 ** min(attempt - 1, 30), max(_MAX_DELAY_S, self.delay_s))


@dataclass(frozen=True, slots=True)
class Bench:
    """What the scoring of one pack works with."""

    blobs: Blobs
    catalogue: Catalogue
    announcer: Announcer
    patience: Patience
    progress: Progress
    figures: Figures
    activity: Activity


async def run(
    inbox: Inbox[GroupGenerated], bench: Bench, *, concurrency: int, stop: asyncio.Event, drain_s: float
) -> None:
    """Score packs, ``concurrency`` at a time, until ``stop``; then finish what is under way within ``drain_s``.

    Raises what makes going on pointless: refused credentials, a stream or bucket that is not there.
    """
    under_way: set[asyncio.Task[None]] = set()
    try:
        while not stop.is_set():
            if free := concurrency - len(under_way):
                for delivery in await inbox.fetch(free, _FETCH_WAIT_S):
                    under_way.add(asyncio.create_task(_handle(delivery, bench)))
            else:
                await asyncio.wait(under_way, timeout=_FETCH_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
            under_way = _reap(under_way)
        if under_way:
            log.info("draining", packs=len(under_way), at_most_s=drain_s)
            await asyncio.wait(under_way, timeout=drain_s)
    finally:
        for task in under_way:
            task.cancel()  # gives its message back
        await asyncio.gather(*under_way, return_exceptions=True)
    _reap(under_way)


def _reap(under_way: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Return the tasks still running; raises what an ended one raised."""
    for task in under_way:
        if task.done() and not task.cancelled():
            task.result()
    return {task for task in under_way if not task.done()}


async def _handle(delivery: Delivery[GroupGenerated], bench: Bench) -> None:
    """Settle one message; when NATS, S3 or this process goes away first, it is given back."""
    try:
        with bench.activity.working("scoring"):
            await score_pack(delivery, bench)
    except (BlobStoreUnreachable, BusUnreachable) as err:
        log.warning("pack goes back, nobody is to blame", pack_id=delivery.fact.pack_id, error=str(err))
        bench.figures.num_errors += 1
        bench.progress.excuse(delivery.sequence)
        await delivery.give_back(_BACK_SOON_S)
    except asyncio.CancelledError:
        with contextlib.suppress(BusUnreachable):
            await delivery.give_back(0.0)
        raise


async def score_pack(delivery: Delivery[GroupGenerated], bench: Bench) -> None:
    """Score the groups of one message that are not settled yet, announce them, and end or return the message."""
    started = time.monotonic()
    attempt = bench.progress.attempt(delivery.sequence, delivery.num_delivered)
    groups = _unsettled(delivery, bench)
    try:
        failed = await _score(delivery, groups, bench, attempt)
    except PenstockError:
        raise
    except Exception as err:
        log.exception("a pack could not be handled", pack_id=delivery.fact.pack_id)
        crash = RewardCrashed(f"scoring pack {delivery.fact.pack_id} raised {type(err).__name__}: {err}")
        failed = dict.fromkeys((group.group_id for group in _unsettled(delivery, bench)), crash)

    spent = attempt >= bench.patience.attempts
    dead = {group_id: err for group_id, err in failed.items() if spent or _is_permanent(err)}
    await _bury(delivery, dead, bench)
    bench.progress.add(delivery.sequence, frozenset(dead))
    waiting = {group_id: err for group_id, err in failed.items() if group_id not in dead}
    bench.figures.packs.record(time.monotonic() - started, failed=bool(failed))
    log.info(
        "pack",
        run_id=delivery.fact.run_id,
        pack_id=delivery.fact.pack_id,
        scored=len(groups) - len(failed),
        waiting=len(waiting),
        dead=len(dead),
        num_delivered=delivery.num_delivered,
        ms=round(1000 * (time.monotonic() - started), 1),
    )
    if waiting:
        delay_s = bench.patience.next_delay_s(attempt)
        await bench.announcer.waiting(delivery, waiting, delay_s=delay_s)
        await delivery.give_back(delay_s)
    else:
        await delivery.ack()
        bench.progress.forget(delivery.sequence)


def _unsettled(delivery: Delivery[GroupGenerated], bench: Bench) -> list[GeneratedGroup]:
    settled = bench.progress.settled(delivery.sequence)
    return [group for group in delivery.fact.groups if group.group_id not in settled]


async def _score(
    delivery: Delivery[GroupGenerated], groups: Sequence[GeneratedGroup], bench: Bench, attempt: int
) -> dict[str, Exception]:
    """Score and announce groups as they get ready; returns those that got no reward, with the error."""
    failed: dict[str, Exception] = {}
    async for some in _outcomes(delivery, groups, bench, attempt):
        scored = [outcome.announce(group) for group, outcome in some if not isinstance(outcome, Exception)]
        wrong: dict[str, Exception] = {
            group.group_id: outcome for group, outcome in some if isinstance(outcome, Exception)
        }
        wrong |= await bench.announcer.scored(delivery, scored)
        bench.figures.groups_scored(group for group in scored if group.generated.group_id not in wrong)
        bench.progress.add(delivery.sequence, frozenset(group.group_id for group, _ in some) - frozenset(wrong))
        failed |= wrong
    return failed


async def _outcomes(
    delivery: Delivery[GroupGenerated], groups: Sequence[GeneratedGroup], bench: Bench, attempt: int
) -> AsyncIterator[list[tuple[GeneratedGroup, Outcome | PackError | BlobMissing | BlobCorrupt]]]:
    """Yield what became of the groups; a pack that cannot be read is the same error for all of them."""
    try:
        texts = await asyncio.to_thread(pack_texts.fetch, bench.blobs, delivery.fact.pack, groups)
    except (PackError, BlobMissing, BlobCorrupt) as err:
        yield [(group, err) for group in groups]
        return
    async with contextlib.aclosing(as_scored(bench.catalogue, texts, attempt=attempt)) as batches:
        async for batch in batches:
            yield [(groups[place], outcome) for place, outcome in sorted(batch.items(), key=lambda item: item[0])]


async def _bury(delivery: Delivery[GroupGenerated], dead: Mapping[str, Exception], bench: Bench) -> None:
    """Store one dead letter for each different error, naming exactly the groups it befell."""
    by_error: dict[tuple[str, str], list[GeneratedGroup]] = {}
    for group in delivery.fact.groups:
        if group.group_id in dead:
            err = dead[group.group_id]
            by_error.setdefault((type(err).__name__, str(err)), []).append(group)
    for (reason, detail), groups in by_error.items():
        await bench.announcer.dead(delivery, groups, reason=reason, detail=detail)
        bench.figures.groups_dead(reason, len(groups))
        log.warning("dead", reason=reason, detail=detail, group_ids=[group.group_id for group in groups])


def _is_permanent(err: Exception) -> bool:
    return err.permanent if isinstance(err, RewardError) else True
