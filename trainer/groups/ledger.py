"""Which groups have been trained, and at which version: what makes the effect of a group exactly-once; pure.

The ledger is part of every checkpoint. Ids older than the staleness window leave it: the staleness
rule would refuse such a group anyway, so the ledger stays small however long the run. A group that is
trained on more than once, by design, stands at each version it was trained at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.protocol.versions import PolicyVersion, is_fresh


class Ledger:
    """Ids of trained groups, by the version that the trainer had when it trained them."""

    def __init__(self, rows: Iterable[tuple[int, Sequence[str]]] = ()) -> None:
        """Start from what a checkpoint holds."""
        self._by_version = {PolicyVersion(version): tuple(ids) for version, ids in rows}
        self._uses = Counter(group_id for ids in self._by_version.values() for group_id in ids)

    def __contains__(self, group_id: str) -> bool:
        """Say whether a group has been trained within the window."""
        return group_id in self._uses

    def uses(self, group_id: str) -> int:
        """Return how often a group was trained within the window: all its uses, as long as it is fresh."""
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
        """Add what was trained at ``version`` and forget what no fresh group can equal any more."""
        ids = tuple(group_ids)
        self._by_version[version] = (*self._by_version.get(version, ()), *ids)
        self._uses.update(ids)
        for old in [v for v in self._by_version if not is_fresh(version, v, max_staleness)]:
            self._uses -= Counter(self._by_version.pop(old))

    def rows(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return the ledger as a checkpoint holds it."""
        return tuple(self._by_version.items())
