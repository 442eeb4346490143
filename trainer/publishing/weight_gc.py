"""Garbage collection of published weights, by whoever holds the lease for it; never in the training loop.

First it is said below which version nothing is kept (the *floor*, a key of the state bucket), and the
manifests below it go: no new plan can start there. What they named goes after a grace period longer than
any catch-up that had begun. What no manifest names, because a publisher was killed, goes when it is old.
A worker that loses the race nevertheless finds an object gone, and starts again from the newest anchor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from penstock.protocol import blob_keys, streams
from penstock.protocol.errors import BlobMissing, CompareAndSwapFailed, PenstockError, WireError
from penstock.protocol.facts import Heartbeat, RetirementFloor, decode, encode
from penstock.protocol.transport.blobs import BlobStat
from penstock.protocol.transport.key_value import Entry
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.protocol.weights.manifest import VersionManifest
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.head import read_head
from penstock.trainer.publishing.weight_retention import expired, orphans, retired, retirement_floor

log = structlog.get_logger("trainer.retire")

SWEEP_S = 30.0
ORPHAN_AGE_S = 3600.0  # no publication takes so long from its first object to its manifest
_MANIFEST = "/manifest.json"


@dataclass(frozen=True, slots=True)
class Retention:
    """How long what is not needed stays; times in seconds."""

    keep_versions: int
    grace_s: float
    orphan_s: float


class Retirement:
    """Sweeps every half minute in a thread of its own; use as a context manager."""

    def __init__(
        self,
        connections: Connections,
        retention: Retention,
        *,
        pinned: Callable[[], Iterable[PolicyVersion]],
        holder: str,
    ) -> None:
        """``pinned`` are versions that an evaluation needs; raises MissingStream when the run was not bootstrapped."""
        self._run_id, self._blobs = connections.run_id, connections.blobs
        self._retention = retention
        self._pinned = pinned
        self._holder = holder.encode()
        self._state, self._live, self._leases = (
            connections.bus.key_value(spec(connections.run_id).bucket).wait()
            for spec in (streams.state_bucket, streams.live_bucket, streams.lease_bucket)
        )
        self._manifests: dict[str, VersionManifest] = {}
        self._retired_at: dict[PolicyVersion, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="retirement", daemon=True)

    def __enter__(self) -> Retirement:
        """Begin to sweep."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End after the sweep under way."""
        self._stop.set()
        self._thread.join(SWEEP_S)

    def sweep(self, now: float) -> PolicyVersion | None:
        """Do one round, ``now`` in seconds of a clock that only this process reads; returns the floor.

        Raises BlobError or BusError when a server is away: the next round tries again.
        """
        head = read_head(self._state)
        if head is None:
            return None
        stored = list(self._blobs.list(blob_keys.all_weights_prefix(self._run_id)))
        self._read_manifests(stored)
        chain = self._chain(head.manifest.key)
        starts = {PolicyVersion(m.version): m.start for m in chain}
        newest = sorted(starts)[-self._retention.keep_versions :]
        wanted = [*self._needed_by_workers(), *self._pinned(), *newest]
        bases = _bases(chain)  # stay as long as what sits upon them, and lower no floor
        needed = [starts.get(version, version) for version in wanted if version not in bases]
        floor = retirement_floor(set(starts.values()) - bases, head=PolicyVersion(head.version), needed=needed)
        if floor is not None:
            floor = self._raise_floor(floor)
            self._retire(stored, floor, now, _bases(m for m in chain if not is_newer(floor, PolicyVersion(m.version))))
        return floor

    def _work(self) -> None:
        while not self._stop.wait(SWEEP_S):
            try:
                if self._has_lease():
                    self.sweep(time.monotonic())
            except PenstockError as err:
                log.warning("garbage was not collected; tried again", error=str(err))

    def _has_lease(self) -> bool:
        """Take or renew the right to collect; False when somebody else has it."""
        entry = self._leases.get(streams.GARBAGE_LEASE).wait()
        if entry is not None and entry.value != self._holder:
            return False
        try:
            self._leases.swap(streams.GARBAGE_LEASE, self._holder, entry.revision if entry else None).wait()
        except CompareAndSwapFailed:
            return False
        return True

    def _read_manifests(self, stored: Iterable[BlobStat]) -> None:
        """Read what is new; an object that is no manifest of ours names nothing."""
        keys = {stat.key for stat in stored if stat.key.endswith(_MANIFEST)}
        self._manifests = {key: manifest for key, manifest in self._manifests.items() if key in keys}
        for key in keys - self._manifests.keys():
            try:
                self._manifests[key] = VersionManifest.from_json(self._blobs.get_unverified(key))
            except (BlobMissing, WireError) as err:
                log.warning("an unreadable manifest is left alone", key=key, error=str(err))

    def _chain(self, key: str | None) -> list[VersionManifest]:
        """Follow the head's parents as far as they are stored."""
        chain: list[VersionManifest] = []
        while key is not None and (manifest := self._manifests.get(key)) is not None:
            chain.append(manifest)
            key = None if manifest.parent is None else manifest.parent.manifest.key
        return chain

    def _needed_by_workers(self) -> list[PolicyVersion]:
        beats = (_heartbeat(entry) for entry in self._live.entries().wait())
        return [PolicyVersion(b.needs_version) for b in beats if b is not None and b.needs_version is not None]

    def _raise_floor(self, floor: PolicyVersion) -> PolicyVersion:
        """Say the floor, and return it; one that was said before is not taken back."""
        entry = self._state.get(streams.FLOOR_KEY).wait()
        if entry is not None:
            said = PolicyVersion(decode(entry.value, RetirementFloor).version)
            if not is_newer(floor, said):
                return said
        self._state.put(streams.FLOOR_KEY, encode(RetirementFloor(version=floor))).wait()
        return floor

    def _retire(self, stored: list[BlobStat], floor: PolicyVersion, now: float, bases: set[PolicyVersion]) -> None:
        version_of = {stat.key: blob_keys.version_of_weights(self._run_id, stat.key) for stat in stored}
        old = retired(set(version_of.values()), floor, bases)
        manifests = [key for key in version_of if key.endswith(_MANIFEST) and version_of[key] in old]
        self._delete(manifests, "below the floor")
        self._retired_at = {version: self._retired_at.get(version, now) for version in old}
        gone = expired(self._retired_at, now=now, grace_s=self._retention.grace_s)
        named = {ref.key for m in self._manifests.values() for ref in m.references()} | self._manifests.keys()
        today = datetime.now(UTC)
        kept = {stat.key: (today - stat.modified).total_seconds() for stat in stored if version_of[stat.key] not in old}
        self._delete(
            [key for key, version in version_of.items() if version in gone and key not in manifests], "retired"
        )
        self._delete(orphans(kept, named, min_age_s=self._retention.orphan_s), "named by nothing")

    def _delete(self, keys: Iterable[str], why: str) -> None:
        doomed = sorted(keys)
        if doomed:
            self._blobs.delete(doomed)
            log.info("deleted", num_objects=len(doomed), why=why, first=doomed[0])


def _bases(manifests: Iterable[VersionManifest]) -> set[PolicyVersion]:
    """Return the models that adapters among these versions sit upon."""
    return {PolicyVersion(m.base.version) for m in manifests if m.base is not None}


def _heartbeat(entry: Entry) -> Heartbeat | None:
    try:
        return decode(entry.value, Heartbeat)
    except WireError:
        return None
