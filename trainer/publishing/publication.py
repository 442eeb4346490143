"""One version from a snapshot to the announcement: compare, store, move the head, announce, promote.

| killed after          | what is left                            | the next life                                    |
|-----------------------|-----------------------------------------|--------------------------------------------------|
| the segments          | a pack that no manifest names           | the orphan sweep removes it                      |
| the manifest          | a manifest that no head leads to        | ignored; the next version has its number         |
| the head              | a complete version, not announced       | announced again at the start; workers watch the head too |
| the announcement      | nothing is missing                      | goes on from it                                  |
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog

from penstock.protocol import subjects
from penstock.protocol.facts import Head, WeightsPublished
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import ADAPTER_WEIGHTS
from penstock.protocol.weights.layout import WeightLayout
from penstock.protocol.weights.manifest import Ancestor, AnchorRef
from penstock.protocol.weights.version_reader import UNUSABLE, WeightReader
from penstock.trainer import crash_points
from penstock.trainer.connections import Connections
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import PublicationFailed
from penstock.trainer.publishing.full_snapshots import FullSnapshots
from penstock.trainer.publishing.head import HeadKey
from penstock.trainer.publishing.publish_coordinator import Shares
from penstock.trainer.publishing.published_base import PublishedBase
from penstock.trainer.publishing.rank_publisher import Compared, Share
from penstock.trainer.publishing.snapshot import Base, Snapshot, Weights
from penstock.trainer.publishing.version_writer import Label, VersionWriter, Written
from penstock.trainer.publishing.weight_retention import AnchorPolicy

log = structlog.get_logger("trainer.publish")


@dataclass(frozen=True, slots=True)
class Publication:
    """What one version came to; times in seconds of wall-clock time."""

    version: PolicyVersion
    step: int
    kind: str  # "patch", "anchor" or "adapter"
    parent: int | None
    density: float  # share of the values whose bits changed since the parent
    raw_bytes: int  # of the whole model
    sent_bytes: int
    diff_s: float  # compare and encode
    upload_s: float  # objects, manifest, and the look at the listing
    publish_s: float  # altogether, the head and the announcement included


class Publications:
    """Publishes one snapshot after another. Used by one thread, except where said."""

    def __init__(
        self, connections: Connections, writer: VersionWriter, shares: Shares, *, policy: AnchorPolicy, epoch: int
    ) -> None:
        """Read where the run stands; raises MissingStream when it was not bootstrapped."""
        self._run_id, self._bus = connections.run_id, connections.bus
        self._blobs = connections.blobs
        self._writer = writer
        self._shares = shares
        self._epoch = epoch
        self.head = HeadKey(connections.bus, connections.run_id)
        self.anchors = FullSnapshots(writer, shares, policy)
        self._adapters = Shares(Share(connections.blobs, connections.run_id))  # these are rank 0's alone
        self._base_model = PublishedBase(connections, writer, shares)
        self._adapter: Snapshot | None = None  # what the head names, where that is an adapter
        self._base: WeightLayout | None = None  # of the head's bytes, which every rank holds its share of
        self._newest: Written | None = None  # what the head names
        self._dtype = ""  # of what was published or resumed last
        self._read = False  # whether the head's own bytes were looked for

    @property
    def newest(self) -> Written | None:
        """The version that the head names; None before the first, or while nobody has asked for it."""
        return self._newest

    def has_base(self, base: Base) -> bool:
        """Say whether the model that adapters are to sit upon is stored."""
        return self._base_model.find(base, self._read_newest()) is not None

    def lay_base(self, base: Base, label: Label, dtype: str) -> None:
        """Store the model that adapters are to sit upon; no head names it."""
        self._base_model.lay(base, label, self._writer.small_files(dtype))

    def resume(self, weights: Weights, dtype: str) -> bool:
        """Say whether these weights are bit for bit those of the head; then the next version follows on them."""
        newest, part = self._read_newest(), weights.part
        if newest is None:
            return False
        if weights.base is not None:
            return self._resume_adapter(newest, weights, dtype)
        if weights.root() != newest.manifest.state_root or part.layout.layout_id != newest.manifest.layout_id:
            return False
        self._shares.hold(part)
        self._shares.settle(part.taken, keep=False)
        self._base, self._read, self._dtype = part.layout, True, dtype
        self._announce(newest)  # the life before may have been killed between the head and the announcement
        return True

    def publish(self, snapshot: Snapshot) -> Publication:
        """Publish a snapshot as a patch of the head; whole, when there is nothing that it could be compared with."""
        if snapshot.base is not None:
            return self._publish_adapter(snapshot, snapshot.base)
        started = time.monotonic()
        label = Label(snapshot.version, snapshot.step, self._epoch)
        layout, taken = snapshot.part.layout, snapshot.part.taken
        self._dtype = snapshot.dtype
        files = self._writer.small_files(snapshot.dtype)
        is_based, newest, anchor = self._is_based_on(layout), self._newest, self.anchors.newest
        parent = newest.as_ancestor if newest else None
        compared: Compared | None = None
        if is_based and parent is not None and anchor is not None:
            compared = self._shares.compare(taken)
        state_root = self._shares.state_root(taken)
        diff_s = time.monotonic() - started
        if compared is None or self.anchors.is_better_whole(compared.num_bytes):
            stored = self._shares.store_whole(taken, snapshot.version)
            written = self._writer.whole(label, layout, files, stored, state_root=state_root, parent=parent)
        else:
            assert parent is not None
            assert anchor is not None
            stored = self._shares.store_changes(taken, snapshot.version)
            written = self._writer.patch(
                label, layout, files, stored, state_root=state_root, parent=parent, anchor=anchor
            )
        upload_s = time.monotonic() - started - diff_s
        self._commit(written)
        self._settle(snapshot, written)
        manifest = written.manifest
        return Publication(
            version=snapshot.version,
            step=snapshot.step,
            kind=manifest.kind,
            parent=manifest.parent.version if manifest.parent else None,
            density=manifest.density if compared is None else compared.num_changed / max(layout.num_words, 1),
            raw_bytes=layout.num_bytes,
            sent_bytes=manifest.num_bytes + written.reference.size_bytes,
            diff_s=diff_s,
            upload_s=upload_s,
            publish_s=time.monotonic() - started,
        )

    def _settle(self, snapshot: Snapshot, written: Written) -> None:
        """Let every rank take the committed version as its base; begin the anchor beside it when one is due."""
        manifest = written.manifest
        is_due = manifest.kind == "patch" and self.anchors.follow(snapshot.version, manifest)
        self._shares.settle(snapshot.part.taken, keep=is_due)
        self._base = snapshot.part.layout
        if manifest.kind == "anchor":
            self.anchors.restart(written.as_anchor)
        elif is_due:
            self.anchors.write_kept(snapshot, manifest)

    def answer(self) -> bool:
        """Publish the newest version again, whole, under its own number: workers could not use it as it was.

        No step is waited for, since there may be none while nobody can sample. Returns whether it could be done;
        if not, the next version is whole.
        """
        newest = self._read_newest()
        if newest is None:
            return False
        if newest.manifest.kind == "adapter":
            return self._answer_adapter(newest)
        self._put_together(newest)
        if self._base is None:
            return False
        label = Label(PolicyVersion(newest.manifest.version), newest.manifest.step, self._epoch)
        files = self._writer.small_files(self._dtype, again=True) if self._dtype else newest.manifest.model_files
        stored = self._shares.store_base(label.version)
        root, parent = newest.manifest.state_root, newest.manifest.parent
        written = self._writer.whole(label, self._base, files, stored, state_root=root, parent=parent)
        self._commit(written)
        self.anchors.restart(written.as_anchor)
        log.warning("published whole, because workers refused it", policy_version=label.version)
        return True

    def _publish_adapter(self, snapshot: Snapshot, base: Base) -> Publication:
        """Publish an adapter, which is small and always whole, upon the base that was published before."""
        started = time.monotonic()
        newest = self._read_newest()
        reference = self._base_model.find(base, newest)
        if reference is None:
            raise PublicationFailed(
                f"version {snapshot.version} is an adapter, and the model it sits upon, {base.root[:16]}…, is not published; "
                "start the trainer again: it stores the model first"
            )
        written = self._write_adapter(snapshot, base, reference, newest.as_ancestor if newest else None)
        upload_s = time.monotonic() - started
        self._commit(written)
        self._adapter, self._base, self._read = snapshot, None, False
        manifest = written.manifest
        return Publication(
            version=snapshot.version,
            step=snapshot.step,
            kind=manifest.kind,
            parent=manifest.parent.version if manifest.parent else None,
            density=manifest.density,
            raw_bytes=base.part.layout.num_bytes,
            sent_bytes=manifest.num_bytes + written.reference.size_bytes,
            diff_s=0.0,
            upload_s=upload_s,
            publish_s=time.monotonic() - started,
        )

    def _write_adapter(self, snapshot: Snapshot, base: Base, reference: AnchorRef, parent: Ancestor | None) -> Written:
        self._adapters.hold(snapshot.part)
        try:
            stored = self._adapters.store_whole(snapshot.part.taken, snapshot.version, name=ADAPTER_WEIGHTS)
        finally:
            self._adapters.discard(())
        return self._writer.whole(
            Label(snapshot.version, snapshot.step, self._epoch),
            snapshot.part.layout,
            self._writer.adapter_files(base.config),
            stored,
            state_root=Weights(snapshot.part, base).root(),
            parent=parent,
            base=reference,
        )

    def _resume_adapter(self, newest: Written, weights: Weights, dtype: str) -> bool:
        assert weights.base is not None
        manifest = newest.manifest
        if manifest.state_root != weights.root() or not self.has_base(weights.base):
            return False
        self._dtype = dtype
        self._adapter = Snapshot(PolicyVersion(manifest.version), manifest.step, weights.part, dtype, base=weights.base)
        self._announce(newest)  # as for whole models
        return True

    def _answer_adapter(self, newest: Written) -> bool:
        adapter = self._adapter
        if adapter is None or adapter.base is None or adapter.version != newest.manifest.version:
            return False
        reference = self._base_model.mended(adapter.base, self._writer.small_files(adapter.dtype, again=True))
        self._commit(self._write_adapter(adapter, adapter.base, reference, newest.manifest.parent))
        log.warning("published again, because workers refused it", policy_version=adapter.version)
        return True

    def _commit(self, written: Written) -> None:
        crash_points.reach(CrashPoint.MANIFEST_STORED)
        manifest = written.manifest
        self.head.move(
            Head(version=manifest.version, step=manifest.step, manifest=written.reference, epoch=self._epoch)
        )
        crash_points.reach(CrashPoint.HEAD_MOVED)
        self._newest = written
        self._announce(written)
        crash_points.reach(CrashPoint.ANNOUNCED)

    def _announce(self, written: Written) -> None:
        manifest = written.manifest
        self._bus.publish(
            subjects.weights_published(self._run_id),
            WeightsPublished(
                run_id=self._run_id,
                version=manifest.version,
                step=manifest.step,
                manifest=written.reference,
                num_bytes=manifest.num_bytes,
            ),
            msg_id=f"w:{manifest.version}:{written.reference.sha256[:16]}",
        ).wait()

    def _is_based_on(self, layout: WeightLayout) -> bool:
        """Say whether the ranks hold the head's bytes in a layout, put together from the object store if need be."""
        newest = self._read_newest()
        if newest is None or newest.manifest.kind == "adapter":
            return False
        self._put_together(newest)
        if self._base is not None and self._base.layout_id != layout.layout_id:
            log.warning("the tensors' names, shapes or dtypes are others than the head's: a whole version is published")
            return False
        return self._base is not None

    def _read_newest(self) -> Written | None:
        head = self.head.value
        if self._newest is None and head is not None:
            reader = WeightReader(self._blobs, self._run_id)
            try:
                manifest = reader.manifest(head.manifest, PolicyVersion(head.version))
                self._newest = Written(manifest, head.manifest)
                chain = reader.plan(manifest, None)
            except UNUSABLE as err:
                log.warning("the head cannot be read: a whole version is published", error=str(err))
                self._read = True
                return self._newest
            self.anchors.restart(manifest.anchor or self._newest.as_anchor, chain.patches)
        return self._newest

    def _put_together(self, newest: Written) -> None:
        """Have the ranks read the head, once in a life that has not made it itself."""
        if self._base is not None or self._read:
            return
        self._read = True
        version = PolicyVersion(newest.manifest.version)
        try:
            layout = WeightReader(self._blobs, self._run_id).layout(newest.manifest)
            root = self._shares.read_head(newest.reference, version)
        except (*UNUSABLE, PublicationFailed) as err:
            log.warning("the head cannot be put together: a whole version is published", error=str(err))
            return
        if root != newest.manifest.state_root:
            log.warning("the head's root is not what its manifest says: a whole version is published")
            return
        self._base = layout
        log.info("put the head together", policy_version=version)
