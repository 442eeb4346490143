"""take → fetch → score → announce → acknowledge.

One task for each pack under way. A message is acknowledged only after every one of its groups was
either announced as scored or stored as a dead letter; until then it is kept alive, given back with a
delay, or, if this process dies, delivered again by the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

import structlog

from penstock.protocol.activity import Activity
from penstock.protocol.errors import (
    BlobCorrupt,
    BlobMissing,
    BlobStoreUnreachable,
    BusUnreachable,
    PackError,
    PenstockError,
)
from penstock.protocol.facts import GeneratedGroup, GroupGenerated
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.transport.inbox import Inbox
from penstock.reward_service import pack_progress, pack_texts
from penstock.reward_service.announce import Announcer
from penstock.reward_service.errors import NotAsked, RewardCrashed, RewardError
from penstock.reward_service.metrics import Figures
from penstock.reward_service.pack_progress import PackProgress, Progress
from penstock.reward_service.registry.reward_registry import RewardRegistry
from penstock.reward_service.scores import Outcome
from penstock.reward_service.scoring import as_scored

log = structlog.get_logger("reward_service")

_FETCH_WAIT_S = 1.0  # also how long a stop may take to be noticed
_MAX_DELAY_S = 60.0
_UNASKED_S = 0.5
_UNASKED_MAX_S = 8.0
_BACK_SOON_S = 5.0  # S3 or NATS is away: nobody's group is to blame


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how soon a group that got no reward comes again, and how long it may go unasked."""

    attempts: int
    delay_s: float
    unasked_s: float

    def next_delay_s(self, attempt: int) -> float:
        """Return the wait after a failed attempt: doubled each time, at most a minute (or the first wait)."""
        return min(self.delay_s * 2.0 ** min(attempt - 1, 30), max(_MAX_DELAY_S, self.delay_s))

    def unasked_delay_s(self, err: NotAsked, num_excused: int) -> float:
        """Return the wait after nobody was asked: what the error says, longer when that goes on, never in step."""
        wait_s = min(max(err.retry_in_s, _UNASKED_S) * 2.0 ** min(num_excused, 30), max(err.retry_in_s, _UNASKED_MAX_S))
        return wait_s * random.uniform(0.75, 1.25)  # noqa: S311 no secret


@dataclass(frozen=True, slots=True)
class Bench:
    """What the scoring of one pack works with."""

    blobs: Blobs
    reward_registry: RewardRegistry
    announcer: Announcer
    patience: Patience
    progress: Progress
    figures: Figures
    activity: Activity


class Places:
    """Where packs are worked on. A pack that only waits for somebody outside stands aside and holds none."""

    def __init__(self, num_places: int, max_packs: int) -> None:
        """``num_places`` packs may be worked on, ``max_packs`` may be in this process's hands."""
        self._num_places = num_places
        self._max_packs = max_packs
        self._occupied: set[int] = set()
        self._held = 0
        self._changed = asyncio.Event()

    @property
    def free(self) -> int:
        """How many more packs may be taken."""
        return max(0, min(self._num_places - len(self._occupied), self._max_packs - self._held))

    def enter(self, sequence: int) -> None:
        """A pack comes."""
        self._occupied.add(sequence)
        self._held += 1

    def stand_aside(self, sequence: int) -> None:
        """All that a pack still waits for is outside."""
        self._occupied.discard(sequence)
        self._changed.set()

    def leave(self, sequence: int) -> None:
        """A pack is done with."""
        self._held -= 1
        self.stand_aside(sequence)

    async def wait_for_change(self, wait_s: float) -> None:
        """Wait until a pack stood aside or left, at most ``wait_s``."""
        # not wait_for: in Python 3.11 it swallows a cancellation that comes with the change
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        self._changed.clear()


async def run(
    inbox: Inbox[GroupGenerated], bench: Bench, *, places: Places, stop: asyncio.Event, drain_s: float
) -> None:
    """Score packs, as many at a time as there are ``places``, until ``stop``; then finish within ``drain_s``.

    Raises what makes going on pointless: refused credentials, a stream or bucket that is not there.
    """
    under_way: set[asyncio.Task[None]] = set()
    try:
        while not stop.is_set():
            if free := places.free:
                for delivery in await inbox.fetch(free, _FETCH_WAIT_S):
                    places.enter(delivery.sequence)
                    under_way.add(asyncio.create_task(_handle(delivery, bench, places)))
            else:
                await places.wait_for_change(_FETCH_WAIT_S)
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


async def _handle(delivery: Delivery[GroupGenerated], bench: Bench, places: Places) -> None:
    """Settle one message; when NATS, S3 or this process goes away first, it is given back."""
    pack = Pack(delivery, await bench.progress.load(delivery.sequence, delivery.num_delivered))
    try:
        with bench.activity.working("scoring"):
            await score_pack(pack, bench, lambda: places.stand_aside(delivery.sequence))
    except (BlobStoreUnreachable, BusUnreachable) as err:
        log.warning("pack goes back, nobody is to blame", pack_id=delivery.fact.pack_id, error=str(err))
        bench.figures.num_errors += 1
        excused = pack.progress.excuse(group.group_id for group in pack.unsettled)
        await bench.progress.save(delivery.sequence, excused)
        await delivery.give_back(_BACK_SOON_S)
    except asyncio.CancelledError:
        with contextlib.suppress(BusUnreachable):
            await bench.progress.save(delivery.sequence, pack.progress)
            await delivery.give_back(0.0)
        raise
    finally:
        places.leave(delivery.sequence)


