"""The local copies of published versions: whole models in `model_mirror.py`, adapters in `adapter_mirror.py`.

`Mirror` decides which of the two a version needs: a model is one folder; an adapter is a folder and that of its base model.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.manifest_chain import verify_head
from penstock.protocol.weights.version_reader import UNUSABLE, WeightReader
from penstock.rollout_service.errors import MirrorFull, WeightsUnusable
from penstock.rollout_service.weights.adapter_mirror import AdapterMirror
from penstock.rollout_service.weights.cache_folder import CacheFolder
from penstock.rollout_service.weights.model_mirror import ModelMirror

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import TrustedKeys

CACHED_SEGMENT_BYTES = 1024**3  # patches fetched for one slot, kept in memory for the other
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


@dataclass(frozen=True, slots=True)
class MirroredVersion:
    """One complete and verified model folder; or that of an adapter, and its ``base`` model."""

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


@dataclass(frozen=True, slots=True)
class _Start:
    """The counters when a fetch started."""

    at: float
    num_bytes: int


class Mirror:
    """One worker's copies. Blocking: coroutines call it through ``asyncio.to_thread``, one at a time."""

    def __init__(self, blobs: Blobs, folder: Path, run_id: str, trusted_keys: TrustedKeys | None = None) -> None:
        """Reuse the models that an earlier process of this worker left in ``folder``.

        With ``trusted_keys``, a version whose manifest none of them has signed is unusable.

        Raises ConfigError when the folder cannot be made, or a running worker with the same id uses it.
        """
        self._run_id = run_id
        self._cache = CacheFolder(folder)
        self._reader = WeightReader(blobs, run_id, cache_bytes=CACHED_SEGMENT_BYTES, trusted_keys=trusted_keys)
        self._models = ModelMirror(self._reader, blobs, slots=self._cache.slots, files=self._cache.files)
        self._adapters = AdapterMirror(self._reader, blobs, folder=self._cache.adapters)
        self._epoch = 0

    def fetch(
        self,
        version: PolicyVersion,
        manifest_ref: BlobRef,
        *,
        keep: Collection[PolicyVersion] = (),
        newest: bool = False,
    ) -> MirroredVersion:
        """Return a version's folder, writing it if it is not here; folders of versions in ``keep`` are not touched.

        ``newest`` says that the version is the one to serve, not one that an evaluation pins: it is then refused
        when it was published under an older lease than one seen before. Raises WeightsUnusable when an object is
        missing, corrupt, or not what the announcement said; BlobStoreUnreachable when S3 is unreachable; MirrorFull
        when the disk is full, ConfigError when it cannot be written to.
        """
        with self._translating_errors(version):
            start = _Start(time.monotonic(), self._num_bytes())
            target = self._reader.manifest(manifest_ref, version)
            if newest:
                verify_head(target, run_id=self._run_id, version=version, epoch=self._epoch)
                self._epoch = target.epoch
            if target.base is None:
                return self._mirrored(target, self._models.fetch(target, manifest_ref, keep), start)
            model = self._reader.base(target)
            base = self._mirrored(model, self._models.fetch(model, target.base.manifest, keep), start)
            return self._mirrored(target, self._adapters.fetch(target), start, base)

    def trim(self, keep: Collection[PolicyVersion]) -> None:
        """Remove the models beyond two, and all adapters, whose version is not in ``keep``."""
        self._adapters.trim(keep)
        self._models.trim(keep)

    def held(self) -> list[PolicyVersion]:
        """Return the versions that can be served from here."""
        return sorted([*self._models.held(), *self._adapters.held()])

    @property
    def oldest_needed(self) -> PolicyVersion | None:
        """The oldest version whose objects a fetch of this worker may still read; None before the first."""
        needed = (self._models.oldest_needed, self._adapters.oldest_needed)
        return min((version for version in needed if version is not None), default=None)

    def close(self) -> None:
        """Remove all copies and unlock the folder; idempotent."""
        self._cache.close()

    def _mirrored(
        self, manifest: VersionManifest, folder: Path, start: _Start, base: MirroredVersion | None = None
    ) -> MirroredVersion:
        return MirroredVersion(
            version=PolicyVersion(manifest.version),
            folder=folder,
            num_bytes=self._num_bytes() - start.num_bytes,
            fetch_s=time.monotonic() - start.at,
            checksum=manifest.state_root,
            base=base,
        )

    def _num_bytes(self) -> int:
        return self._reader.num_bytes + self._models.num_file_bytes

    @contextlib.contextmanager
    def _translating_errors(self, version: PolicyVersion) -> Iterator[None]:
        folder = self._cache.path
        try:
            yield
        except UNUSABLE as err:
            raise WeightsUnusable(f"version {version}: {err}") from None
        except OSError as err:
            if err.errno in _DISK_FULL:
                raise MirrorFull(
                    f"worker.cache_dir: {folder} has no space for version {version} ({err.strerror}; "
                    f"{self._cache.free_bytes() / 1e6:.1f} MB free). Two copies of the model are kept there: "
                    "free disk space, or choose another folder"
                ) from None
            raise ConfigError(
                f"worker.cache_dir: cannot write version {version} to {folder} ({err.strerror}); "
                "choose a folder that can be written to"
            ) from err
