"""The local copies of published versions: fetched, verified, and removed when no longer needed.

    <cache>/v00000012/config.json tokenizer.json … model.safetensors

A folder gets its name only when every file in it has been verified against the manifest. Files that
do not change between versions (config, tokenizer) are fetched once and linked.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import BlobCorrupt, BlobMissing, ConfigError, WireError
from protocol.facts import BlobRef
from protocol.transport.blobs import Blobs
from protocol.versions import PolicyVersion
from protocol.weights import ModelFile, WeightsManifest
from rollout_service.errors import WeightsUnusable

_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class MirroredVersion:
    """One complete and verified model folder."""

    version: PolicyVersion
    folder: Path
    num_bytes: int  # fetched for it
    fetch_s: float
    checksum: str  # sha256 over the shards' sha256, in the manifest's order


class Mirror:
    """One worker's folder of versions. Blocking: coroutines call it through ``asyncio.to_thread``."""

    def __init__(self, blobs: Blobs, folder: Path, run_id: str) -> None:
        """Start empty: what dead workers of this run left behind here, this one's past included, is removed.

        Raises ConfigError when the folder cannot be made, or a living worker of the same id has it.
        """
        self._blobs = blobs
        self._folder = folder
        self._run_id = run_id
        self._held: dict[PolicyVersion, MirroredVersion] = {}
        self._linkable = folder / "files"
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
            _clear(folder)
            self._linkable.mkdir()
        except OSError as err:
            raise ConfigError(f"worker.cache_dir: cannot make {folder} ({err.strerror})") from None

    def fetch(self, version: PolicyVersion, manifest_ref: BlobRef) -> MirroredVersion:
        """Return a version's folder, fetching it when it is not here.

        Raises WeightsUnusable when an object is gone, corrupt, or not what the announcement said;
        BlobStoreUnreachable when the store is away.
        """
        held = self._held.get(version)
        if held is not None:
            return held
        started = time.monotonic()
        partial = self._folder / f"v{version:08d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            manifest = self._read_manifest(version, manifest_ref)
            fetched = sum(self._fetch_linked(file, partial) for file in manifest.model_files)
            for shard in manifest.shards:
                self._blobs.get_file(shard.blob, partial / shard.name)
        except (BlobMissing, BlobCorrupt, WireError) as err:
            shutil.rmtree(partial, ignore_errors=True)
            raise WeightsUnusable(f"version {version}: {err}") from None
        folder = self._folder / f"v{version:08d}"
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        mirrored = MirroredVersion(
            version=version,
            folder=folder,
            num_bytes=fetched + manifest.num_bytes,
            fetch_s=time.monotonic() - started,
            checksum=hashlib.sha256("".join(shard.blob.sha256 for shard in manifest.shards).encode()).hexdigest(),
        )
        self._held[version] = mirrored
        return mirrored

    def keep_only(self, versions: Collection[PolicyVersion]) -> None:
        """Remove the folders of all other versions."""
        for version in [held for held in self._held if held not in versions]:
            shutil.rmtree(self._held.pop(version).folder, ignore_errors=True)

    def held(self) -> list[PolicyVersion]:
        """Return the versions that are here, in the order they came."""
        return list(self._held)

    def close(self) -> None:
        """Remove all copies and leave the folder to others; idempotent."""
        if not self._lock.closed:
            _clear(self._folder)
            self._lock.close()

    def _read_manifest(self, version: PolicyVersion, ref: BlobRef) -> WeightsManifest:
        manifest = WeightsManifest.from_json(self._blobs.get(ref))
        if manifest.version != version or manifest.run_id != self._run_id:
            raise WeightsUnusable(
                f"version {version} of run {self._run_id}: its manifest {ref.key} is of version {manifest.version} "
                f"of run {manifest.run_id}"
            )
        return manifest

    def _fetch_linked(self, file: ModelFile, folder: Path) -> int:
        kept = self._linkable / file.blob.sha256
        fetched = 0
        if not kept.exists():
            self._blobs.get_file(file.blob, kept)
            fetched = file.blob.size_bytes
        os.link(kept, folder / file.name)
        return fetched


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
    for leftover in (folder / "files", *folder.glob("v*")):
        shutil.rmtree(leftover, ignore_errors=True)
