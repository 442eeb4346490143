"""Which groups have been trained, and at which version: this makes a group's effect exactly-once; pure.

The ledger is part of every checkpoint. Ids older than the staleness window are removed: the staleness rule refuses
such groups anyway, so the ledger stays small in a long run. A group that is trained more than once by design is listed
at each version it was trained at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.protocol.versions import PolicyVersion, is_fresh


class Ledger:
    """Ids of trained groups, by the version that the trainer had when it trained them."""

    def __init__(self, rows: Iterable[tuple[int, Sequence[str]]] = ()) -> None:
        """Start from the rows of a checkpoint."""
        self._by_version = {PolicyVersion(version): tuple(ids) for version, ids in rows}
        self._uses = Counter(group_id for ids in self._by_version.values() for group_id in ids)

    def __contains__(self, group_id: str) -> bool:
        """Return True if a group has been trained within the window."""
        return group_id in self._uses

    def uses(self, group_id: str) -> int:
        """Return how often a group was trained within the window; while it is fresh, these are all its uses."""
        return self._uses[group_id]

    def last_use(self, group_id: str) -> PolicyVersion | None:
        """Return the newest version at which a group was trained; None for one that was not."""
        return max((version for version, ids in self._by_version.items() if group_id in ids), default=None)

    def ids(self) -> tuple[str, ...]:
        """Return the ids held, each once."""
        return tuple(self._uses)

    def __len__(self) -> int:
        """Return the number of ids held."""
        return len(self._uses)

    def record(self, version: PolicyVersion, group_ids: Iterable[str], *, max_staleness: int) -> None:
        """Add what was trained at ``version``, and remove ids that no fresh group can have."""
        ids = tuple(group_ids)
        self._by_version[version] = (*self._by_version.get(version, ()), *ids)
        self._uses.update(ids)
        for old in [v for v in self._by_version if not is_fresh(version, v, max_staleness)]:
            self._uses -= Counter(self._by_version.pop(old))

    def rows(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return the ledger as a checkpoint holds it."""
        return tuple(self._by_version.items())
