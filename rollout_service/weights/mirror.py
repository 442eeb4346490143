"""The local copies of published versions: two folders that patches are applied to in turn.

    <cache>/a/ <cache>/b/    model folders, see `mirror_slot`
    <cache>/files/           config and tokenizer by their sha256, linked into the folders
    <cache>/adapters/        a folder in PEFT's form for each adapter that is served, upon a model in `a` or `b`

An engine reads its folder at moments nobody else chooses: when it is restarted, when it rolls a failed update
back. So what it was given is never written to: the next version is made in the other folder, and the engine
is given that path. Both paths stay the same for the worker's life. It costs twice the disk and each patch
applied twice, but fetched once; a lock would have to be honoured by a server that knows none.

An evaluation may pin an older version: when neither folder holds it any more, a third one is made from its
anchor and chain, and removed afterwards. Adapters are small, whole, and never written to again: each has a folder of its
own until it is unloaded, and a new life of the worker fetches the one it needs.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.protocol.errors import BlobMissing, ConfigError
from penstock.protocol.facts import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.export import export_adapter
from penstock.protocol.weights.manifest import ModelFile, VersionManifest
from penstock.protocol.weights.manifest_chain import verify_head
from penstock.protocol.weights.version_reader import UNUSABLE, WeightReader
from penstock.rollout_service.errors import MirrorFull, WeightsUnusable
from penstock.rollout_service.weights.mirror_slot import Slot

log = structlog.get_logger("rollout.mirror")

CACHED_SEGMENT_BYTES = 1024**3  # fetched for one folder, kept for the other
_SLOTS = ("a", "b", "c", "d")
_NORMAL_SLOTS = 2
_LOCK = "lock"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_ADAPTERS = "adapters"


@dataclass(frozen=True, slots=True)
class MirroredVersion:
    """One complete and verified model folder; or an adapter's, and the ``base`` it sits upon."""

    version: PolicyVersion
    folder: Path
    num_bytes: int  # fetched for it
    fetch_s: float
    checksum: str  # the version's root
    base: MirroredVersion | None = None

    @property
    def model_folder(self) -> Path:
        """The folder with config and tokenizer."""
        return self.folder if self.base is None else self.base.folder


