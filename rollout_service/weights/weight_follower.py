"""Follows the published weights: newest announced → fetch → verify → apply → announce as applied.

The version that is served never goes back, except for as long as an evaluation pins an older one.
Fetching happens while the engine generates; only the swap itself makes generation wait. Versions
that were overtaken while another was fetched are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import structlog

from penstock.protocol import streams, subjects
from penstock.protocol.errors import BusUnreachable
from penstock.protocol.facts import BlobRef, Head, WeightsPublished, decode
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.rollout_service.checks.check_weights import WeightsCheck
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.errors import TaskRefused, WeightsUnusable
from penstock.rollout_service.retry import outlast
from penstock.rollout_service.weights.mirror import Mirror, MirroredVersion
from penstock.rollout_service.weights.servable_versions import ServableVersions
from penstock.rollout_service.weights.version_gate import VersionGate
from penstock.rollout_service.weights.weight_announcements import WeightAnnouncements
from penstock.rollout_service.weights.weight_swap import WeightSwap

log = structlog.get_logger("rollout.weights")

KNOWN_VERSIONS = 256  # how far back an evaluation may pin
HEAD_POLL_S = 5.0  # repairs a missed announcement
PIN_PATIENCE_S = 60.0  # how long an announcement may come after the task that pins its version
CATCH_UP_PATIENCE_S = 30.0  # how long a pack waits for the version it was issued for
_KNOWN_POLL_S = 0.05


class WeightFollower:
    """One worker's view of the run's versions."""

    def __init__(
        self,
        *,
        bus: Bus,
        mirror: Mirror,
        engine: Engine,
        servable: ServableVersions,
        gate: VersionGate,
        announcements: WeightAnnouncements,
        swap: WeightSwap,
        run_id: str,
    ) -> None:
        """Nothing is read before `start`."""
        self._bus = bus
        self._mirror = mirror
        self._engine = engine
        self._servable = servable
        self._gate = gate
        self._telling = announcements
        self._swap = swap
        self._run_id = run_id
        self._known: dict[PolicyVersion, BlobRef] = {}
        self._refused: dict[PolicyVersion, BlobRef] = {}
        self._announcements = asyncio.Event()
        servable.on_idle = self._announcements.set
        self._refusal = asyncio.Event()  # replaced by a fresh one at every refusal
        self._fetching = asyncio.Lock()
        self._check = WeightsCheck()
        self._pins: list[PolicyVersion] = []  # one entry for each holder: their folders stay
        self._next: PolicyVersion | None = None  # fetched, and waits for its swap: its folder stays

    async def start(self) -> MirroredVersion:
        """Wait for the first usable version and have the engine serve it.

        A worker needs to know nothing but NATS, S3 and the run: the head names the newest version.
        """
        loop = asyncio.get_running_loop()

        def heard(fact: WeightsPublished) -> None:  # on the bus's thread
            loop.call_soon_threadsafe(self._note, PolicyVersion(fact.version), fact.manifest)

        state = await self._bus.key_value(streams.state_bucket(self._run_id).bucket)
        await self._bus.tail(
            f"{self._run_id}-weights",
            subjects.weights_published(self._run_id),
            WeightsPublished,
            heard,
            from_start=True,
        )
        self._state = state
        await self._telling.start()
        while True:
            await self._read_head(state)
            mirrored = await self._fetch_newest()
            if mirrored is not None and await self._apply_or_refuse(mirrored):
                self._next = None
                return mirrored
            log.info("waiting for the trainer to publish weights", run_id=self._run_id)
            await self._heard_news()

    async def run(self) -> None:
        """Follow for as long as the worker lives; raises EngineDisagrees."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._telling.watch())
            tasks.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            if not await self._heard_news():
                await self._read_head(self._state)
            if self._newest() != self._engine.version or self._gate.held_back:
                mirrored = await self._fetch_newest()
                if mirrored is not None:
                    beside = self._servable.fits(mirrored) and not self._gate.held_back
                    async with contextlib.nullcontext() if beside else self._gate.swap():
                        await self._apply_or_refuse(mirrored)
                    self._next = None
            await self._tidy()

    async def _apply_or_refuse(self, mirrored: MirroredVersion) -> bool:
        try:
            await self._apply(mirrored)
        except WeightsUnusable as err:
            await self._refuse(mirrored.version, err)
            return False
        return True

    async def _tidy(self) -> None:
        """Let go what nobody uses: adapters in the engine, then folders."""
        await self._swap.unload(self._needed)
        async with self._fetching:
            await asyncio.to_thread(self._mirror.trim, self._in_use())

    async def catch_up(self, version: PolicyVersion) -> None:
        """Wait until the engine serves ``version`` or a newer one; of several engines one suffices.

        A task is issued when its version can be fetched, and the trainer's admission counts on it
        being sampled by that version: an older one would be stale before its time. Patience ends
        after `CATCH_UP_PATIENCE_S`, or at once when the version cannot be used: then the pack is
        generated by what there is, and the trainer's own staleness rule decides.
        """
        if not is_newer(version, self._engine.version):
            return
        waiting = {
            asyncio.ensure_future(self._engine.reaches(version)),
            asyncio.ensure_future(self._is_refused(version)),
        }
        try:
            await asyncio.wait(waiting, timeout=CATCH_UP_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    @contextlib.asynccontextmanager
    async def pinned(self, version: PolicyVersion) -> AsyncIterator[None]:
        """Have the engine serve exactly ``version`` inside the block: beside others where that is possible, or alone.

        Raises TaskRefused when the version is gone: no later attempt could find it.
        """
        await self._wait_until_known(version)

        async def load() -> None:
            if self._engine.version != version:
                await self._apply(mirrored)

        self._pins.append(version)
        try:
            mirrored = await self._fetch(version)
            if self._servable.fits(mirrored):
                await self._apply(mirrored)
                yield
                return
            async with self._gate.pinned(version, load, sets_back=lambda: version != self._newest()):
                yield
        except WeightsUnusable as err:
            raise TaskRefused("weights_gone", f"evaluation is pinned to version {version}, but {err}") from None
        finally:
            self._pins.remove(version)
            self._announcements.set()

    def _note(self, version: PolicyVersion, manifest: BlobRef) -> None:
        if self._known.get(version) == manifest:
            return
        self._known[version] = manifest
        while len(self._known) > KNOWN_VERSIONS:
            del self._known[next(iter(self._known))]  # the stream tells them in the order they were published
        self._announcements.set()

    def _newest(self) -> PolicyVersion | None:
        """Return the newest version that was not found unusable."""
        newest = None
        for version, manifest in self._known.items():
            if self._refused.get(version) != manifest and is_newer(version, newest):
                newest = version
        return newest

    async def _heard_news(self) -> bool:
        try:
            # not wait_for: in Python 3.11 it swallows a cancellation that comes with the news
            async with asyncio.timeout(HEAD_POLL_S):
                await self._announcements.wait()
        except TimeoutError:
            return False
        self._announcements.clear()
        return True

    async def _read_head(self, state: KeyValue) -> None:
        try:
            entry = await state.get(streams.HEAD_KEY)
        except BusUnreachable as err:
            log.warning("waiting for NATS to read the head", error=str(err))
            return
        if entry is not None:
            head = decode(entry.value, Head)
            self._note(PolicyVersion(head.version), head.manifest)

    async def _fetch_newest(self) -> MirroredVersion | None:
        """Fetch the newest usable version; None when there is none yet."""
        while (version := self._newest()) is not None:
            try:
                self._next = version
                return await self._fetch(version, newest=True)
            except WeightsUnusable as err:
                self._next = None
                await self._read_head(self._state)
                if self._newest() == version:  # else it was overtaken meanwhile, and may be collected by now
                    await self._refuse(version, err)
        return None

    async def _fetch(self, version: PolicyVersion, *, newest: bool = False) -> MirroredVersion:
        manifest = self._known[version]

        def fetch() -> MirroredVersion:
            mirrored = self._mirror.fetch(version, manifest, keep=self._in_use(), newest=newest)
            model = mirrored.base or mirrored
            self._check.check(model.folder, model.version)
            return mirrored

        async def attempt() -> MirroredVersion:
            async with self._fetching:
                return await asyncio.to_thread(fetch)

        return await outlast(attempt, f"weights of version {version}")

    def _needed(self) -> set[PolicyVersion]:
        """The versions that an evaluation is pinned to, or that wait for their swap."""
        return {*self._pins, *([] if self._next is None else [self._next])}

    def _in_use(self) -> set[PolicyVersion]:
        """The versions whose folders an engine reads, or is about to."""
        served = (self._servable.model, self._engine.version, *self._servable.adapters)
        return self._needed() | {version for version in served if version is not None}

    async def _refuse(self, version: PolicyVersion, err: WeightsUnusable) -> None:
        """Report a version that cannot be loaded; the one before it is served on."""
        self._refused[version] = self._known[version]
        self._refusal.set()  # nobody waits for it any longer
        self._refusal = asyncio.Event()
        log.error("weights refused", policy_version=version, serving=self._engine.version, error=str(err))
        await self._telling.refused(version, self._known[version], err, serving=self._engine.version)

    async def _is_refused(self, version: PolicyVersion) -> None:
        while version not in self._refused:
            await self._refusal.wait()

    async def _apply(self, mirrored: MirroredVersion) -> None:
        swapped = await self._swap.load(mirrored)
        if swapped is not None:
            await self._swap.tell(swapped)

    async def _wait_until_known(self, version: PolicyVersion) -> None:
        """Wait for a version's announcement; raises TaskRefused when it is too old to be known."""
        deadline = time.monotonic() + PIN_PATIENCE_S
        while version not in self._known:
            newest = self._newest()
            if newest is not None and not is_newer(version, newest):
                raise TaskRefused(
                    "weights_gone",
                    f"evaluation is pinned to version {version}, which is not among the {len(self._known)} versions "
                    f"that are known (newest: {newest})",
                )
            if time.monotonic() > deadline:
                raise TaskRefused(
                    "weights_unknown",
                    f"evaluation is pinned to version {version}, which nobody announced within {PIN_PATIENCE_S:.0f} s",
                )
            await asyncio.sleep(_KNOWN_POLL_S)
