"""Garbage collection of published weights, in a thread of the process that holds the lease for it.

First it publishes the *floor*, a key of the state bucket: the version below which nothing is kept. It deletes the
manifests below the floor, so that no new plan can start there, and the objects that they named after a grace period
longer than any catch-up that had begun; those of the kept versions stay. Objects that no manifest names,
because a publisher was killed, are deleted when they are old. A worker that is slower still finds an object missing, and
starts again from the newest full snapshot.

The versions that are kept below the floor (the best evaluated ones, and milestones) are recorded in a key of the state bucket, before what it
names could be deleted: a version with a good evaluation while its evaluation still pins it, a milestone in the sweep that would retire it. An
evaluation counts as finished in a checkpoint only after that, so that a trainer killed in between repeats it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import structlog

from penstock.protocol import blob_keys, heartbeats, streams
from penstock.protocol.errors import BlobMissing, BusError, CompareAndSwapFailed, PenstockError, WireError
from penstock.protocol.facts import KeptVersion, KeptVersions, RetirementFloor, decode, encode
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import BlobStat
from penstock.protocol.transport.key_value import KeyValue
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.manifest_chain import stored_chain
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.publication import read_head
from penstock.trainer.publishing.weight_retention import (
    KeepRule,
    assembled_from,
    best_versions,
    expired,
    milestone_versions,
    orphans,
    retired,
    retirement_floor,
)

kept_log = structlog.get_logger("trainer.kept_versions")

_SWAPS = 5
_FAILURES = 3  # sweeps in a row whose record could not be written, before the rest is collected without

Stored = Mapping[PolicyVersion, tuple[int, BlobRef]]  # step and manifest of the versions that the head leads to
log = structlog.get_logger("trainer.weight_gc")
SWEEP_S = 30.0
ORPHAN_AGE_S = 3600.0  # no publication takes so long from its first object to its manifest
_MANIFEST = "/manifest.json"


class KeptVersionsKey:
    def __init__(self, state: KeyValue, rule: KeepRule) -> None:
        self._state, self._rule = state, rule
        self._lock = threading.Lock()
        self._unwritten: list[KeptVersion] = []  # evaluated while NATS did not answer
        self._num_failures = 0

    def add_result(self, evaluated: KeptVersion) -> None:
        if not self._rule.best:
            return
        with self._lock:
            self._unwritten.append(evaluated)
            try:
                self._write_results()
            except BusError as err:
                kept_log.warning("evaluated version not recorded yet", policy_version=evaluated.version, error=str(err))

    def unwritten(self) -> set[PolicyVersion]:
        with self._lock:
            return {PolicyVersion(kept.version) for kept in self._unwritten}

    def update(self, stored: Stored) -> KeptVersions:
        """Add what is due and return the record: results not written yet, milestones, and where the versions are stored.

        Raises BusError when it cannot be written, but only in its first attempts: a NATS user made before this key existed has no right
        to write it, and garbage must be collected all the same. Then no further version is kept.
        """
        try:
            with self._lock:
                self._write_results()
                kept = self._change(lambda kept: _located(_with_milestones(kept, stored, self._rule), stored))
        except BusError as err:
            self._num_failures += 1
            if self._num_failures < _FAILURES:
                raise
            kept_log.warning("no further version is kept: renew the rights of the trainer's NATS user", error=str(err))
            with self._lock:
                self._unwritten.clear()
            return self.read()
        self._num_failures = 0
        return kept

    def read(self) -> KeptVersions:
        """Return the record; an unreadable one, which a newer build may have written, is as if there were none."""
        return self._read()[0]

    def _write_results(self) -> None:
        if self._unwritten:
            results = tuple(self._unwritten)
            measure, most = results[-1].measure, self._rule.best
            self._change(
                lambda kept: kept.model_copy(
                    update={"best": best_versions((*kept.best, *results), measure=measure, most=most)}
                )
            )
            self._unwritten.clear()

    def _change(self, change: Callable[[KeptVersions], KeptVersions]) -> KeptVersions:
        num_swaps = 0
        while True:
            before, revision = self._read()
            if (after := change(before)) == before:
                return before
            try:
                self._state.swap(streams.KEPT_KEY, encode(after), revision).wait()
            except CompareAndSwapFailed:
                num_swaps += 1
                if num_swaps == _SWAPS:
                    raise
            else:
                return after

    def _read(self) -> tuple[KeptVersions, int | None]:
        entry = self._state.get(streams.KEPT_KEY).wait()
        if entry is None:
            return KeptVersions(), None
        try:
            return decode(entry.value, KeptVersions), entry.revision
        except WireError as err:
            kept_log.warning("the record of kept versions cannot be read: it is written again", error=str(err))
            return KeptVersions(), entry.revision


def _with_milestones(kept: KeptVersions, stored: Stored, rule: KeepRule) -> KeptVersions:
    known = {PolicyVersion(milestone.version): milestone for milestone in kept.milestones}
    for version, (step, manifest) in stored.items():
        known.setdefault(version, KeptVersion(version=version, step=step, manifest=manifest))
    milestones = tuple(known[version] for version in milestone_versions(known, rule))
    return kept.model_copy(update={"milestones": milestones, "best": kept.best[: rule.best]})


def _located(kept: KeptVersions, stored: Stored) -> KeptVersions:
    """Add the manifests of the best versions; one that was not found before and is not stored is left out."""
    best, newest = list[KeptVersion](), max(stored, default=PolicyVersion(0))
    for evaluated in kept.best:
        version = PolicyVersion(evaluated.version)
        if evaluated.manifest is not None or is_newer(version, newest):  # published since the head was read
            best.append(evaluated)
        elif version in stored:
            best.append(evaluated.model_copy(update={"manifest": stored[version][1]}))
        else:
            kept_log.warning("an evaluated version is not stored any more: it is not kept", policy_version=version)
    return kept.model_copy(update={"best": tuple(best)})


@dataclass(frozen=True, slots=True)
class Retention:
    keep_versions: int
    grace_s: float
    orphan_s: float
    keep: KeepRule = field(default_factory=KeepRule)


class WeightGc:
    def __init__(
        self, connections: Connections, retention: Retention, *, pinned: Callable[[], Iterable[PolicyVersion]], holder: str,
    ) -> None:  # fmt: skip
        self._run_id, self._blobs = connections.run_id, connections.blobs
        self._retention, self._pinned = retention, pinned
        self._holder = holder.encode()
        self._state, self._live, self._leases = (
            connections.bus.key_value(spec(connections.run_id).bucket).wait()
            for spec in (streams.state_bucket, streams.live_bucket, streams.lease_bucket)
        )
        self.kept = KeptVersionsKey(self._state, retention.keep)
        self._manifests: dict[str, VersionManifest] = {}
        self._retired_at: dict[PolicyVersion, float] = {}
        self._is_last = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="weight-gc", daemon=True)

    def __enter__(self) -> WeightGc:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop after the current sweep, and record the milestones since; a finished run is swept a last time."""
        self._stop.set()
        self._thread.join(SWEEP_S)
        try:
            if not self._thread.is_alive() and holds_lease(self._leases, streams.GARBAGE_LEASE, self._holder):
                if self._is_last:
                    self.sweep(time.monotonic(), grace_s=0.0)
                elif (head := read_head(self._state)) is not None:
                    self._read_manifests(list(self._blobs.list(blob_keys.all_weights_prefix(self._run_id))))
                    self.kept.update(_stored(head.manifest, stored_chain(head.manifest, self._manifests)))
        except PenstockError as err:
            log.warning("the last milestones are not recorded", error=str(err))

    def run_is_finished(self) -> None:
        """Collect at the exit without a grace period: no worker is behind, and no later sweep would come."""
        self._is_last = True

    def sweep(self, now: float, *, grace_s: float | None = None) -> PolicyVersion | None:
        """Collect once, and return the floor; ``now`` is in seconds of a clock that only this process reads.

        ``grace_s`` replaces that of the settings. Raises BlobError or BusError if a server does not answer: the next sweep tries again.
        """
        head = read_head(self._state)
        if head is None:
            return None
        stored = list(self._blobs.list(blob_keys.all_weights_prefix(self._run_id)))
        self._read_manifests(stored)
        chain = list(stored_chain(head.manifest, self._manifests))
        kept = self.kept.update(_stored(head.manifest, chain))  # before anything is deleted
        starts = {PolicyVersion(m.version): m.start for m in chain}
        newest = sorted(starts)[-self._retention.keep_versions :]
        wanted = [*self._needed_by_workers(), *self._pinned(), *self.kept.unwritten(), *newest]
        bases = _bases(chain)  # kept as long as their adapters, and do not lower the floor
        needed = [starts.get(version, version) for version in wanted if version not in bases]
        floor = retirement_floor(set(starts.values()) - bases, head=PolicyVersion(head.version), needed=needed)
        if floor is not None:
            floor = self._raise_floor(floor)
            above = (m for m in chain if not is_newer(floor, PolicyVersion(m.version)))
            assembled = assembled_from((*kept.best, *kept.milestones), self._manifests)
            self._retire(
                stored, floor, now, _bases(above) | assembled, self._retention.grace_s if grace_s is None else grace_s
            )
        return floor

    def _work(self) -> None:
        while not self._stop.wait(SWEEP_S):
            try:
                if holds_lease(self._leases, streams.GARBAGE_LEASE, self._holder):
                    self.sweep(time.monotonic())
            except PenstockError as err:
                log.warning("garbage collection failed; trying again in half a minute", error=str(err))

    def _read_manifests(self, stored: Iterable[BlobStat]) -> None:
        keys = {stat.key for stat in stored if stat.key.endswith(_MANIFEST)}
        self._manifests = {key: manifest for key, manifest in self._manifests.items() if key in keys}
        for key in keys - self._manifests.keys():
            try:
                self._manifests[key] = VersionManifest.from_json(self._blobs.get_unverified(key))
            except (BlobMissing, WireError) as err:
                log.warning("unreadable manifest skipped", key=key, error=str(err))

    def _needed_by_workers(self) -> list[PolicyVersion]:
        beats = heartbeats.readable(entry.value for entry in self._live.entries().wait())
        return [PolicyVersion(beat.needs_version) for beat in beats if beat.needs_version is not None]

    def _raise_floor(self, floor: PolicyVersion) -> PolicyVersion:
        entry = self._state.get(streams.FLOOR_KEY).wait()
        if entry is not None:
            published = PolicyVersion(decode(entry.value, RetirementFloor).version)
            if not is_newer(floor, published):
                return published
        self._state.put(streams.FLOOR_KEY, encode(RetirementFloor(version=floor))).wait()
        return floor

    def _retire(
        self, stored: list[BlobStat], floor: PolicyVersion, now: float, kept: set[PolicyVersion], grace_s: float
    ) -> None:
        version_of = {stat.key: blob_keys.version_of_weights(self._run_id, stat.key) for stat in stored}
        old = retired(set(version_of.values()), floor, kept)
        manifests = [key for key in version_of if key.endswith(_MANIFEST) and version_of[key] in old]
        self._delete(manifests, "manifests below the floor; their weights follow after the grace period")
        self._retired_at = {version: self._retired_at.get(version, now) for version in old}
        past_grace = expired(self._retired_at, now=now, grace_s=grace_s)
        named = {ref.key for m in self._manifests.values() for ref in m.references()} | self._manifests.keys()
        today = datetime.now(UTC)
        ages = {stat.key: (today - stat.modified).total_seconds() for stat in stored if version_of[stat.key] not in old}
        self._delete(
            [key for key, version in version_of.items() if version in past_grace and key not in manifests], "retired"
        )
        self._delete(orphans(ages, named, min_age_s=self._retention.orphan_s), "orphan")

    def _delete(self, keys: Iterable[str], reason: str) -> None:
        unneeded = sorted(keys)
        if unneeded:
            self._blobs.delete(unneeded)
            log.info("deleted", num_objects=len(unneeded), reason=reason, first=unneeded[0])


def _stored(head: BlobRef, chain: Iterable[VersionManifest]) -> Stored:
    stored: dict[PolicyVersion, tuple[int, BlobRef]] = {}
    reference = head
    for manifest in chain:
        stored[PolicyVersion(manifest.version)] = (manifest.step, reference)
        if manifest.parent is not None:
            reference = manifest.parent.manifest
    return stored


def _bases(manifests: Iterable[VersionManifest]) -> set[PolicyVersion]:
    return {PolicyVersion(m.base.version) for m in manifests if m.base is not None}


def holds_lease(leases: KeyValue, key: str, holder: bytes) -> bool:
    entry = leases.get(key, may_lag=True).wait()
    if entry is not None and entry.value != holder:
        return False
    try:
        leases.swap(key, holder, entry.revision if entry else None).wait()
    except CompareAndSwapFailed:
        return False
    return True
