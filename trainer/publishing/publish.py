"""Publishes versions in a thread of its own; the training thread only hands over a snapshot and never waits.

When storage is slower than the steps, a snapshot that nobody has begun to publish is replaced by the next
one (its version is skipped and counted; the next patch covers both), unless somebody needs exactly that version.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path

import structlog

from penstock.protocol import subjects
from penstock.protocol.facts import Head, WeightsPublished, WeightsRefused, decode
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.full_snapshots import answer_is_due
from penstock.trainer.publishing.publication import Publication, Publications
from penstock.trainer.publishing.publish_coordinator import Shares
from penstock.trainer.publishing.rank_publisher import Share
from penstock.trainer.publishing.snapshot import Base, Snapshot, Weights
from penstock.trainer.publishing.version_writer import Label, VersionWriter
from penstock.trainer.publishing.weight_retention import AnchorPolicy

log = structlog.get_logger("trainer.publish")

_ANCHOR_DEADLINE_S = 60.0  # at the end of the run


class Publisher:
    """Publishes snapshots in a thread of its own. Errors surface at the next call of the training thread."""

    def __init__(
        self,
        connections: Connections,
        *,
        model_folder: Path,
        epoch: int = 0,
        policy: AnchorPolicy | None = None,
        on_published: Callable[[Publication], None] = lambda _: None,
        shares: Shares | None = None,
    ) -> None:
        """Read where the run stands and start the thread; raises MissingStream when it was not bootstrapped.

        Args:
            connections: The run, NATS and the object store.
            model_folder: Where config and tokenizer come from.
            epoch: Of the trainer's lease.
            policy: When an anchor is due.
            on_published: Called on the publisher's thread for every version that has been announced.
            shares: Of all ranks; None where one process trains alone.
        """
        self._run_id, self._bus, self._blobs = connections.run_id, connections.bus, connections.blobs
        self._epoch = epoch
        writer = VersionWriter(connections, model_folder)
        self._shares = shares or Shares(Share(connections.blobs, connections.run_id))
        self._publications = Publications(
            connections, writer, self._shares, policy=policy or AnchorPolicy(), epoch=epoch
        )
        self._on_published = on_published
        head = self.head
        self._published = {PolicyVersion(head.version)} if head else set[PolicyVersion]()
        self._pinned: set[PolicyVersion] = set()
        self._waiting: list[Snapshot] = []
        self._under_way: Snapshot | None = None
        self._refused: dict[str, set[str]] = {}  # sha256 of a manifest -> workers that cannot use it
        self._num_answers: Counter[int] = Counter()  # by version
        self._failure: Exception | None = None
        self._closing = False
        self._changed = threading.Condition()
        self.num_published = 0
        self.num_skipped = 0
        self.publish_s = 0.0  # of the newest publication
        refused = subjects.weights_refused(connections.run_id)
        connections.bus.tail(f"{connections.run_id}-weights", refused, WeightsRefused, self._hear_refusal).wait()
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    @property
    def head(self) -> Head | None:
        """The newest complete version of the run, None before the first."""
        return self._publications.head.value

    @property
    def num_anchors(self) -> int:
        """Anchors written beside versions, in this life."""
        return self._publications.anchors.num_written

    def resume(self, weights: Weights, dtype: str) -> bool:
        """Say whether these weights are bit for bit those of the head, before anything was submitted."""
        return self._publications.resume(weights, dtype)

    def has_base(self, base: Base) -> bool:
        """Say whether the model that adapters are to sit upon is stored, before anything was submitted."""
        return self._publications.has_base(base)

    def lay_base(self, base: Base, version: PolicyVersion, step: int, dtype: str) -> None:
        """Store the model that adapters are to sit upon under a number that no head names, before anything was submitted.

        Raises BlobError when the store is away, PublicationFailed when it does not list what it took.
        """
        self._publications.lay_base(base, Label(version, step, self._epoch), dtype)

    def pinned(self) -> set[PolicyVersion]:
        """Return the versions that somebody still needs whole."""
        with self._changed:
            return set(self._pinned)

    def submit(self, snapshot: Snapshot) -> None:
        """Hand over a snapshot; raises PublicationFailed when an earlier one failed."""
        with self._changed:
            self._raise_failure()
            if snapshot.must_publish:
                self._pinned.add(snapshot.version)
            self._drop_overtaken()
            if snapshot.base is None:
                self._shares.hold(snapshot.part)
            self._waiting.append(snapshot)
            self._changed.notify_all()

    def make_room(self) -> list[int]:
        """Let go of the snapshots that the next one overtakes; returns the copies that are still wanted."""
        with self._changed:
            self._drop_overtaken()
            return self._wanted()

    def check(self) -> None:
        """Raise PublicationFailed when a publication has failed."""
        with self._changed:
            self._raise_failure()

    def is_published(self, version: PolicyVersion) -> bool:
        """Say whether a version is complete and announced; raises PublicationFailed."""
        with self._changed:
            self._raise_failure()
            return version in self._published

    def wait_until_published(self, version: PolicyVersion, deadline_s: float) -> None:
        """Wait for a submitted version; raises PublicationFailed after ``deadline_s``."""
        deadline = time.monotonic() + deadline_s
        with self._changed:
            while version not in self._published:
                self._raise_failure()
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise PublicationFailed(
                        f"version {version} was not published within {deadline_s:.0f} s; waited for the object store "
                        f"(bucket {self._blobs.bucket}) and NATS at {self._bus.url}"
                    )

    def pin(self, version: PolicyVersion) -> None:
        """Keep a version that an earlier life published and announced, until `unpin`."""
        with self._changed:
            self._pinned.add(version)
            self._published.add(version)

    def stored_steps(self, versions: Collection[PolicyVersion]) -> dict[PolicyVersion, int]:
        """Return which of these versions workers can still have, by the step that made each: announced, and stored.

        Raises BusError or BlobError.
        """
        if not versions:
            return {}
        announced: dict[PolicyVersion, WeightsPublished] = {}
        for message in self._bus.read_stream(f"{self._run_id}-weights").wait():
            if message.subject == subjects.weights_published(self._run_id):
                fact = decode(message.data, WeightsPublished)
                announced[PolicyVersion(fact.version)] = fact
        return {
            version: announced[version].step
            for version in versions
            if version in announced and self._blobs.exists(announced[version].manifest.key)
        }

    def unpin(self, version: PolicyVersion) -> None:
        """Allow garbage collection of a version that had to be published."""
        with self._changed:
            self._pinned.discard(version)

    def close(self, deadline_s: float = 120.0) -> None:
        """Finish what was submitted and end the thread; raises what it raised."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(deadline_s)
        self._publications.anchors.close(_ANCHOR_DEADLINE_S)
        with self._changed:
            self._raise_failure()
        if self._thread.is_alive():
            raise PublicationFailed(f"the last version was not published within {deadline_s:.0f} s of the run's end")

    def _drop_overtaken(self) -> None:
        must = [snapshot for snapshot in self._waiting if snapshot.must_publish]
        self.num_skipped += len(self._waiting) - len(must)
        self._waiting = must
        self._shares.discard(self._wanted())

    def _wanted(self) -> list[int]:
        under_way = [] if self._under_way is None else [self._under_way]
        return [snapshot.part.taken for snapshot in (*under_way, *self._waiting)]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PublicationFailed(f"weights could not be published: {self._failure}") from self._failure

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing or self._must_answer())
                self._under_way = snapshot = self._waiting.pop(0) if self._waiting else None
                answers = self._must_answer()
                if snapshot is None and not answers:
                    return
            try:
                if answers:
                    self._answer()
                if snapshot is not None:
                    self._note(self._publications.publish(snapshot))
            except Exception as err:  # noqa: BLE001  the training thread raises it
                log.error("publication failed", error=f"{type(err).__name__}: {err}")  # noqa: TRY400
                with self._changed:
                    self._failure = err
                    self._changed.notify_all()
                return

    def _note(self, publication: Publication) -> None:
        log.info("published", **{k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(publication).items()})
        with self._changed:
            self.publish_s = publication.publish_s
            self.num_published += 1
            self._published.add(publication.version)
            self._changed.notify_all()
        self._on_published(publication)

    def _hear_refusal(self, fact: WeightsRefused) -> None:
        """Take note of a worker that cannot use a version (called on the bus's thread)."""
        log.warning(
            "a worker refused a version", worker_id=fact.worker_id, policy_version=fact.version, reason=fact.reason
        )
        with self._changed:
            self._refused.setdefault(fact.manifest.sha256, set()).add(fact.worker_id)
            self._changed.notify_all()

    def _must_answer(self) -> bool:
        newest = self._publications.newest
        if newest is None:
            return False
        workers = self._refused.get(newest.reference.sha256, set())
        return answer_is_due(newest.manifest.kind, workers, self._num_answers[newest.manifest.version])

    def _answer(self) -> None:
        newest = self._publications.newest
        assert newest is not None
        with self._changed:
            del self._refused[newest.reference.sha256]
            self._num_answers[newest.manifest.version] += 1
        if not self._publications.answer():
            log.warning("the next version will be published whole")
