"""One swap: a turn among the workers where pauses are long, the engine's load; then its own checksum, and the news."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import structlog

from penstock.protocol.facts import WeightsApplied
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.rollout_service.engines.completion import EngineChecksum
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.engines.update_mode import UpdateMode, mode_of
from penstock.rollout_service.errors import EngineError, WeightsNotApplied, WeightsUnusable
from penstock.rollout_service.metrics import Figures
from penstock.rollout_service.weights.mirror import MirroredVersion
from penstock.rollout_service.weights.servable_versions import ServableVersions
from penstock.rollout_service.weights.swap_semaphore import SwapSemaphore
from penstock.rollout_service.weights.weight_announcements import WeightAnnouncements

log = structlog.get_logger("rollout.weights")

WORTH_A_TURN_S = 0.5  # a shorter pause costs the run less than that the others wait for its end
_MIRROR = "mirror"  # layout of a checksum that no engine said


@dataclass(frozen=True, slots=True)
class Swapped:
    """What an engine serves now, and what it took to get there."""

    mirrored: MirroredVersion
    previous: PolicyVersion | None
    pause_s: float


class WeightSwap:
    """The only one who makes this worker's engine load any weights."""

    def __init__(
        self,
        *,
        engine: Engine,
        servable: ServableVersions,
        semaphore: SwapSemaphore,
        announcements: WeightAnnouncements,
        figures: Figures,
        check_every: int,
        update_mode: UpdateMode,
    ) -> None:
        """Every ``check_every``-th version the engine is asked for its checksum; 0: never.

        ``update_mode`` says what becomes of running generations when a newer version is loaded.
        """
        self._engine = engine
        self._servable = servable
        self._giving = asyncio.Lock()
        self._semaphore = semaphore
        self._announcements = announcements
        self._figures = figures
        self._check_every = check_every
        self._update_mode: UpdateMode = update_mode
        self._pause_s = math.inf  # of the last swap; unknown before the first

    async def load(self, mirrored: MirroredVersion) -> Swapped | None:
        """Have the engine serve a version; None when it does already, or as an adapter beside a newer one.

        An adapter pauses nobody, unless the model it sits upon has to be loaded first. Raises WeightsUnusable for an
        adapter that the engine refuses.
        """
        async with self._giving:
            previous = self._engine.version
            if mirrored.base is None:
                if previous == mirrored.version or (self._servable.adapters and self._servable.fits(mirrored)):
                    return None
                return Swapped(mirrored, previous, await self._load_model(mirrored, previous))
            pause_s = 0.0
            if not self._servable.fits(mirrored):
                pause_s = await self._load_model(mirrored.base, previous)
            is_here = mirrored.version in self._servable.adapters
            if not is_here:
                await self._load_adapter(mirrored)
            return None if is_here or not is_newer(mirrored.version, previous) else Swapped(mirrored, previous, pause_s)

    async def unload(self, needed: Callable[[], Collection[PolicyVersion]]) -> None:
        """Let the adapters go that no request uses and that are not ``needed``; one that stays is tried again."""
        async with self._giving:
            for version in self._servable.idle(needed()):
                self._servable.adapters.discard(version)
                try:
                    await self._engine.unload_adapter(version)
                except EngineError as err:
                    self._servable.adapters.add(version)
                    log.warning("an adapter was not unloaded", policy_version=version, error=str(err))

    async def _load_adapter(self, mirrored: MirroredVersion) -> None:
        try:
            await self._engine.load_adapter(mirrored.folder, mirrored.version)
        except WeightsNotApplied as err:
            raise WeightsUnusable(str(err)) from None
        self._servable.adapters.add(mirrored.version)

    async def _load_model(self, mirrored: MirroredVersion, previous: PolicyVersion | None) -> float:
        """Have the engine hold a model; returns how long it paused, in seconds."""
        if previous is None:  # before the first, nothing pauses
            await self._engine.load(mirrored.folder, mirrored.version)
            self._servable.took_model(mirrored.version)
            return 0.0
        async with self._semaphore.turn() if self._pause_s > WORTH_A_TURN_S else contextlib.nullcontext():
            started = time.monotonic()
            mode = mode_of(self._update_mode, previous, mirrored.version)
            await self._engine.load(mirrored.folder, mirrored.version, mode)
            self._pause_s = time.monotonic() - started
        self._servable.took_model(mirrored.version)
        return self._pause_s

    async def tell(self, swapped: Swapped) -> None:
        """Say what is served now, with the engine's own checksum; whoever waits for the version need not wait for this."""
        mirrored = swapped.mirrored
        self._figures.weights_applied += 1
        log.info(
            "weights applied",
            policy_version=mirrored.version,
            previous=swapped.previous,
            pause_s=round(swapped.pause_s, 4),
            fetch_s=round(mirrored.fetch_s, 4),
            num_bytes=mirrored.num_bytes,
        )
        checksum = await self._checksum(mirrored)
        await self._announcements.applied(
            WeightsApplied(
                run_id=self._announcements.run_id,
                worker_id=self._announcements.worker_id,
                version=mirrored.version,
                previous_version=swapped.previous,
                pause_s=swapped.pause_s,
                fetch_s=mirrored.fetch_s,
                num_bytes=mirrored.num_bytes,
                checksum=checksum.value,
                layout=checksum.layout,
            )
        )

    async def _checksum(self, mirrored: MirroredVersion) -> EngineChecksum:
        """Return the engine's own checksum; the mirror's, when it is not asked or cannot say, as of an adapter."""
        said = None
        if mirrored.base is None and self._check_every and self._figures.weights_applied % self._check_every == 0:
            try:
                said = await self._engine.weights_checksum()
            except EngineError as err:  # it has just died or hangs: its own watch finds out
                log.warning("the engine did not say its checksum", error=str(err))
        return said or EngineChecksum(mirrored.checksum, _MIRROR)
