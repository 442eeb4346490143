"""Local copies of whole models: two folders, called slots, to which patches are applied in turn.

An engine reads its folder at moments the worker does not choose: when it restarts, or when it rolls a failed update
back. So the folder that an engine was given is never written to: the next version is written to the other slot, and
the engine is given that path. Both paths stay the same while the worker runs. This costs twice the disk space, and each
patch is fetched once and applied twice; the alternative, a lock, would have to be honoured by the inference server.

An evaluation may pin an older version. When neither slot holds it, a further slot is filled from a full snapshot
and its patches, and removed afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.protocol.errors import BlobMissing
from penstock.protocol.facts import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import ModelFile, VersionManifest
from penstock.protocol.weights.manifest_chain import CatchUp
from penstock.protocol.weights.version_reader import UNUSABLE, WeightReader
from penstock.rollout_service.weights.mirror_slot import Slot
from penstock.rollout_service.weights.slot_choice import NUM_REGULAR_SLOTS, nearest_source, slot_to_write

log = structlog.get_logger("rollout.model_mirror")


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one slot is brought to a version."""

    source: Slot | None  # copied into the slot first; None: start from what the slot holds, or from a full snapshot
    chain: CatchUp


class ModelMirror:
    """The model folders of one worker. Blocking; one thread at a time."""

    def __init__(self, reader: WeightReader, blobs: Blobs, *, slots: Sequence[Path], files: Path) -> None:
        """``files`` is the folder for config and tokenizer files, which the slots share."""
        self.num_file_bytes = 0  # of config and tokenizer files, fetched so far
        self._reader = reader
        self._blobs = blobs
        self._files = files
        self._slots = [Slot(folder) for folder in slots]
        self._oldest_read: PolicyVersion | None = None  # by the fetch in progress

    def fetch(self, target: VersionManifest, ref: BlobRef, in_use: Collection[PolicyVersion]) -> Path:
        """Return the folder that holds ``target``, writing it if no slot does; slots ``in_use`` are not written to.

        Raises one of `version_reader.UNUSABLE`, OSError, or ConfigError when every slot is in use.
        """
        for slot in self._slots:
            self._verify(slot)
            if slot.holds(target):
                return slot.folder
        slot = self._slots[slot_to_write([slot.contents for slot in self._slots], in_use)]
        try:
            self._write(slot, target, ref)
        except BlobMissing as err:  # garbage-collected: the newest full snapshot and the patches after it are kept
            if slot.base is None:
                raise
            log.warning("object deleted, starting from a full snapshot", policy_version=target.version, error=str(err))
            slot.remove()
            self._write(slot, target, ref)
        finally:
            self._oldest_read = None
        return slot.folder

    def trim(self, keep: Collection[PolicyVersion]) -> None:
        """Remove the models beyond two whose version is not in ``keep``."""
        for slot in self._slots[NUM_REGULAR_SLOTS:]:
            if slot.base is not None and slot.version not in keep:
                slot.remove()

    def held(self) -> list[PolicyVersion]:
        """Return the versions that can be served from here."""
        return [slot.version for slot in self._slots if slot.version is not None]

    @property
    def oldest_needed(self) -> PolicyVersion | None:
        """The oldest version whose objects may still be read; None when there is none."""
        bases = [slot.base.version for slot in self._slots if slot.base is not None]
        return min([*bases, *([] if self._oldest_read is None else [self._oldest_read])], default=None)

    def _write(self, slot: Slot, target: VersionManifest, ref: BlobRef) -> None:
        plan = self._plan(slot, target)
        if plan.source is not None:
            slot.copy(plan.source)
        if plan.chain.manifests:
            self._oldest_read = PolicyVersion(min(manifest.version for manifest in plan.chain.manifests))
        slot.advance(plan.chain, ref, self._reader, self._link)

    def _plan(self, slot: Slot, target: VersionManifest) -> _Plan:
        """Return how to fetch the least: patches on the slot, patches on a copy of another slot, or a full snapshot."""
        chain = self._reader.plan(target, slot.base)
        number = nearest_source([slot.contents for slot in self._slots], PolicyVersion(target.version))
        if chain.anchor is not None and number is not None:
            source = self._slots[number]
            from_copy = self._reader.plan(target, source.base)
            if from_copy.anchor is None:
                return _Plan(source, from_copy)
        return _Plan(None, chain)

    def _verify(self, slot: Slot) -> None:
        try:
            slot.verify(self._reader)
        except UNUSABLE as err:  # without its manifest there is nothing to compare the folder with
            log.info("model folder cannot be verified, removing it", folder=str(slot.folder), error=str(err))
            slot.remove()

    def _link(self, file: ModelFile, folder: Path) -> None:
        """Link a config or tokenizer file into a model folder, fetching it unless another version has it too."""
        kept, path = self._files / file.blob.sha256, folder / file.name
        if not kept.exists() or kept.stat().st_size != file.blob.size_bytes:
            self._blobs.get_file(file.blob, kept)
            self.num_file_bytes += file.blob.size_bytes
        if path.exists():
            if path.samefile(kept):
                return
            path.unlink()
        os.link(kept, path)
