"""Counts of the whole run, as step events, checkpoint and summary show them; sums by group id are the accounting's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from penstock.trainer.groups.accounting import Accounting


class Counters:
    """Counts uses and ages, which `Accounting` does not hold, and reads everything else from it.

    Not thread-safe: the owner locks.
    """

    def __init__(self, accounting: Accounting, document: Mapping[str, Any] | None = None) -> None:
        """Start at zero, or from what `to_document` wrote; ``accounting`` is of the same checkpoint."""
        self._accounting = accounting
        document = document or {}
        self.groups_scored = int(document.get("groups_scored", 0))  # arrived and accepted
        self.groups_reused = int(document.get("groups_reused", 0))  # further uses of trained groups
        ages = document.get("staleness_tokens", {})
        self.staleness_tokens: Counter[int] = Counter({int(age): count for age, count in ages.items()})

    @property
    def groups_trained(self) -> int:
        """Groups trained, each counted once."""
        return self._accounting.totals("train").used

    @property
    def tokens_trained(self) -> int:
        """Sampled tokens trained, every use of a group counted."""
        return sum(self.staleness_tokens.values())

    @property
    def dropped_groups(self) -> Counter[str]:
        """Training groups that were dropped, and deliveries that were refused, by reason."""
        totals = self._accounting.totals("train")
        return _sum(totals.dropped, totals.refused)

    @property
    def dropped_tokens(self) -> Counter[str]:
        """Sampled tokens of them, by reason."""
        totals = self._accounting.totals("train")
        return _sum(totals.dropped_tokens, totals.refused_tokens)

    @property
    def abandoned_completions(self) -> Counter[str]:
        """Completions of trained and dropped groups that were started and not kept, by reason."""
        return Counter(self._accounting.totals("train").abandoned)

    @property
    def abandoned_tokens(self) -> Counter[str]:
        """Sampled tokens of them, by reason."""
        return Counter(self._accounting.totals("train").abandoned_tokens)

    def count_batch(self, staleness_tokens: Mapping[int, int], *, num_reused: int = 0) -> None:
        """Count a trained batch: its sampled tokens by age in versions, and the groups that were trained before."""
        self.groups_reused += num_reused
        self.staleness_tokens.update(staleness_tokens)

    def to_document(self) -> dict[str, Any]:
        """Return all counts as plain JSON values."""
        return {
            "groups_trained": self.groups_trained,
            "groups_reused": self.groups_reused,
            "tokens_trained": self.tokens_trained,
            "groups_scored": self.groups_scored,
            "dropped_groups": dict(self.dropped_groups),
            "dropped_tokens": dict(self.dropped_tokens),
            "abandoned_completions": dict(self.abandoned_completions),
            "abandoned_tokens": dict(self.abandoned_tokens),
            "staleness_tokens": {str(age): count for age, count in sorted(self.staleness_tokens.items())},
        }


def _sum(dropped: Mapping[str, int], refused: Mapping[str, int]) -> Counter[str]:
    total = Counter(dropped)
    total.update(refused)  # unlike ``+``, keeps a reason whose count is 0 again
    return total
