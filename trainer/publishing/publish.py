"""Publishes versions in a separate thread; the training thread submits a snapshot and never waits.

If storage is slower than the steps, a snapshot whose publication has not begun is replaced by the next one: its
version is skipped and counted, and the next patch covers both. A snapshot that must be published is never skipped.

Any process with the login of a worker may refuse any version in the name of any worker. So what is kept of refusals is bounded, and so is the
number of republications within a period, each of which stores a full snapshot.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from penstock.protocol import subjects
from penstock.protocol.errors import WireError
from penstock.protocol.facts import WeightsPublished, WeightsRefused, decode
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.publication import Publication, PublishedVersions, VersionPublisher
from penstock.trainer.publishing.rank_publisher import PublishCoordinator, RankPublisher
from penstock.trainer.publishing.version_writer import VersionWriter, Written
from penstock.trainer.publishing.weight_buckets import ModelWeights, Snapshot
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import SigningKey


_MAX_REPUBLICATIONS = 3
_BUDGET = 6  # republications, however many versions are refused
_REFILL_S = 600.0  # until one more is allowed
_ENOUGH_WORKERS = 2  # more refusals of one manifest change nothing
_MAX_MANIFESTS = 64  # remembered; a refusal may arrive before its version is known to be the newest
log = structlog.get_logger("trainer.publish")
_FULL_SNAPSHOT_DEADLINE_S = 60.0  # at the end of the run
_RECHECK_S = 30.0  # a refused version is published again once the budget for that allows it
_MAX_REASON = 500  # characters of a refusal's reason that are logged


class Refusals:
    """Collects the refusals of workers. Not thread-safe: guarded by its owner's lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._refused: OrderedDict[str, set[str]] = OrderedDict()  # sha256 of a manifest -> workers that cannot use it
        self._num_republications: Counter[int] = Counter()  # by version
        self._clock = clock
        self._left = float(_BUDGET)
        self._counted_at = clock()

    def add(self, fact: WeightsRefused, newest: Written | None) -> bool:
        workers = self._refused.setdefault(fact.manifest.sha256, set())
        if fact.worker_id in workers or len(workers) >= _ENOUGH_WORKERS:
            return False
        workers.add(fact.worker_id)
        if newest is not None and newest.reference.sha256 in self._refused:
            self._refused.move_to_end(newest.reference.sha256)
        while len(self._refused) > _MAX_MANIFESTS:
            self._refused.popitem(last=False)
        return newest is not None and newest.reference.sha256 == fact.manifest.sha256

    def need_republication(self, newest: Written | None) -> bool:
        if newest is None:
            return False
        workers = self._refused.get(newest.reference.sha256, set())
        version = newest.manifest.version
        is_due = republication_is_due(newest.manifest.kind, workers, self._num_republications[version])
        return is_due and self._refilled() >= 1

    def clear(self, newest: Written) -> None:
        del self._refused[newest.reference.sha256]
        version = newest.manifest.version
        self._num_republications = Counter({version: self._num_republications[version] + 1})
        self._left = self._refilled() - 1

    def _refilled(self) -> float:
        now = self._clock()
        self._left = min(_BUDGET, self._left + (now - self._counted_at) / _REFILL_S)
        self._counted_at = now
        return self._left


def republication_is_due(kind: str, refused_by: set[str], num_republications: int) -> bool:
    """Return True if a refused version should be published again; ``num_republications`` times it was already.

    One worker is enough for a patch or an adapter: an object that it needs is missing or wrong. A full snapshot, or
    a version that was published again, counts as refused only if two workers refuse it: one alone has a local
    problem. After three attempts storing it once more will not help.
    """
    if num_republications >= _MAX_REPUBLICATIONS:
        return False
    return len(refused_by) >= (1 if kind != "anchor" and num_republications == 0 else 2)


