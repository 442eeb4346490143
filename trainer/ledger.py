"""Which groups have been trained, and at which version: what makes the effect of a group exactly-once; pure.

The ledger is part of every checkpoint. Ids older than the staleness window leave it: the staleness
rule would refuse such a group anyway, so the ledger stays small however long the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.versions import PolicyVersion, is_fresh


class Ledger:
    """Ids of trained groups, by the version that the trainer had when it trained them."""

    def __init__(self, rows: Iterable[tuple[int, Sequence[str]]] = ()) -> None:
        """Start from what a checkpoint holds."""
        self._by_version = {PolicyVersion(version): tuple(ids) for version, ids in rows}
        self._ids = {group_id for ids in self._by_version.values() for group_id in ids}

    def __contains__(self, group_id: str) -> bool:
        """Say whether a group has been trained within the window."""
        return group_id in self._ids

    def __len__(self) -> int:
        """Return the number of ids held."""
        return len(self._ids)

    def record(self, version: PolicyVersion, group_ids: Iterable[str], *, max_staleness: int) -> None:
        """Add what was trained at ``version`` and forget what no fresh group can equal any more."""
        ids = tuple(group_ids)
        self._by_version[version] = (*self._by_version.get(version, ()), *ids)
        self._ids.update(ids)
        for old in [v for v in self._by_version if not is_fresh(version, v, max_staleness)]:
            self._ids.difference_update(self._by_version.pop(old))

    def rows(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return the ledger as a checkpoint holds it."""
        return tuple(self._by_version.items())