@dataclass(slots=True)
class Pack:
    """A message under way, and what is known of its groups."""

    delivery: Delivery[GroupGenerated]
    progress: PackProgress

    @property
    def unsettled(self) -> list[GeneratedGroup]:
        """The groups that still need a reward or a grave."""
        return [group for group in self.delivery.fact.groups if group.group_id not in self.progress.settled]

    def attempt(self, group: GeneratedGroup) -> int:
        """Return which attempt at scoring a group this is."""
        return self.progress.attempt(group.group_id, self.delivery.num_delivered)


async def score_pack(pack: Pack, bench: Bench, stand_aside: Callable[[], None]) -> None:
    """Score the groups of one message that are not settled yet, announce them, and end or return the message."""
    started = time.monotonic()
    delivery, groups = pack.delivery, pack.unsettled
    try:
        failed = await _score(pack, groups, bench, stand_aside)
    except PenstockError:
        raise
    except Exception as err:
        log.exception("a pack could not be handled", pack_id=delivery.fact.pack_id)
        crash = RewardCrashed(f"scoring pack {delivery.fact.pack_id} raised {type(err).__name__}: {err}")
        failed = dict.fromkeys((group.group_id for group in pack.unsettled), crash)

    dead = _hopeless(pack, failed, bench.patience)
    await _bury(delivery, dead, bench)
    pack.progress = pack.progress.settle(dead)
    waiting = {group_id: err for group_id, err in failed.items() if group_id not in dead}
    bench.figures.packs.record(time.monotonic() - started, failed=bool(failed))
    bench.figures.groups_waited(type(err).__name__ for err in waiting.values())
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
        delay_s = _delay_s(pack, waiting, bench.patience)
        pack.progress = pack.progress.excuse(name for name, err in waiting.items() if isinstance(err, NotAsked))
        await bench.progress.save(delivery.sequence, pack.progress)
        await bench.announcer.waiting(delivery, waiting, delay_s=delay_s)
        await delivery.give_back(delay_s)
    else:
        await delivery.ack()
        await bench.progress.forget(delivery.sequence, delivery.num_delivered)


def _hopeless(pack: Pack, failed: Mapping[str, Exception], patience: Patience) -> dict[str, Exception]:
    """Return the failed groups that do not come again, and take note of those that nobody was asked about."""
    clock = pack_progress.now()
    unasked = {name for name, err in failed.items() if isinstance(err, NotAsked) and err.has_limit}
    pack.progress = pack.progress.asked(failed.keys() - unasked).refuse(unasked, clock)
    attempts = {group.group_id: pack.attempt(group) for group in pack.delivery.fact.groups}
    return {
        name: err
        for name, err in failed.items()
        if _is_permanent(err)
        or (not isinstance(err, NotAsked) and attempts[name] >= patience.attempts)
        or (name in unasked and clock - pack.progress.refused_since[name] >= patience.unasked_s)
    }


def _delay_s(pack: Pack, waiting: Mapping[str, Exception], patience: Patience) -> float:
    """Return when the message comes again: when the last of its groups should."""
    attempts = {group.group_id: pack.attempt(group) for group in pack.delivery.fact.groups}
    return max(
        patience.unasked_delay_s(err, pack.progress.excused.get(name, 0))
        if isinstance(err, NotAsked)
        else patience.next_delay_s(attempts[name])
        for name, err in waiting.items()
    )


async def _score(
    pack: Pack, groups: Sequence[GeneratedGroup], bench: Bench, stand_aside: Callable[[], None]
) -> dict[str, Exception]:
    """Score and announce groups as they get ready; returns those that got no reward, with the error."""
    failed: dict[str, Exception] = {}
    async for some in _outcomes(pack, groups, bench, stand_aside):
        scored = [outcome.announce(group) for group, outcome in some if not isinstance(outcome, Exception)]
        wrong: dict[str, Exception] = {
            group.group_id: outcome for group, outcome in some if isinstance(outcome, Exception)
        }
        if scored:
            wrong |= await bench.announcer.scored(pack.delivery, scored)
        bench.figures.groups_scored(group for group in scored if group.generated.group_id not in wrong)
        pack.progress = pack.progress.settle({group.group_id for group, _ in some} - wrong.keys())
        failed |= wrong
    return failed


async def _outcomes(
    pack: Pack, groups: Sequence[GeneratedGroup], bench: Bench, stand_aside: Callable[[], None]
) -> AsyncIterator[list[tuple[GeneratedGroup, Outcome | PackError | BlobMissing | BlobCorrupt]]]:
    """Yield what became of the groups; a pack that cannot be read is the same error for all of them."""
    try:
        texts = await asyncio.to_thread(pack_texts.fetch, bench.blobs, pack.delivery.fact.pack, groups)
    except (PackError, BlobMissing, BlobCorrupt) as err:
        yield [(group, err) for group in groups]
        return
    attempts = [pack.attempt(group) for group in groups]
    scoring = as_scored(bench.reward_registry, texts, attempts=attempts, only_slow_left=stand_aside)
    async with contextlib.aclosing(scoring) as batches:
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
