"""Follows the published weights: newest announced → fetch → verify → apply → announce as applied.

The version that is served never goes back, except for as long as an evaluation pins an older one.
Fetching happens while the engine generates; only the swap itself makes generation wait. Versions
that were overtaken while another was fetched are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator

import structlog

from protocol import streams, subjects
from protocol.errors import BusUnreachable
from protocol.facts import BlobRef, Head, RunEvent, WeightsApplied, WeightsPublished, decode
from protocol.transport.bus import Bus, KeyValue
from protocol.versions import PolicyVersion, is_newer
from rollout_service.engine import Engine
from rollout_service.errors import TaskRefused, WeightsUnusable
from rollout_service.figures import Figures
from rollout_service.mirror import Mirror, MirroredVersion
from rollout_service.patience import outlast
from rollout_service.version_gate import VersionGate

log = structlog.get_logger("rollout.weights")

KNOWN_VERSIONS = 256  # how far back an evaluation may pin
HEAD_POLL_S = 5.0  # repairs a missed announcement
PIN_PATIENCE_S = 60.0  # how long an announcement may come after the task that pins its version
_PUBLISH_S = 15.0
_KNOWN_POLL_S = 0.05


class WeightFollower:
    """One worker's view of the run's versions, and the only one who makes its engine load any."""

    def __init__(
        self,
        *,
        bus: Bus,
        mirror: Mirror,
        engine: Engine,
        gate: VersionGate,
        figures: Figures,
        run_id: str,
        worker_id: str,
    ) -> None:
        """Nothing is read before `start`."""
        self._bus = bus
        self._mirror = mirror
        self._engine = engine
        self._gate = gate
        self._figures = figures
        self._run_id = run_id
        self._worker_id = worker_id
        self._known: dict[PolicyVersion, BlobRef] = {}
        self._refused: dict[PolicyVersion, BlobRef] = {}
        self._news = asyncio.Event()
        self._fetching = asyncio.Lock()
        self._pins: list[PolicyVersion] = []  # one entry for each holder: their folders stay

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
        while True:
            await self._read_head(state)
            mirrored = await self._fetch_newest()
            if mirrored is not None:
                break
            log.info("waiting for the trainer to publish weights", run_id=self._run_id)
            await self._heard_news()
        await self._apply(mirrored)
        return mirrored

    async def run(self) -> None:
        """Follow for as long as the worker lives."""
        while True:
            if not await self._heard_news():
                await self._read_head(self._state)
            if self._newest() == self._engine.version and not self._gate.held_back:
                continue
            mirrored = await self._fetch_newest()
            if mirrored is not None:
                async with self._gate.swap():
                    await self._apply(mirrored)
                self._mirror.keep_only({mirrored.version, *self._pins, *self._mirror.held()[-2:]})

    @contextlib.asynccontextmanager
    async def pinned(self, version: PolicyVersion) -> AsyncIterator[None]:
        """Have the engine serve exactly ``version`` inside the block.

        Raises TaskRefused when the version is gone: no later attempt could find it.
        """
        await self._wait_until_known(version)

        async def load() -> None:
            if self._engine.version != version:
                await self._apply(mirrored)

        self._pins.append(version)
        try:
            mirrored = await self._fetch(version)
            async with self._gate.pinned(version, load, sets_back=lambda: version != self._newest()):
                yield
        except WeightsUnusable as err:
            raise TaskRefused("weights_gone", f"evaluation is pinned to version {version}, but {err}") from None
        finally:
            self._pins.remove(version)
            self._news.set()

    def _note(self, version: PolicyVersion, manifest: BlobRef) -> None:
        if self._known.get(version) == manifest:
            return
        self._known[version] = manifest
        while len(self._known) > KNOWN_VERSIONS:
            del self._known[next(iter(self._known))]  # the stream tells them in the order they were published
        self._news.set()

    def _newest(self) -> PolicyVersion | None:
        """Return the newest version that was not found unusable."""
        newest = None
        for version, manifest in self._known.items():
            if self._refused.get(version) != manifest and is_newer(version, newest):
                newest = version
        return newest

    async def _heard_news(self) -> bool:
        try:
            await asyncio.wait_for(self._news.wait(), HEAD_POLL_S)
        except TimeoutError:
            return False
        self._news.clear()
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
                return await self._fetch(version)
            except WeightsUnusable as err:
                await self._refuse(version, err)
        return None

    async def _fetch(self, version: PolicyVersion) -> MirroredVersion:
        async with self._fetching:
            manifest = self._known[version]
            return await outlast(
                lambda: asyncio.to_thread(self._mirror.fetch, version, manifest), f"weights of version {version}"
            )

    async def _refuse(self, version: PolicyVersion, err: WeightsUnusable) -> None:
        """Report a version that cannot be loaded; the one before it is served on."""
        self._refused[version] = self._known[version]
        log.error("weights refused", policy_version=version, serving=self._engine.version, error=str(err))
        event = RunEvent(
            run_id=self._run_id,
            source=self._worker_id,
            kind="weights",
            at=time.time(),
            data={"refused": version, "serving": self._engine.version, "reason": str(err)},
        )
        with contextlib.suppress(BusUnreachable):
            await self._bus.publish(
                subjects.events(self._run_id, "weights"), event, msg_id=secrets.token_hex(16), deadline_s=_PUBLISH_S
            )

    async def _apply(self, mirrored: MirroredVersion) -> None:
        if mirrored.version == self._engine.version:
            return
        previous = self._engine.version
        started = time.monotonic()
        await self._engine.load(mirrored.folder, mirrored.version)
        pause_s = 0.0 if previous is None else time.monotonic() - started  # before the first, nothing paused
        self._figures.weights_applied += 1
        log.info(
            "weights applied",
            policy_version=mirrored.version,
            previous=previous,
            pause_s=round(pause_s, 4),
            fetch_s=round(mirrored.fetch_s, 4),
            num_bytes=mirrored.num_bytes,
        )
        fact = WeightsApplied(
            run_id=self._run_id,
            worker_id=self._worker_id,
            version=mirrored.version,
            previous_version=previous,
            pause_s=pause_s,
            fetch_s=mirrored.fetch_s,
            num_bytes=mirrored.num_bytes,
            checksum=mirrored.checksum,
        )
        msg_id = f"a:{self._worker_id}:{mirrored.version}:{secrets.token_hex(8)}"
        subject = subjects.weights_applied(self._run_id)
        await outlast(
            lambda: self._bus.publish(subject, fact, msg_id=msg_id, deadline_s=_PUBLISH_S),
            f"NATS to say that version {mirrored.version} is applied",
        )

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
