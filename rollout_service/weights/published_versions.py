"""The versions that the trainer has published, as far as this worker knows, and those of them it has refused.

A version is published when the head names it or a newer one: the trainer that holds the run moves the head first and
announces then. An announcement beyond the head waits for it, and none replaces a manifest that the head named.
"""

from __future__ import annotations

import asyncio

from penstock.protocol.facts import BlobRef
from penstock.protocol.versions import PolicyVersion, is_newer

MAX_VERSIONS = 256  # how far back an evaluation may pin


class PublishedVersions:
    """Versions and their manifests, in the order they were published. For one event loop."""

    def __init__(self) -> None:
        self._manifests: dict[PolicyVersion, BlobRef] = {}
        self._named: set[PolicyVersion] = set()  # those of them whose manifest the head named
        self._announced: dict[PolicyVersion, BlobRef] = {}  # beyond the head
        self._head: PolicyVersion | None = None
        self._refused: dict[PolicyVersion, BlobRef] = {}
        self._refusal = asyncio.Event()  # replaced at every refusal

    def __contains__(self, version: object) -> bool:
        """Return True if a version was published, and is not among the forgotten older ones."""
        return version in self._manifests

    def __len__(self) -> int:
        return len(self._manifests)

    def manifest(self, version: PolicyVersion) -> BlobRef:
        return self._manifests[version]

    def add(self, version: PolicyVersion, manifest: BlobRef) -> bool:
        """Add the version that the head names; returns False when it was known with this manifest."""
        if is_newer(version, self._head):
            self._head = version
        is_new = self._add(version, manifest)
        self._named.add(version)
        for announced in [one for one in self._announced if not is_newer(one, self._head)]:
            self.announce(announced, self._announced.pop(announced))
        return is_new

    def announce(self, version: PolicyVersion, manifest: BlobRef) -> bool:
        """Take an announcement; returns True when the head should be read, because it is beyond what the head named."""
        if self._head is None or is_newer(version, self._head):
            self._announced[version] = manifest
            if len(self._announced) > MAX_VERSIONS:
                del self._announced[next(iter(self._announced))]
            return True
        if version not in self._named:
            self._add(version, manifest)
        return False

    def add_announced(self) -> None:
        """Add what was announced beyond the head, where the head cannot be read."""
        for version, manifest in self._announced.items():
            self._add(version, manifest)
        self._announced.clear()

    def _add(self, version: PolicyVersion, manifest: BlobRef) -> bool:
        if self._manifests.get(version) == manifest:
            return False
        self._manifests[version] = manifest
        while len(self._manifests) > MAX_VERSIONS:
            oldest = next(iter(self._manifests))
            del self._manifests[oldest]
            self._named.discard(oldest)
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
        self._refused[version] = self._manifests[version]
        self._refusal.set()
        self._refusal = asyncio.Event()

    async def wait_until_refused(self, version: PolicyVersion) -> None:
        while version not in self._refused:
            await self._refusal.wait()