class Mirror:
    """One worker's copies. Blocking: coroutines call it through ``asyncio.to_thread``, one at a time."""

    def __init__(self, blobs: Blobs, folder: Path, run_id: str) -> None:
        """Take what an earlier life of this worker left; what dead workers of other ids left is removed.

        Raises ConfigError when the folder cannot be made, or a living worker of the same id has it.
        """
        self._blobs = blobs
        self._folder = folder
        self._run_id = run_id
        self._reader = WeightReader(blobs, run_id, cache_bytes=CACHED_SEGMENT_BYTES)
        self._linkable = folder / "files"
        self._adapters = folder / _ADAPTERS
        self._num_small_bytes = 0
        self._epoch = 0
        self._fetching: PolicyVersion | None = None  # the oldest version that a fetch under way reads
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = _lock(folder)
            if lock is None:
                raise ConfigError(
                    f"another worker with the same worker.id is alive and uses {folder}; choose another id"
                )
            self._lock = lock  # however this process ends, the kernel gives it back
            for sibling in folder.parent.iterdir():
                _sweep(sibling)
            self._linkable.mkdir(exist_ok=True)
            shutil.rmtree(self._adapters, ignore_errors=True)
        except OSError as err:
            raise ConfigError(f"worker.cache_dir: cannot make {folder} ({err.strerror})") from None
        self._slots = [Slot(folder / name) for name in _SLOTS]

    def fetch(
        self,
        version: PolicyVersion,
        manifest_ref: BlobRef,
        *,
        keep: Collection[PolicyVersion] = (),
        newest: bool = False,
    ) -> MirroredVersion:
        """Return a version's folder, making it when it is not here; folders of versions in ``keep`` are not touched.

        ``newest`` says that it is to be served on, not looked back at: a version that was published under an
        older lease than one seen before is refused then. Raises WeightsUnusable when an object is gone,
        corrupt, or not what the announcement said; BlobStoreUnreachable when the store is away; MirrorFull when
        the disk is, ConfigError when it cannot be written to.
        """
        started, bytes_before = time.monotonic(), self._reader.num_bytes + self._num_small_bytes
        try:
            target = self._reader.manifest(manifest_ref, version)
            if newest:
                verify_head(target, run_id=self._run_id, version=version, epoch=self._epoch)
                self._epoch = target.epoch
            if target.base is not None:
                model = self._reader.base(target)
                base = self._mirrored(
                    self._make(model, target.base.manifest, keep).folder, model, started, bytes_before
                )
                self._fetching = version
                return self._mirrored(self._make_adapter(target), target, started, bytes_before, base)
            return self._mirrored(self._make(target, manifest_ref, keep).folder, target, started, bytes_before)
        except UNUSABLE as err:
            raise WeightsUnusable(f"version {version}: {err}") from None
        except OSError as err:
            if err.errno in _NO_ROOM:
                raise MirrorFull(
                    f"worker.cache_dir: {self._folder} has no room for version {version} ({err.strerror}; "
                    f"{shutil.disk_usage(self._folder).free / 1e6:.1f} MB are free); two copies of the model are kept "
                    "there: make room, or choose another folder"
                ) from None
            raise ConfigError(
                f"worker.cache_dir: {self._folder} cannot hold version {version} ({err.strerror})"
            ) from err
        finally:
            self._fetching = None

    def trim(self, keep: Collection[PolicyVersion]) -> None:
        """Remove the models beyond two that hold no version of ``keep``, and all adapters but those."""
        for version, folder in self._adapter_folders().items():
            if version not in keep:
                shutil.rmtree(folder)
        for slot in self._slots[_NORMAL_SLOTS:]:
            if slot.reference is not None and slot.version not in keep:
                slot.remove()

    def held(self) -> list[PolicyVersion]:
        """Return the versions that can be served from here."""
        models = [slot.version for slot in self._slots if slot.version is not None]
        return sorted([*models, *self._adapter_folders()])

    @property
    def oldest_needed(self) -> PolicyVersion | None:
        """The oldest version whose objects a fetch of this worker may still read; None before the first."""
        bases = [slot.base.version for slot in self._slots if slot.base is not None]
        return min([*bases, *([] if self._fetching is None else [self._fetching])], default=None)

    def close(self) -> None:
        """Remove all copies and leave the folder to others; idempotent."""
        if not self._lock.closed:
            _clear(self._folder)
            self._lock.close()

    def _mirrored(
        self,
        folder: Path,
        manifest: VersionManifest,
        started: float,
        bytes_before: int,
        base: MirroredVersion | None = None,
    ) -> MirroredVersion:
        return MirroredVersion(
            version=PolicyVersion(manifest.version),
            folder=folder,
            num_bytes=self._reader.num_bytes + self._num_small_bytes - bytes_before,
            fetch_s=time.monotonic() - started,
            checksum=manifest.state_root,
            base=base,
        )

    def _make_adapter(self, target: VersionManifest) -> Path:
        folder = self._adapters / str(target.version)
        if not folder.exists():  # whole, by the rename that made it in this life; a number never has other factors
            export_adapter(target, folder, reader=self._reader, blobs=self._blobs)
        return folder

    def _adapter_folders(self) -> dict[PolicyVersion, Path]:
        if not self._adapters.exists():
            return {}
        return {PolicyVersion(int(path.name)): path for path in self._adapters.iterdir() if path.name.isdecimal()}

    def _make(self, target: VersionManifest, ref: BlobRef, keep: Collection[PolicyVersion]) -> Slot:
        for slot in self._slots:
            self._verify(slot)
            if slot.version == target.version and slot.base and slot.base.state_root == target.state_root:
                return slot
        slot = self._choose(keep)
        try:
            self._advance(slot, target, ref)
        except BlobMissing as err:  # collected while we read, or long before: an anchor and what follows are kept
            if slot.base is None:
                raise
            log.warning(
                "an object is gone, starting again from an anchor", policy_version=target.version, error=str(err)
            )
            slot.remove()
            self._advance(slot, target, ref)
        return slot

    def _choose(self, keep: Collection[PolicyVersion]) -> Slot:
        """Return the folder to write to: of those that nobody uses the one that is nearest, an empty one at last."""
        free = [slot for slot in self._slots if slot.version is None or slot.version not in keep]
        normal = [slot for slot in free if slot in self._slots[:_NORMAL_SLOTS]]
        usable = normal or [slot for slot in free if slot.reference is None]
        if not usable:
            raise ConfigError(f"{len(_SLOTS)} versions are in use at once: {self.held()}; that is a mistake of ours")
        return max(usable, key=lambda slot: -1 if slot.base is None else slot.base.version)

    def _advance(self, slot: Slot, target: VersionManifest, ref: BlobRef) -> None:
        plan = self._reader.plan(target, slot.base)
        if plan.anchor is not None and (source := self._nearest(target)) is not None:
            short = self._reader.plan(target, source.base)
            if short.anchor is None:  # what is on this disk already need not be fetched
                slot.copy(source)
                plan = short
        self._fetching = PolicyVersion(min(m.version for m in plan.manifests)) if plan.manifests else None
        slot.advance(plan, ref, self._reader, self._link)

    def _nearest(self, target: VersionManifest) -> Slot | None:
        """Return the newest folder that can be served and is not newer than the target."""
        here = [slot for slot in self._slots if slot.version is not None and slot.version <= target.version]
        return max(here, key=lambda slot: slot.version or 0, default=None)

    def _verify(self, slot: Slot) -> None:
        try:
            slot.verify(self._reader)
        except UNUSABLE as err:  # its manifest is gone: nobody can say what the folder should hold
            log.info("a copy cannot be verified and is made anew", folder=str(slot.folder), error=str(err))
            slot.remove()

    def _link(self, file: ModelFile, folder: Path) -> None:
        kept, path = self._linkable / file.blob.sha256, folder / file.name
        if not kept.exists() or kept.stat().st_size != file.blob.size_bytes:
            self._blobs.get_file(file.blob, kept)
            self._num_small_bytes += file.blob.size_bytes
        if path.exists():
            if path.samefile(kept):
                return
            path.unlink()
        os.link(kept, path)


def _lock(folder: Path) -> io.FileIO | None:
    """Lock a worker's folder for as long as the returned file is open; None when somebody else has it."""
    file = io.FileIO(folder / _LOCK, "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _sweep(folder: Path) -> None:
    """Remove the copies of a worker that is dead: a killed one cannot do it, and its id may never come back."""
    if (folder / _LOCK).exists():
        lock = _lock(folder)
        if lock is not None:
            _clear(folder)
            lock.close()


def _clear(folder: Path) -> None:
    for name in ("files", _ADAPTERS, *_SLOTS):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).with_suffix(".json").unlink(missing_ok=True)
