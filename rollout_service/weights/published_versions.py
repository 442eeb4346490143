"""The versions that the trainer has published, as far as this worker knows, and those of them it has refused."""

from __future__ import annotations

import asyncio

from penstock.protocol.facts import BlobRef
from penstock.protocol.versions import PolicyVersion, is_newer

MAX_VERSIONS = 256  # how far back an evaluation may pin


class PublishedVersions:
    """Versions and their manifests, in the order they were published. For one event loop."""

    def __init__(self) -> None:
        """Start without versions."""
        self._manifests: dict[PolicyVersion, BlobRef] = {}
        self._refused: dict[PolicyVersion, BlobRef] = {}
        self._refusal = asyncio.Event()  # replaced at every refusal

    def __contains__(self, version: object) -> bool:
        """Return True if a version was published, and is not among the forgotten older ones."""
        return version in self._manifests

    def __len__(self) -> int:
        """Return the number of versions."""
        return len(self._manifests)

    def manifest(self, version: PolicyVersion) -> BlobRef:
        """Return the reference to a version's manifest, the one published last."""
        return self._manifests[version]

    def add(self, version: PolicyVersion, manifest: BlobRef) -> bool:
        """Add a version; returns False when it was known with this manifest."""
        if self._manifests.get(version) == manifest:
            return False
        self._manifests[version] = manifest
        while len(self._manifests) > MAX_VERSIONS:
            del self._manifests[next(iter(self._manifests))]
        return True

    def newest(self) -> PolicyVersion | None:
        """Return the newest version that was not refused; None when there is none.

        A refused version that is published again with another manifest counts.
        """
        newest = None
        for version, manifest in self._manifests.items():
            if self._refused.get(version) != manifest and is_newer(version, newest):
                newest = version
        return newest

    def refuse(self, version: PolicyVersion) -> None:
        """Record that a version cannot be used with its present manifest."""
        self._refused[version] = self._manifests[version]
        self._refusal.set()
        self._refusal = asyncio.Event()

    async def wait_until_refused(self, version: PolicyVersion) -> None:
        """Wait until a version has been refused at least once."""
        while version not in self._refused:
            await self._refusal.wait()
