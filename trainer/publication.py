"""One version from a snapshot to the announcement: compare, store, move the head, announce, promote.

| killed after          | what is left                            | the next life                                    |
|-----------------------|-----------------------------------------|--------------------------------------------------|
| the segments          | a pack that no manifest names           | the orphan sweep removes it                      |
| the manifest          | a manifest that no head leads to        | ignored; the next version has its number         |
| the head              | a complete version, not announced       | announced again at the start; workers watch the head too |
| the announcement      | nothing is missing                      | goes on from it                                  |
"""

from __future__ import annotations

import functools
import sys
import time
from dataclasses import dataclass

import structlog

from protocol import subjects
from protocol.facts import Head, WeightsPublished
from protocol.patch_segment import Bytes
from protocol.versions import PolicyVersion
from protocol.weight_layout import WeightLayout
from protocol.weight_reader import UNUSABLE, WeightReader
from protocol.weight_retention import AnchorPolicy
from protocol.weights import Ancestor, AnchorRef, ModelFile
from trainer import crash_points
from trainer.anchors import Anchors
from trainer.committed_weights import CommittedWeights, Difference, gather, layout_of
from trainer.crash_points import CrashPoint
from trainer.doors import Doors
from trainer.errors import PublicationFailed
from trainer.head import HeadKey
from trainer.published_base import PublishedBase
from trainer.snapshot import Base, Snapshot, Weights
from trainer.version_writer import Label, VersionWriter, Written

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
        self, doors: Doors, writer: VersionWriter, *, policy: AnchorPolicy, epoch: int, bucket_bytes: int
    ) -> None:
        """Read where the run stands; raises MissingStream when it was not bootstrapped."""
        self._run_id, self._bus = doors.run_id, doors.bus
        self._blobs = doors.blobs
        self._writer = writer
        self._epoch = epoch
        self._bucket_bytes = bucket_bytes
        self.head = HeadKey(doors.bus, doors.run_id)
        self.anchors = Anchors(writer, policy, bucket_bytes=bucket_bytes)
        self._base_model = PublishedBase(doors, writer, bucket_bytes=bucket_bytes)
        self._adapter: Snapshot | None = None  # what the head names, where that is an adapter
        self._committed: CommittedWeights | None = None
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
        newest = self._read_newest()
        if newest is None:
            return False
        if weights.base is not None:
            return self._resume_adapter(newest, weights, dtype)
        committed = CommittedWeights.copy_of(layout_of(weights.tensors, self._bucket_bytes), weights.tensors)
        if (
            committed.state_root != newest.manifest.state_root
            or committed.layout.layout_id != newest.manifest.layout_id
        ):
            return False
        self._committed, self._read, self._dtype = committed, True, dtype
        self._announce(newest)  # the life before may have been killed between the head and the announcement
        return True

    def publish(self, snapshot: Snapshot) -> Publication:
        """Publish a snapshot as a patch of the head; whole, when there is nothing that it could be compared with."""
        if snapshot.base is not None:
            return self._publish_adapter(snapshot, snapshot.base)
        started = time.monotonic()
        label = Label(snapshot.version, snapshot.step, self._epoch)
        layout = layout_of(snapshot.tensors, self._bucket_bytes)
        self._dtype = snapshot.dtype
        files = self._writer.small_files(snapshot.dtype)
        committed, newest = self._base(layout), self._newest
        anchor = self.anchors.newest
        difference: Difference | None = None
        if committed is not None and newest is not None and anchor is not None:
            difference = committed.compare(snapshot.tensors)
        else:
            committed = CommittedWeights.copy_of(layout, snapshot.tensors)
        diff_s = time.monotonic() - started
        parent = newest.as_ancestor if newest else None
        if difference is None:
            written = self._anchor(label, files, committed, parent)
        elif self.anchors.is_better_whole(difference.num_bytes):
            raw_of = functools.partial(_gathered, layout, snapshot)
            written = self._writer.whole(label, layout, files, raw_of, state_root=difference.state_root, parent=parent)
        else:
            assert parent is not None
            assert anchor is not None
            written = self._writer.patch(label, layout, files, difference, parent=parent, anchor=anchor)
        upload_s = time.monotonic() - started - diff_s
        self._commit(written)
        self._committed = committed
        if difference is not None:
            committed.promote(difference)
        manifest = written.manifest
        if manifest.kind == "anchor":
            self.anchors.restart(written.as_anchor)
        else:
            self.anchors.follow(snapshot, manifest)
        return Publication(
            version=snapshot.version,
            step=snapshot.step,
            kind=manifest.kind,
            parent=manifest.parent.version if manifest.parent else None,
            density=manifest.density if difference is None else difference.density(layout),
            raw_bytes=layout.num_bytes,
            sent_bytes=manifest.num_bytes + written.reference.size_bytes,
            diff_s=diff_s,
            upload_s=upload_s,
            publish_s=time.monotonic() - started,
        )

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
        if self._committed is None and not self._read:
            self._read = True
            self._committed = self._put_together(newest)
        if self._committed is None:
            return False
        label = Label(PolicyVersion(newest.manifest.version), newest.manifest.step, self._epoch)
        files = self._writer.small_files(self._dtype, again=True) if self._dtype else newest.manifest.model_files
        written = self._anchor(label, files, self._committed, newest.manifest.parent)
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
        self._adapter, self._committed, self._read = snapshot, None, False
        manifest = written.manifest
        return Publication(
            version=snapshot.version,
            step=snapshot.step,
            kind=manifest.kind,
            parent=manifest.parent.version if manifest.parent else None,
            density=manifest.density,
            raw_bytes=sum(tensor.nbytes for tensor in base.tensors.values()),
            sent_bytes=manifest.num_bytes + written.reference.size_bytes,
            diff_s=0.0,
            upload_s=upload_s,
            publish_s=time.monotonic() - started,
        )

    def _write_adapter(self, snapshot: Snapshot, base: Base, reference: AnchorRef, parent: Ancestor | None) -> Written:
        layout = layout_of(snapshot.tensors, sys.maxsize)  # one bucket: engines read one file
        return self._writer.whole(
            Label(snapshot.version, snapshot.step, self._epoch),
            layout,
            self._writer.adapter_files(base.config),
            functools.partial(_gathered, layout, snapshot),
            state_root=Weights(snapshot.tensors, base).root(),
            parent=parent,
            base=reference,
        )

    def _resume_adapter(self, newest: Written, weights: Weights, dtype: str) -> bool:
        assert weights.base is not None
        manifest = newest.manifest
        if manifest.state_root != weights.root() or not self.has_base(weights.base):
            return False
        self._dtype = dtype
        self._adapter = Snapshot(
            PolicyVersion(manifest.version), manifest.step, weights.tensors, dtype, base=weights.base
        )
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

    def _anchor(
        self, label: Label, files: tuple[ModelFile, ...], committed: CommittedWeights, parent: Ancestor | None
    ) -> Written:
        return self._writer.whole(
            label,
            committed.layout,
            files,
            lambda number: committed.raw[number],
            state_root=committed.state_root,
            parent=parent,
        )

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

    def _base(self, layout: WeightLayout) -> CommittedWeights | None:
        """Return the head's bytes, put together from the object store when this life has not made them itself."""
        newest = self._read_newest()
        if newest is None or newest.manifest.kind == "adapter":
            return None
        if self._committed is None and not self._read:
            self._read = True
            self._committed = self._put_together(newest)
        if self._committed is not None and self._committed.layout.layout_id != layout.layout_id:
            log.warning("the tensors' names, shapes or dtypes are others than the head's: a whole version is published")
            return None
        return self._committed

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

    def _put_together(self, newest: Written) -> CommittedWeights | None:
        reader = WeightReader(self._blobs, self._run_id)
        try:
            plan = reader.plan(newest.manifest, None)
            committed = CommittedWeights.read(plan, reader)
        except UNUSABLE as err:
            log.warning("the head cannot be put together: a whole version is published", error=str(err))
            return None
        if committed.state_root != newest.manifest.state_root:
            log.warning("the head's root is not what its manifest says: a whole version is published")
            return None
        log.info("put the head together", policy_version=newest.manifest.version, num_bytes=reader.num_bytes)
        return committed


def _gathered(layout: WeightLayout, snapshot: Snapshot, number: int) -> Bytes:
    return gather(layout.buckets[number], snapshot.tensors)
