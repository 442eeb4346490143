"""Follow the published weights: newest announced → fetch → verify → apply → announce as applied.

Where the engine changes words in place, it does so first, and the worker's copy is written behind it:

1. The changes from the served version are read from the stored patches: each object has its hash, each position is inside its tensor, the chain
   of manifests starts at that version, each new value is finite. What is not so goes the folder's way, which refuses it.
2. The engine applies them and answers with the version. The folder before stays: until 3 is done, a restart and any doubt load that.
3. The folder is written and its root compared with the manifest's. Only then is the version announced as applied, does a restart load it, are packs
   given that it has sampled, and does the next version begin: one copy is behind at most. A killed worker leaves it torn (`mirror_slot.py`).
4. A copy that differs, cannot be written or takes longer than `COPY_DEADLINE_S` withdraws the version once nothing is pinned: the engine loads the
   folder before, and what the version has sampled is sampled again. The next version goes the folder's way: fetched and verified first.

So the version that is served goes back after a failure or to one that an evaluation pins, else never. Fetching happens while the engine
generates; only the swap itself makes generation wait. Versions that are superseded while another is fetched are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, replace

import structlog

from penstock.protocol import streams, subjects
from penstock.protocol.errors import BlobStoreUnreachable, BusUnreachable, ConfigError, WireError
from penstock.protocol.facts import Head, WeightsPublished, decode
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.rollout_service.checks.check_weights import WeightsCheck
from penstock.rollout_service.engines.engine import Engine, first_of
from penstock.rollout_service.engines.weight_changes import NoChanges, WeightChanges
from penstock.rollout_service.errors import EngineDisagrees, MirrorFull, TaskRefused, WeightsUnusable
from penstock.rollout_service.retry import DEADLINE_S, retry
from penstock.rollout_service.weights.mirror import Mirror, MirroredVersion
from penstock.rollout_service.weights.servable_versions import ServableVersions, VersionGate
from penstock.rollout_service.weights.weight_announcements import Disagreement, PublishedVersions, WeightAnnouncements
from penstock.rollout_service.weights.weight_swap import Patched, Swapped, WeightSwap

log = structlog.get_logger("rollout.weight_follower")

# Between two times that a disagreement makes the engine load its files again: anyone may announce one.
ENGINE_CHECK_S = 600.0
HEAD_POLL_S = 5.0  # how late a version is noticed whose announcement was missed
PIN_DEADLINE_S = 60.0  # how long an announcement may come after the task that pins its version
ISSUED_VERSION_DEADLINE_S = 30.0  # how long a pack waits for the version it was issued for
COPY_DEADLINE_S = 600.0  # of the copy of a version that is served already
_PIN_POLL_S = 0.05


@dataclass(eq=False, kw_only=True)
class WeightFollower:
    """Keeps one worker's engine at the newest version, or at the one an evaluation pins."""

    bus: Bus
    mirror: Mirror
    engine: Engine
    servable: ServableVersions
    gate: VersionGate
    announcements: WeightAnnouncements
    swap: WeightSwap
    run_id: str

    def __post_init__(self) -> None:
        self._published = PublishedVersions()
        self._announced = asyncio.Event()  # a version beyond the head was
        self._changed = asyncio.Event()  # a version was published, a pin released, or an adapter is unused
        self.servable.on_unused = self._changed.set
        self._fetching = asyncio.Lock()
        self._check = WeightsCheck()
        self._newest: MirroredVersion | None = None  # the last that was applied as the newest
        self._engine_checked_at = -ENGINE_CHECK_S
        self._pins: list[PolicyVersion] = []  # one entry for each holder: their folders stay
        self._next: PolicyVersion | None = None  # being fetched, or fetched and waiting for its swap: its folder stays
        self._patch: Patched | None = None  # that is served, and not verified yet
        self._verified = asyncio.Event()  # replaced when that ends
        self._copies_fail = False  # the last that should have been written behind an update was not

    async def start(self) -> MirroredVersion:
        """Wait for the first usable version and have the engine serve it.

        A worker needs to know only NATS, S3 and the run: the head names the newest version.
        """
        loop = asyncio.get_running_loop()

        def on_published(fact: WeightsPublished) -> None:  # on the bus's thread
            loop.call_soon_threadsafe(self._note_announcement, PolicyVersion(fact.version), fact.manifest)

        state = await self.bus.key_value(streams.state_bucket(self.run_id).bucket)
        subject = subjects.weights_published(self.run_id)
        await self.bus.tail(f"{self.run_id}-weights", subject, WeightsPublished, on_published, from_start=True)
        self._state = state
        self.announcements.on_disagreement = self._changed.set
        await self.announcements.start()
        while True:
            await self._read_head(state)
            mirrored = await self._fetch_newest()
            if mirrored is not None:
                await self.swap.turns.take()
            if mirrored is not None and await self._apply_or_refuse(mirrored):
                self._next = None
                return mirrored
            log.info("waiting for the trainer to publish weights", run_id=self.run_id)
            await self._wait_for_change()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_announced_heads())
            tasks.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            if not await self._wait_for_change():
                await self._read_head(self._state)
            if self._published.newest() != self.engine.version or self.gate.serves_older:
                mirrored = None if await self._patch_newest() else await self._fetch_newest()
                if mirrored is not None and self.swap.turns.is_held:  # else it is loaded when the engine resumes
                    keeps_model = self.servable.shares_model(mirrored) and not self.gate.serves_older
                    async with contextlib.nullcontext() if keeps_model else self.gate.swap():
                        await self._apply_or_refuse(mirrored, keeps_model=keeps_model)
                    self._next = None
            if self.swap.turns.is_held and (disagreement := self.announcements.take_disagreement()) is not None:
                await self._check_engine(disagreement)
            await self._remove_unused()

    async def resume(self) -> bool:
        """Load the version that an evaluation holds, or the newest, into an engine that released its memory; False if none can be.

        Not by way of the gate: what waits for the engine may be an evaluation, for whose end a swap would wait.
        """
        pin = self.gate.pin
        mirrored = await self._fetch_newest() if pin is None else await self._fetch(pin)
        return mirrored is not None and await self._apply_or_refuse(mirrored)

    async def _patch_newest(self) -> bool:
        """Have the engine serve the newest version as a change of the one it serves, and write the copy then; False: it serves what it did."""
        served, version, limit = self.engine.version, self._published.newest(), self.engine.max_changed_share
        if served is None or version is None or version == served or not limit or self._copies_fail:
            return False
        patch = Patched(served, version, self._published.manifest(version))
        fetch_s = await self._stage(patch, limit)
        if fetch_s is None or not self.swap.turns.is_held:
            return False
        self._next = version
        try:
            async with self.gate.swap(lambda: self.engine.version == version):
                self._patch = patch
                pause_s = await self.swap.patch(served, version)
            return pause_s is not None and await self._copy(patch, pause_s, fetch_s)
        finally:
            self._next = self._patch = None
            self._verified.set()
            self._verified = asyncio.Event()

    async def _stage(self, patch: Patched, limit: float) -> float | None:
        """Have the engine prepare a change; return the seconds that reading it took, or None where the folder has to be loaded."""
        metrics = self.swap.metrics

        def find() -> WeightChanges | NoChanges:
            with metrics.applying("fetch"):
                found = self.mirror.changes(patch.base, patch.version, patch.manifest, limit)
            if not isinstance(found, WeightChanges):
                return found
            with metrics.applying("check"):
                words = ((tensor.dtype, tensor.new) for tensor in found.tensors)
                return found if self._check.passes(patch.version, words) else "chain"

        started = time.monotonic()
        async with self._fetching:
            changes = await asyncio.to_thread(find)
        fetch_s = time.monotonic() - started
        with metrics.applying("stage"):
            return fetch_s if await self.engine.stage(changes) else None

    async def _copy(self, patch: Patched, pause_s: float, fetch_s: float) -> bool:
        """Write and verify the copy of a version that is served already, and announce it; or withdraw the version. Returns True."""
        copying = asyncio.create_task(self._fetch(patch.version, newest=True, behind=patch.manifest))
        try:
            await asyncio.wait({copying}, timeout=COPY_DEADLINE_S)
            if not copying.done():
                await self._withdraw(patch.version, f"not written and verified within {COPY_DEADLINE_S:.0f} s")
                await asyncio.wait({copying}, timeout=COPY_DEADLINE_S)
            if not copying.done():
                raise ConfigError(
                    f"worker.cache_dir: version {patch.version} was not written within twice {COPY_DEADLINE_S:.0f} s; use a disk that is faster"
                )
            mirrored = copying.result()
        except (WeightsUnusable, MirrorFull, BlobStoreUnreachable) as err:
            await self._withdraw(patch.version, str(err))
            if isinstance(err, WeightsUnusable):
                await self._refuse(patch.version, err, patch.manifest)
            return True
        finally:
            copying.cancel()
        if not mirrored.is_patched:
            await self._withdraw(patch.version, "made of more than the patches that the engine has")
        if not self._copies_fail and await self.swap.keep(mirrored):
            self._newest = mirrored
            await self.swap.announce(Swapped(replace(mirrored, fetch_s=fetch_s), patch.base, pause_s))
        return True

    async def _withdraw(self, version: PolicyVersion, problem: str) -> None:
        reason = f"version {version} was served before its copy, which failed: {problem}"
        log.error("version withdrawn", policy_version=version, reason=reason)
        self._copies_fail, self._check.passed = True, None  # other words may come under the same number
        async with self.gate.swap(lambda: False):
            await self.swap.withdraw(version, reason)

    async def wait_until_verified(self, versions: Collection[int]) -> None:
        """Wait while the copy of one of the versions is not verified, twice `COPY_DEADLINE_S` and a load at most; never inside `pinned`."""
        while self._patch is not None and self._patch.version in versions:
            await self._verified.wait()

    async def _check_engine(self, disagreement: Disagreement) -> None:
        """Have the engine load its files again; raises EngineDisagrees if its checksum was another one before.

        A worker whose engine serves what is in the verified files goes on, whatever others announce.
        """
        served, is_due = self._newest, time.monotonic() - self._engine_checked_at >= ENGINE_CHECK_S
        if served is None or served.version != self.engine.version or self.servable.adapters or not is_due:
            return
        self._next = served.version  # its folder stays
        async with self.gate.swap():
            if self.engine.version != served.version:  # an evaluation came first
                await self._apply(served)
            is_right = await self.swap.is_as_loaded(served)
        self._next, self._engine_checked_at = None, time.monotonic()
        own_id = self.announcements.worker_id
        if not is_right:
            text = f"the engine of worker {own_id} serves other weights than its verified files as version {served.version}"
            text = str(disagreement) if own_id in disagreement.minority else text
            await self.announcements.raise_alarm(text)
            raise EngineDisagrees(f"{text}; this worker exits: start it again with a fresh engine")
        log.warning("this engine serves what is in its verified files; others differ", policy_version=served.version)
        if own_id in disagreement.minority:
            why = "the other announcements are false, or this host loads weights wrongly"
            await self.announcements.raise_alarm(f"{disagreement}, and has the checksum of its verified files: {why}")

    async def _apply_or_refuse(self, mirrored: MirroredVersion, *, keeps_model: bool = False) -> bool:
        try:
            if not await self._apply(mirrored, keeps_model=keeps_model):
                self._changed.set()  # to be tried again, by way of the gate
                return False
        except WeightsUnusable as err:
            await self._refuse(mirrored.version, err, self._published.manifest(mirrored.version))
            return False
        self._newest, self._copies_fail = mirrored, False
        return True

    async def _remove_unused(self) -> None:
        await self.swap.unload_unused(self._needed)
        async with self._fetching:
            await asyncio.to_thread(self.mirror.trim, self._in_use())

    async def wait_for_version(self, version: PolicyVersion) -> None:
        """Wait until the engine serves ``version`` or a newer one; of several engines one suffices.

        The trainer's admission assumes that a task's version samples it: an older one would make it stale early. After `ISSUED_VERSION_DEADLINE_S`,
        or at once when the version cannot be used, what is served samples it, and the trainer's staleness rule decides.
        """
        if not is_newer(version, self.engine.version):
            return
        await first_of(
            self.engine.wait_for_version(version),
            self._published.wait_until_refused(version),
            timeout_s=ISSUED_VERSION_DEADLINE_S,
        )

    @contextlib.asynccontextmanager
    async def pinned(self, version: PolicyVersion) -> AsyncIterator[None]:
        """Have the engine serve exactly ``version`` in the block, beside others of its model; raises TaskRefused when it was deleted."""
        await self._wait_until_published(version)

        async def load() -> None:
            if self.engine.version != version:
                await self._apply(mirrored)

        self._pins.append(version)
        try:
            mirrored = await self._fetch(version)
            is_beside = self.servable.shares_model(mirrored) and (mirrored.base or self.servable.adapters)
            if is_beside and await self._apply(mirrored, keeps_model=True):
                yield
                return
            async with self.gate.pinned(version, load, is_older=lambda: version != self._published.newest()):
                yield
        except WeightsUnusable as err:
            raise TaskRefused("weights_gone", f"evaluation is pinned to version {version}, but {err}") from None
        finally:
            self._pins.remove(version)
            self._changed.set()

    def _note_announcement(self, version: PolicyVersion, manifest: BlobRef) -> None:
        if self._published.announce(version, manifest):
            self._announced.set()
            self._changed.set()

    async def _read_announced_heads(self) -> None:
        """Read the head whenever a version beyond it was announced, also while a swap waits."""
        while True:
            await self._announced.wait()
            self._announced.clear()
            await self._read_head(self._state)

    async def _wait_for_change(self) -> bool:
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the event.
            async with asyncio.timeout(HEAD_POLL_S):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    async def _read_head(self, state: KeyValue) -> None:
        try:
            entry = await state.get(streams.HEAD_KEY, may_lag=True)  # it is read again
        except BusUnreachable as err:
            log.warning("NATS unreachable, cannot read the head", error=str(err))
            return
        if entry is None:
            return
        try:
            head = decode(entry.value, Head)
        except WireError as err:  # announcements of versions still arrive
            log.warning("the head cannot be read: this worker learns of versions by announcements only", error=str(err))
            self._published.add_announced()
            self._changed.set()
            return
        if self._published.add(PolicyVersion(head.version), head.manifest):
            self._changed.set()

    async def _fetch_newest(self) -> MirroredVersion | None:
        while (version := self._published.newest()) is not None:
            manifest = self._published.manifest(version)
            try:
                self._next = version
                return await self._fetch(version, newest=True)
            except WeightsUnusable as err:
                self._next = None
                await self._read_head(self._state)
                if self._published.newest() == version:  # a superseded version may be deleted by now, which is no fault
                    await self._refuse(version, err, manifest)
        return None

    async def _fetch(
        self, version: PolicyVersion, *, newest: bool = False, behind: BlobRef | None = None
    ) -> MirroredVersion:
        """Fetch and check a version; ``behind`` is the manifest of one that is served already: a failure is not retried."""
        manifest, metrics = behind or self._published.manifest(version), self.swap.metrics

        def fetch() -> MirroredVersion:
            with metrics.applying("copy" if behind else "fetch"):
                mirrored = self.mirror.fetch(version, manifest, keep=self._in_use(), newest=newest)
            model = mirrored.base or mirrored
            with metrics.applying("copy" if behind else "check"):
                self._check.check(model.folder, model.version)
            return mirrored

        async def attempt() -> MirroredVersion:
            async with self._fetching:
                return await asyncio.to_thread(fetch)

        return await retry(attempt, f"fetch the weights of version {version}", deadline_s=0.0 if behind else DEADLINE_S)

    def _needed(self) -> set[PolicyVersion]:
        return {*self._pins, *([] if self._next is None else [self._next])}

    def _in_use(self) -> set[PolicyVersion]:
        served = (self.servable.model, self.engine.version, *self.servable.adapters)
        base = set() if self._patch is None else {self._patch.base}
        return self._needed() | base | {version for version in served if version is not None}

    async def _refuse(self, version: PolicyVersion, err: WeightsUnusable, manifest: BlobRef) -> None:
        self._published.refuse(version, manifest)
        log.error("weights refused", policy_version=version, serving=self.engine.version, error=str(err))
        await self.announcements.announce_refused(version, manifest, err, serving=self.engine.version)

    async def _apply(self, mirrored: MirroredVersion, *, keeps_model: bool = False) -> bool:
        swapped = await self.swap.load(mirrored, keeps_model=keeps_model)
        is_served = not keeps_model or self.servable.shares_model(mirrored)
        if swapped is not None:
            await self.swap.announce(swapped)
        return is_served

    async def _wait_until_published(self, version: PolicyVersion) -> None:
        deadline = time.monotonic() + PIN_DEADLINE_S
        while version not in self._published:
            newest, pinned = self._published.newest(), f"evaluation is pinned to version {version}, which"
            if newest is not None and not is_newer(version, newest):
                known = f"the {len(self._published)} versions that are known (newest: {newest})"
                raise TaskRefused("weights_gone", f"{pinned} is not among {known}")
            if time.monotonic() > deadline:
                raise TaskRefused("weights_unknown", f"{pinned} was not announced within {PIN_DEADLINE_S:.0f} s")
            await asyncio.sleep(_PIN_POLL_S)
