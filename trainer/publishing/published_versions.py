"""Which versions workers can have sampled with; pure.

A step's version is not published if storage is slower than the steps, so a number below the head may never have been served.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.protocol.versions import PolicyVersion

MOST_KNOWN = 4096  # groups that are sampled by an older version are stale


class PublishedVersions:
    """Versions of all sessions of a run. Not thread-safe: the owner locks."""

    def __init__(self, announced: Collection[PolicyVersion], head: PolicyVersion | None) -> None:
        """Know what earlier sessions published.

        Args:
            announced: The announcements that the stream still has. It loses the oldest first, so nothing is known about
                versions before these.
            head: The newest complete version, which may not have been announced.
        """
        self._versions = {*announced, *(() if head is None else (head,))}
        self._unknown_before = min(self._versions, default=PolicyVersion(0))

    def add(self, version: PolicyVersion) -> None:
        """Add a version before workers can see it."""
        self._versions.add(version)
        if len(self._versions) > 2 * MOST_KNOWN:
            self._versions = set(sorted(self._versions)[-MOST_KNOWN:])
            self._unknown_before = min(self._versions)

    def never_published(self, versions: Iterable[PolicyVersion]) -> list[PolicyVersion]:
        """Return those of the versions that no session published, sorted."""
        return sorted(v for v in {*versions} - self._versions if v >= self._unknown_before)
