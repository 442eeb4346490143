"""One swap: a permit where pauses are long, then the engine's load, its checksum, and the announcement.

A new version reaches every worker at the same moment. If all engines paused for it together, generation would stop. So only a share of them
swaps at a time, at least one: a permit is a key in NATS that expires when its holder is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

import structlog

from penstock.protocol import streams
from penstock.protocol.errors import BusError, CompareAndSwapFailed
from penstock.protocol.facts import WeightsApplied
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.rollout_service.device_turns import EngineTurns
from penstock.rollout_service.engines.completion import EngineChecksum
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.engines.engine_client import LONG_TOKENS, UpdateMode, mode_of
from penstock.rollout_service.errors import EngineDisagrees, EngineError, WeightsNotApplied, WeightsUnusable
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.weights.mirror import MirroredVersion
from penstock.rollout_service.weights.servable_versions import ServableVersions
from penstock.rollout_service.weights.weight_announcements import WeightAnnouncements

log = structlog.get_logger("rollout.weight_swap")

PERMIT_DEADLINE_S = 60.0  # then the worker swaps without a permit: that costs less than serving an old version
_COUNT_PERIOD_S = 5.0
_FIRST_POLL_S = 0.005
_LONGEST_POLL_S = 0.2
_MIRROR = "mirror"  # layout of a checksum that is the mirror's, not an engine's
NEEDS_PERMIT_S = 0.5  # a shorter pause costs the run less than other workers waiting for its end


@dataclass(eq=False)
class SwapSemaphore:
    bus: Bus
    run_id: str
    worker_id: str
    max_share: float
    deadline_s: float = PERMIT_DEADLINE_S

    def __post_init__(self) -> None:
        self._leases: KeyValue | None = None
        self._num_permits = 1
        self._counted_at = -_COUNT_PERIOD_S

    @contextlib.asynccontextmanager
    async def permit(self) -> AsyncIterator[None]:
        """Hold a permit inside the block; without one when none is free within the deadline."""
        key, revision = await self._acquire()
        if key is None:
            yield
            return
        renewing = asyncio.create_task(self._renew(key, revision))
        try:
            yield
        finally:
            renewing.cancel()
            await self._release(key)

    async def _acquire(self) -> tuple[str | None, int]:
        deadline = time.monotonic() + self.deadline_s
        poll_s = _FIRST_POLL_S
        while True:
            try:
                if (acquired := await self._try_acquire()) is not None:
                    return acquired
                problem = "all permits are taken"
            except BusError as err:
                problem = str(err)
            if time.monotonic() > deadline:
                log.warning("swapping without a permit", waited_s=self.deadline_s, reason=problem)
                return None, 0
            await asyncio.sleep(poll_s * random.uniform(0.5, 1.5))  # noqa: S311  spreads the workers, keeps no secret
            poll_s = min(2 * poll_s, _LONGEST_POLL_S)

    async def _try_acquire(self) -> tuple[str | None, int] | None:
        """Return a permit's key and revision; a key of None: no permit is needed; None: none is free."""
        if self._leases is None:
            self._leases = await self.bus.key_value(streams.lease_bucket(self.run_id).bucket)
        if time.monotonic() - self._counted_at > _COUNT_PERIOD_S:
            await self._count_workers()
        if self._num_permits == 0:
            return None, 0
        permits = {entry.key: entry for entry in await self._leases.entries(outlived=True)}
        for number in range(self._num_permits):
            key = streams.swap_permit_key(number)
            permit = permits.get(key)
            if permit is None or permit.is_outlived:  # a TTL of its own keeps it; no holder renews it
                with contextlib.suppress(CompareAndSwapFailed):
                    before = None if permit is None else permit.revision
                    return key, await self._leases.swap(key, self.worker_id.encode(), before)
        return None

    async def _count_workers(self) -> None:
        live = await self.bus.key_value(streams.live_bucket(self.run_id).bucket)
        every, own = (streams.heartbeat_key("rollout", name) for name in ("", self.worker_id))
        workers = {own, *(entry.key for entry in await live.entries() if entry.key.startswith(every))}
        self._num_permits = num_permits(len(workers), self.max_share)
        self._counted_at = time.monotonic()

    async def _renew(self, key: str, revision: int) -> None:
        assert self._leases is not None
        while True:
            await asyncio.sleep(streams.LEASE_RENEWAL_S)
            try:
                revision = await self._leases.swap(key, self.worker_id.encode(), revision)
            except CompareAndSwapFailed:
                return  # NATS was unreachable for longer than the lease lasts, and another worker has the permit
            except BusError as err:
                log.debug("permit not renewed", error=str(err))

    async def _release(self, key: str) -> None:
        assert self._leases is not None
        with contextlib.suppress(BusError):  # the key then expires
            entry = await self._leases.get(key, may_lag=True)
            if entry is not None and entry.value == self.worker_id.encode():
                await self._leases.delete(key, entry.revision)  # after a pause it may be another worker's


