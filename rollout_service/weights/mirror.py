"""The local copies of published versions: a whole model is one folder; an adapter is a folder, and that of its base model.

Models are kept in two folders, called slots, to which patches are applied in turn. An engine reads its folder at moments the worker does
not choose: when it restarts, or when it rolls a failed update back. So the folder that an engine received is never written to: the next
version is written to the other slot, and the engine receives that path. Both paths stay the same while the worker runs. This costs twice the
space, and each patch is fetched once and applied twice; the alternative, a lock, would need the inference server to respect it.

An evaluation may pin an older version. When neither slot holds it, a further slot is filled from a full snapshot and its patches, and
removed afterwards. A worker that restarts does not reuse adapter folders, which are small. A worker's cache folder:

    <cache>/a/ <cache>/b/ …  model folders, see `mirror_slot.py`
    <cache>/files/           config and tokenizer by their sha256, linked into the model folders
    <cache>/adapters/        one folder in PEFT's format for each adapter that is served
    <cache>/patches/         what engines are about to change in the weights they serve; files of a moment
    <cache>/lock             locked while the worker's process runs

Where it is, in memory or on a disk, is decided when the first version says how large the model is (`cache_folder.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from penstock.protocol.errors import BlobMissing, BlobStoreUnreachable, ChainBroken, ConfigError
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.export import export_adapter
from penstock.protocol.weights.manifest import ModelFile, VersionManifest
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.protocol.weights.version_reader import UNUSABLE, WeightReader
from penstock.rollout_service.engines.weight_changes import NoChanges, WeightChanges
from penstock.rollout_service.errors import MirrorFull, WeightsUnusable
from penstock.rollout_service.weights.cache_folder import CacheFolder, MemoryFolder
from penstock.rollout_service.weights.mirror_slot import NUM_REGULAR_SLOTS, Slot, nearest_source, slot_to_write

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import TrustedKeys


log = structlog.get_logger("rollout.model_mirror")
CACHED_SEGMENT_BYTES = 1024**3  # patches fetched for one slot, kept in memory for the other
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


class AdapterMirror:
    def __init__(self, reader: WeightReader, blobs: Blobs, *, folder: Path) -> None:
        self._reader = reader
        self._blobs = blobs
        self._folder = folder
        self._fetching: PolicyVersion | None = None

    def fetch(self, target: VersionManifest) -> Path:
        """Return the adapter's folder, fetching it unless it is here; its base model must have been fetched.

        Raises one of `version_reader.UNUSABLE` or OSError.
        """
        folder = self._folder / str(target.version)
        if not folder.exists():  # a folder is complete: it gets this name after its last byte is written
            self._fetching = PolicyVersion(target.version)
            try:
                export_adapter(target, folder, reader=self._reader, blobs=self._blobs)
            finally:
                self._fetching = None
        return folder

    def trim(self, keep: Collection[PolicyVersion]) -> None:
        for version, folder in self._folders().items():
            if version not in keep:
                shutil.rmtree(folder)

    def held(self) -> list[PolicyVersion]:
        return list(self._folders())

    @property
    def oldest_needed(self) -> PolicyVersion | None:
        return self._fetching

    def _folders(self) -> dict[PolicyVersion, Path]:
        if not self._folder.exists():
            return {}
        return {PolicyVersion(int(path.name)): path for path in self._folder.iterdir() if path.name.isdecimal()}


class ModelMirror:
    def __init__(self, reader: WeightReader, blobs: Blobs, *, slots: Sequence[Path], files: Path) -> None:
        self.num_file_bytes = 0  # of config and tokenizer files, fetched so far
        self._reader = reader
        self._blobs = blobs
        self._files = files
        self._slots = [Slot(folder) for folder in slots]
        self._oldest_read: PolicyVersion | None = None  # by the fetch in progress

    def fetch(self, target: VersionManifest, ref: BlobRef, in_use: Collection[PolicyVersion]) -> Slot:
        """Return the slot that holds ``target``, writing it if no slot does; slots ``in_use`` are not written to.

        Raises one of `version_reader.UNUSABLE`, OSError, or ConfigError when every slot is in use.
        """
        for slot in self._slots:
            self._verify(slot)
            if slot.holds(target):
                return slot
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
        return slot

    def changes(self, base: PolicyVersion, target: VersionManifest, limit: float) -> WeightChanges | NoChanges:
        held = {slot.version: slot for slot in self._slots}
        # A copy of another origin would not tell whether what patches have made is the version.
        is_here = any(slot.base and slot.base.version == target.version and not slot.is_patched for slot in self._slots)
        is_known = base in held and target.base is None and not is_here
        return held[base].changes(target, self._reader, limit) if is_known else "chain"

    def trim(self, keep: Collection[PolicyVersion]) -> None:
        for slot in self._slots[NUM_REGULAR_SLOTS:]:
            if slot.base is not None and slot.version not in keep:
                slot.remove()

    def held(self) -> list[PolicyVersion]:
        return [slot.version for slot in self._slots if slot.version is not None]

    @property
    def oldest_needed(self) -> PolicyVersion | None:
        bases = [slot.base.version for slot in self._slots if slot.base is not None]
        return min([*bases, *([] if self._oldest_read is None else [self._oldest_read])], default=None)

    def _write(self, slot: Slot, target: VersionManifest, ref: BlobRef) -> None:
        """Write what needs the least to be fetched: patches on the slot, patches on a copy of another slot, or a full snapshot."""
        chain = self._reader.plan(target, slot.base)
        number = nearest_source([slot.contents for slot in self._slots], PolicyVersion(target.version))
        if chain.anchor is not None and number is not None:
            from_copy = self._reader.plan(target, self._slots[number].base)
            if from_copy.anchor is None:
                slot.copy(self._slots[number])
                chain = from_copy
        if chain.manifests:
            self._oldest_read = PolicyVersion(min(manifest.version for manifest in chain.manifests))
        slot.advance(chain, ref, self._reader, self._link)

    def _verify(self, slot: Slot) -> None:
        try:
            slot.verify(self._reader)
        except UNUSABLE as err:  # without its manifest there is nothing to compare the folder with
            log.info("model folder cannot be verified, removing it", folder=str(slot.folder), error=str(err))
            slot.remove()

    def _link(self, file: ModelFile, folder: Path) -> None:
        kept, path = self._files / file.blob.sha256, folder / file.name
        if not kept.exists() or kept.stat().st_size != file.blob.size_bytes:
            self._blobs.get_file(file.blob, kept)
            self.num_file_bytes += file.blob.size_bytes
        if path.exists():
            if path.samefile(kept):
                return
            path.unlink()
        os.link(kept, path)


@dataclass(frozen=True, slots=True)
class MirroredVersion:
    """One complete and verified model folder; or that of an adapter, and its ``base`` model."""

    version: PolicyVersion
    folder: Path
    num_bytes: int  # fetched since the one before, for its `changes` too
    fetch_s: float
    checksum: str  # the version's root
    base: MirroredVersion | None = None
    is_patched: bool = False  # it was made of the version before and patches alone

    @property
    def model_folder(self) -> Path:
        return self.folder if self.base is None else self.base.folder


class Mirror:
    """One worker's copies. Blocking: coroutines call it through ``asyncio.to_thread``, one at a time."""

    def __init__(
        self, blobs: Blobs, folder: Path, run_id: str, trusted_keys: TrustedKeys | None = None, memory: MemoryFolder | None = None,
        shared: SharedSegments | None = None,
    ) -> None:  # fmt: skip
        """Reuse the models that an earlier process of this worker left in ``folder``, or in ``memory`` where they have room.

        With ``trusted_keys``, a version whose manifest none of them has signed is unusable. What other processes of this host have
        ``shared`` is not downloaded.

        Raises ConfigError when the folder cannot be made, or a running worker with the same id uses it.
        """
        self._blobs, self._shared = blobs, shared
        self._on_disk, self._memory = CacheFolder(folder), memory
        self._reader = WeightReader(
            blobs, run_id, cache_bytes=CACHED_SEGMENT_BYTES, trusted_keys=trusted_keys, shared=shared
        )
        self._epoch = self._num_bytes = 0  # the newest lease seen; bytes fetched for what was returned
        self.folders: dict[str, Path] = {}  # whose disk may fill, by setting
        self._use(self._on_disk)

    def _use(self, cache: CacheFolder) -> None:
        self._cache = cache
        self._models = ModelMirror(self._reader, self._blobs, slots=cache.slots, files=cache.files)
        self._adapters = AdapterMirror(self._reader, self._blobs, folder=cache.adapters)
        self.folders["worker.cache_dir"] = cache.path

    def _place(self, model: VersionManifest) -> None:
        """Choose the folder, once: when the first version says how large the model is."""
        if self._memory is None:
            return
        num_bytes = self._reader.layout(model).num_bytes
        in_memory, reason = self._memory.take(num_bytes)
        self._memory = None
        if in_memory is not None:
            self._on_disk.clear()
            self._use(in_memory)
        log.info("chose where the copies of the weights are", folder=str(self._cache.path), reason=reason)

    def fetch(
        self, version: PolicyVersion, manifest_ref: BlobRef, *, keep: Collection[PolicyVersion] = (), newest: bool = False,
    ) -> MirroredVersion:  # fmt: skip
        """Return a version's folder, writing it if it is not here; folders of versions in ``keep`` are not touched.

        ``newest`` says that the version is the one to serve, not one that an evaluation pins: it is then refused
        when it was published under an older lease than one seen before. Raises WeightsUnusable when an object is
        missing, corrupt, or not what the announcement said; BlobStoreUnreachable when S3 is unreachable; MirrorFull
        when the disk is full, ConfigError when it cannot be written to.
        """
        with self._translating_errors(version):
            started = time.monotonic()
            target = self._target(version, manifest_ref, newest=newest)
            model = target if target.base is None else self._reader.base(target)
            self._place(model)
            if target.base is None:
                slot = self._models.fetch(target, manifest_ref, keep)
                return replace(self._mirrored(target, slot.folder, started), is_patched=slot.is_patched)
            folder = self._models.fetch(model, target.base.manifest, keep).folder
            base = MirroredVersion(PolicyVersion(model.version), folder, 0, 0.0, model.state_root)
            return self._mirrored(target, self._adapters.fetch(target), started, base)

    def changes(
        self, base: PolicyVersion, version: PolicyVersion, manifest_ref: BlobRef, limit: float
    ) -> WeightChanges | NoChanges:
        """Return what turns a model that is held into the version to serve, or why that is not known or more than ``limit``, a share of the words.

        Reads the stored patches between the two and the words that they name, no whole folder. Of what it returns, objects and manifests
        are verified, and the words by the base's copy; that the version is what its manifest says is verified by `fetch`.
        """
        try:
            return self._models.changes(base, self._target(version, manifest_ref, newest=True), limit)
        except (*UNUSABLE, BlobStoreUnreachable, OSError) as err:
            log.info("patches between two versions cannot be read", base=base, policy_version=version, error=str(err))
            return "chain"

    def _target(self, version: PolicyVersion, manifest_ref: BlobRef, *, newest: bool) -> VersionManifest:
        target = self._reader.manifest(manifest_ref, version)
        if newest:
            if target.epoch < self._epoch:
                raise ChainBroken(
                    f"version {version}: published under lease {target.epoch}, but lease {self._epoch} has been seen; a trainer that lost its "
                    "lease goes on publishing, stop it"
                )
            self._epoch = target.epoch
        return target

    def trim(self, keep: Collection[PolicyVersion]) -> None:
        """Remove the models beyond two, and all adapters, whose version is not in ``keep``."""
        self._adapters.trim(keep)
        self._models.trim(keep)
        if self._shared is not None:
            self._shared.trim()

    def held(self) -> list[PolicyVersion]:
        return sorted([*self._models.held(), *self._adapters.held()])

    @property
    def oldest_needed(self) -> PolicyVersion | None:
        needed = (self._models.oldest_needed, self._adapters.oldest_needed)
        return min((version for version in needed if version is not None), default=None)

    def close(self) -> None:
        for cache in {self._cache, self._on_disk}:
            cache.close()
        if self._shared is not None:
            self._shared.close()

    def _mirrored(
        self, manifest: VersionManifest, folder: Path, started: float, base: MirroredVersion | None = None
    ) -> MirroredVersion:
        before, self._num_bytes = self._num_bytes, self._reader.num_bytes + self._models.num_file_bytes
        num_bytes, fetch_s = self._num_bytes - before, time.monotonic() - started
        return MirroredVersion(PolicyVersion(manifest.version), folder, num_bytes, fetch_s, manifest.state_root, base)

    @contextlib.contextmanager
    def _translating_errors(self, version: PolicyVersion) -> Iterator[None]:
        try:
            yield
        except UNUSABLE as err:
            raise WeightsUnusable(f"version {version}: {err}") from None
        except OSError as err:
            folder = self._cache.path
            if err.errno in _DISK_FULL:
                raise MirrorFull(
                    f"worker.cache_dir: {folder} has no space for version {version} ({err.strerror}; "
                    f"{self._cache.free_bytes() / 1e6:.1f} MB free). Two copies of the model are kept there: "
                    "free space there, or choose another folder"
                ) from None
            raise ConfigError(
                f"worker.cache_dir: cannot write version {version} to {folder} ({err.strerror}); "
                "choose a folder that can be written to"
            ) from err
