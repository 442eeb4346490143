"""Local copies of adapters: one folder in PEFT's format for each, written once and never changed.

A worker that restarts does not reuse adapter folders, which are small: it fetches the one it needs again.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.export import export_adapter
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.version_reader import WeightReader


class AdapterMirror:
    """The adapter folders of one worker. Blocking; one thread at a time."""

    def __init__(self, reader: WeightReader, blobs: Blobs, *, folder: Path) -> None:
        """Write below ``folder``, which must not hold adapters of another process."""
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
        """Remove the adapters whose version is not in ``keep``."""
        for version, folder in self._folders().items():
            if version not in keep:
                shutil.rmtree(folder)

    def held(self) -> list[PolicyVersion]:
        """Return the versions that can be served from here."""
        return list(self._folders())

    @property
    def oldest_needed(self) -> PolicyVersion | None:
        """The version that is being fetched; None when none is."""
        return self._fetching

    def _folders(self) -> dict[PolicyVersion, Path]:
        if not self._folder.exists():
            return {}
        return {PolicyVersion(int(path.name)): path for path in self._folder.iterdir() if path.name.isdecimal()}