def num_permits(num_workers: int, max_share: float) -> int:
    """Return how many of ``num_workers`` engines may pause at once; 0 for a single worker, which needs no permit."""
    return 0 if num_workers == 1 else max(1, int(max_share * num_workers))


@dataclass(frozen=True, slots=True)
class Swapped:
    mirrored: MirroredVersion
    previous: PolicyVersion | None
    pause_s: float


@dataclass(frozen=True, slots=True)
class Patched:
    base: PolicyVersion  # whose folder the engine had last
    version: PolicyVersion
    manifest: BlobRef


@dataclass(eq=False, kw_only=True)
class WeightSwap:
    engine: Engine
    servable: ServableVersions
    semaphore: SwapSemaphore
    announcements: WeightAnnouncements
    metrics: WorkerMetrics
    check_every: int  # versions, after which the engine is asked for its checksum; 0: never
    update_mode: UpdateMode | Literal["auto"]  # of running generations, when a newer version is loaded
    turns: EngineTurns = field(default_factory=EngineTurns)
    long_mode: UpdateMode = "retract"  # of ``auto``, while long completions run

    def __post_init__(self) -> None:
        self._loading = asyncio.Lock()
        self._pause_s = math.inf  # of the last swap; unknown before the first

    async def load(self, mirrored: MirroredVersion, *, keeps_model: bool = False) -> Swapped | None:
        """Have the engine serve a version; returns None unless the newest version that it serves changed.

        An adapter pauses the engine only when its base model has to be loaded first. Raises WeightsUnusable for an adapter
        that the engine refuses. Waits for the engine's turn on a shared GPU; an engine whose memory was released is resumed.
        Nothing is loaded outside of the gate, which ``keeps_model`` says, once an evaluation has loaded another model.
        """
        async with self._in_turn():
            previous = self.engine.version
            if keeps_model and not self.servable.shares_model(mirrored):
                return None
            if self.engine.is_released:
                resume_s = await self._resume(mirrored)
                if mirrored.base is None:
                    return None if previous == mirrored.version else Swapped(mirrored, previous, resume_s)
            if mirrored.base is None:
                if previous == mirrored.version or (self.servable.adapters and self.servable.shares_model(mirrored)):
                    return None
                return Swapped(mirrored, previous, await self._load_model(mirrored, previous))
            pause_s = 0.0
            if not self.servable.shares_model(mirrored):
                pause_s = await self._load_model(mirrored.base, previous)
            is_here = mirrored.version in self.servable.adapters
            if not is_here:
                await self._load_adapter(mirrored)
            return None if is_here or not is_newer(mirrored.version, previous) else Swapped(mirrored, previous, pause_s)

    async def patch(self, base: PolicyVersion, version: PolicyVersion) -> float | None:
        """Have the engine serve what was staged for a version; return the seconds of the pause, or None where it serves what it did."""
        async with self._in_turn():
            if self.engine.version != base:  # an evaluation, or the engine's next turn, has loaded another one
                return None
            return await self._pausing(version, lambda mode: self.engine.patch(version, mode))

    async def keep(self, mirrored: MirroredVersion) -> bool:
        """Have the engine load this folder after a restart; see `Engine.keep`."""
        async with self._loading:
            return await self.engine.keep(mirrored.folder, mirrored.version)

    async def withdraw(self, version: PolicyVersion, reason: str) -> None:
        """Have an engine that serves a patched version load the folder before it again."""
        async with self._in_turn():
            await self.engine.withdraw(version, reason)
            if self.servable.model == version:
                self.servable.set_model(self.engine.version or version)

    async def is_as_loaded(self, mirrored: MirroredVersion) -> bool:
        async with self._in_turn():
            before = await self.engine.weights_checksum()
            await self.engine.load(mirrored.folder, mirrored.version)
            after = await self.engine.weights_checksum()
        return before is None or after is None or before.layout != after.layout or before.value == after.value

    async def release(self) -> None:
        """Have the engine free its memory, once no load is under way."""
        async with self._loading:
            is_short = self.update_mode == "auto" and self.servable.longest_running <= LONG_TOKENS
            await self.engine.release("drain" if is_short or self.update_mode == "drain" else "abort")

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        while True:
            await self.turns.wait()
            async with self._loading:
                if self.turns.is_held:
                    yield
                    return

    async def _resume(self, mirrored: MirroredVersion) -> float:
        started, model = time.monotonic(), mirrored.base or mirrored
        await self.engine.load(model.folder, model.version)
        if not self.servable.shares_model(mirrored):
            self.servable.set_model(model.version)
        return time.monotonic() - started

    async def unload_unused(self, needed: Callable[[], Collection[PolicyVersion]]) -> None:
        """Unload the adapters that no request uses and that are not ``needed``; the next call retries a failure."""
        async with self._loading:
            if not self.turns.is_held:
                return
            for version in self.servable.unused_adapters(needed()):
                self.servable.remove_adapter(version)
                try:
                    await self.engine.unload_adapter(version)
                except EngineError as err:
                    self.servable.add_adapter(version)
                    log.warning("adapter not unloaded", policy_version=version, error=str(err))

    async def _load_adapter(self, mirrored: MirroredVersion) -> None:
        try:
            await self.engine.load_adapter(mirrored.folder, mirrored.version)
        except WeightsNotApplied as err:
            raise WeightsUnusable(str(err)) from None
        self.servable.add_adapter(mirrored.version)

    async def _load_model(self, mirrored: MirroredVersion, previous: PolicyVersion | None) -> float:
        if previous is None:  # nothing runs before the first version
            await self.engine.load(mirrored.folder, mirrored.version)
            self.servable.set_model(mirrored.version)
            return 0.0

        async def load(mode: UpdateMode) -> bool:
            await self.engine.load(mirrored.folder, mirrored.version, mode)
            return True

        await self._pausing(mirrored.version, load)
        return self._pause_s

    async def _pausing(self, version: PolicyVersion, update: Callable[[UpdateMode], Awaitable[bool]]) -> float | None:
        """Let ``update`` change the model, in the mode that fits what runs; return the seconds, or None where it returns False."""
        async with contextlib.AsyncExitStack() as held:
            if self._pause_s > NEEDS_PERMIT_S:
                with self.metrics.applying("permit"):
                    await held.enter_async_context(self.semaphore.permit())
            started = time.monotonic()
            longest, previous = self.servable.longest_running, self.engine.version
            mode = mode_of(self.update_mode, previous, version, longest=longest, long_mode=self.long_mode)
            with self.metrics.applying("pause"):
                if not await update(mode):
                    return None
            self._pause_s = time.monotonic() - started
        self.servable.set_model(version)
        return self._pause_s

    async def announce(self, swapped: Swapped) -> None:
        """Publish which version is served now, with the engine's checksum; requests need not wait for this."""
        mirrored = swapped.mirrored
        self.metrics.weights_applied += 1
        with self.metrics.applying("checksum"):
            checksum = await self._checksum(mirrored)
        fact = WeightsApplied(
            run_id=self.announcements.run_id, worker_id=self.announcements.worker_id, version=mirrored.version,
            previous_version=swapped.previous, pause_s=swapped.pause_s, fetch_s=mirrored.fetch_s, num_bytes=mirrored.num_bytes,
            checksum=checksum.value, layout=checksum.layout,
        )  # fmt: skip
        said = fact.model_dump(include={"previous_version", "pause_s", "fetch_s", "num_bytes"})
        log.info("weights applied", policy_version=mirrored.version, **said)
        await self.announcements.announce_applied(fact, is_verified=checksum.is_of_files)

    async def _checksum(self, mirrored: MirroredVersion) -> EngineChecksum:
        """Return the engine's checksum; the mirror's when the engine is not asked or has none, as for an adapter.

        Raises EngineDisagrees when it can be compared with the manifest and is another one.
        """
        reported = None
        if mirrored.base is None and self.check_every and self.metrics.weights_applied % self.check_every == 0:
            try:
                async with self._loading:
                    if self.engine.version == mirrored.version and not self.engine.is_released:
                        reported = await self.engine.weights_checksum()
            except EngineError as err:  # an engine that exited or hangs is noticed by `Engine.run`
                log.warning("the engine did not report its checksum", error=str(err))
        if reported is not None and reported.is_of_files and reported.value != mirrored.checksum:
            text = f"the engine of worker {self.announcements.worker_id} serves other weights than those of version {mirrored.version}"
            await self.announcements.raise_alarm(text)
            raise EngineDisagrees(f"{text}; this worker exits: start it again with a fresh engine")
        return reported or EngineChecksum(mirrored.checksum, _MIRROR, is_of_files=True)