class Publisher:
    """Publishes snapshots in a separate thread. Its errors are raised at the next call of the training thread."""

    def __init__(
        self, connections: Connections, *, model_folder: Path, epoch: int = 0, policy: FullSnapshotPolicy | None = None,
        on_published: Callable[[Publication], None] = lambda _: None, coordinator: PublishCoordinator | None = None,
        signing_key: SigningKey | None = None,
    ) -> None:  # fmt: skip
        """Read the run's head and start the thread, on which ``on_published`` is called; raises MissingStream."""
        self._run_id, self._bus, self._blobs = connections.run_id, connections.bus, connections.blobs
        self._epoch = epoch
        writer = VersionWriter(connections, model_folder, signing_key)
        trusted_keys = None if signing_key is None else signing_key.trusted
        self._coordinator = coordinator or PublishCoordinator(
            RankPublisher(connections.blobs, connections.run_id, trusted_keys=trusted_keys)
        )
        self.versions = VersionPublisher(
            connections, writer, self._coordinator, policy=policy or FullSnapshotPolicy(), epoch=epoch
        )
        self._on_published = on_published
        head = self.versions.head.value
        self._published = {PolicyVersion(head.version)} if head else set[PolicyVersion]()
        announced = self._announced()
        self.steps_before = {version: fact.step for version, fact in announced.items()}
        """Optimizer steps done at the versions that earlier sessions published."""
        if head is not None:
            version = PolicyVersion(head.version)
            self.steps_before[version] = head.step
            if version not in announced or announced[version].manifest != head.manifest:
                self.versions.announce_head()
        self._sampled_with = PublishedVersions(announced, PolicyVersion(head.version) if head else None)
        self._pinned: set[PolicyVersion] = set()
        self._waiting: list[Snapshot[Any]] = []
        self._publishing: Snapshot[Any] | None = None
        self._refusals = Refusals()
        self._failure: Exception | None = None
        self._closing = False
        self._changed = threading.Condition()
        self.num_published = 0
        self.num_skipped = 0
        self.seconds: dict[str, Any] = {"publish_s": 0.0, "publish_stages_s": {}}  # of the newest publication
        refused = subjects.weights_refused(connections.run_id)
        connections.bus.tail(f"{connections.run_id}-weights", refused, WeightsRefused, self._on_refusal).wait()
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    def pinned(self) -> set[PolicyVersion]:
        with self._changed:
            return set(self._pinned)

    def submit(self, snapshot: Snapshot[Any]) -> None:
        with self._changed:
            self._raise_failure()
            if snapshot.must_publish:
                self._pinned.add(snapshot.version)
            self._drop_overtaken()
            if isinstance(snapshot.weights, ModelWeights):  # a snapshot has all of an adapter
                self._coordinator.own.hold(snapshot.weights.buckets)
            self._waiting.append(snapshot)
            self._changed.notify_all()

    def drop_overtaken(self) -> list[int]:
        with self._changed:
            self._drop_overtaken()
            return self._wanted()

    def check(self) -> None:
        with self._changed:
            self._raise_failure()

    def is_published(self, version: PolicyVersion) -> bool:
        with self._changed:
            self._raise_failure()
            return version in self._published

    def never_published(self, versions: Iterable[PolicyVersion]) -> list[PolicyVersion]:
        with self._changed:
            return self._sampled_with.never_published(versions)

    def wait_until_published(self, version: PolicyVersion, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        with self._changed:
            while version not in self._published:
                self._raise_failure()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise PublicationFailed(
                        f"version {version} was not published within {deadline_s:.0f} s; check that the object store "
                        f"(bucket {self._blobs.bucket}) and NATS at {self._bus.url} answer"
                    )

    def pin(self, version: PolicyVersion) -> None:
        with self._changed:
            self._pinned.add(version)
            self._published.add(version)

    def stored_steps(self, versions: Collection[PolicyVersion]) -> dict[PolicyVersion, int]:
        """Return the step of each of these versions that is announced and stored; raises BusError or BlobError."""
        if not versions:
            return {}
        announced = self._announced()
        return {
            version: announced[version].step
            for version in versions
            if version in announced and self._blobs.exists(announced[version].manifest.key)
        }

    def _announced(self) -> dict[PolicyVersion, WeightsPublished]:
        announced: dict[PolicyVersion, WeightsPublished] = {}
        subject = subjects.weights_published(self._run_id)
        for message in self._bus.read_stream(f"{self._run_id}-weights", subject).wait():
            try:
                fact = decode(message.data, WeightsPublished)
            except WireError as err:
                log.warning("message that is no announcement of weights skipped", error=str(err))
                continue
            announced[PolicyVersion(fact.version)] = fact
        return announced

    def unpin(self, version: PolicyVersion) -> None:
        with self._changed:
            self._pinned.discard(version)

    def close(self, deadline_s: float = 120.0) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(deadline_s)
        self.versions.models.full_snapshots.close(_FULL_SNAPSHOT_DEADLINE_S)
        with self._changed:
            self._raise_failure()
        if self._thread.is_alive():
            raise PublicationFailed(
                f"the last version was not published within {deadline_s:.0f} s of the end of the run; check that the "
                f"object store (bucket {self._blobs.bucket}) and NATS at {self._bus.url} answer"
            )

    def _drop_overtaken(self) -> None:
        must = [snapshot for snapshot in self._waiting if snapshot.must_publish]
        self.num_skipped += len(self._waiting) - len(must)
        self._waiting = must
        self._coordinator.own.discard(self._wanted())  # the other ranks do so with the order of the next copy

    def _wanted(self) -> list[int]:
        publishing = [] if self._publishing is None else [self._publishing]
        return [snapshot.weights.buckets.copy_id for snapshot in (*publishing, *self._waiting)]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PublicationFailed(f"weights could not be published: {self._failure}") from self._failure

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._closing or self._is_refused()):
                    self._changed.wait(_RECHECK_S)
                self._publishing = snapshot = self._waiting.pop(0) if self._waiting else None
                if snapshot is not None:
                    self._sampled_with.add(snapshot.version)
                is_refused = self._is_refused()
                if snapshot is None and not is_refused:
                    return
            try:
                if is_refused:
                    self._publish_again()
                if snapshot is not None:
                    self._record(self.versions.publish(snapshot))
            except Exception as err:  # noqa: BLE001  the training thread raises it
                log.error("publication failed", error=f"{type(err).__name__}: {err}")  # noqa: TRY400
                with self._changed:
                    self._failure = err
                    self._changed.notify_all()
                return

    def _record(self, publication: Publication) -> None:
        log.info("published", **{k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(publication).items()})
        with self._changed:
            self.seconds = {"publish_s": publication.publish_s, "publish_stages_s": publication.stages_s}
            self.num_published += 1
            self._published.add(publication.version)
            self._changed.notify_all()
        self._on_published(publication)

    def _on_refusal(self, fact: WeightsRefused) -> None:
        with self._changed:
            is_new = self._refusals.add(fact, self.versions.newest)
            self._changed.notify_all()
        if is_new:
            reason = fact.reason[:_MAX_REASON]
            log.warning(
                "a worker refused a version", worker_id=fact.worker_id, policy_version=fact.version, reason=reason
            )

    def _is_refused(self) -> bool:
        return self._refusals.need_republication(self.versions.newest)

    def _publish_again(self) -> None:
        newest = self.versions.newest
        assert newest is not None
        with self._changed:
            self._refusals.clear(newest)
        if not self.versions.publish_again():
            log.warning("the refused version cannot be published again: the next version will be a full snapshot")
