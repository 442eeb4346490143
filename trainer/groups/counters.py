"""Counts of the whole run, resumed lives included: what became of groups and tokens; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from penstock.trainer.groups.batcher import Drop
from penstock.trainer.groups.drops import DropReason


class Counters:
    """Counters that the step events, the checkpoint and the summary show. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        """Start at zero."""
        self.groups_trained = 0  # each once
        self.groups_reused = 0  # further uses of trained groups
        self.tokens_trained = 0
        self.groups_scored = 0
        self.dropped_groups: Counter[str] = Counter()
        self.dropped_tokens: Counter[str] = Counter()
        self.staleness_tokens: Counter[int] = Counter()

    def count_drop(self, drop: Drop) -> None:
        """Count a group that is not trained on."""
        self.dropped_groups[drop.reason] += 1
        self.dropped_tokens[drop.reason] += drop.num_tokens

    def revive(self) -> None:
        """Count a group that had died as alive."""
        self.dropped_groups[DropReason.DEAD] -= 1

    def count_batch(self, num_groups: int, staleness_tokens: Mapping[int, int], *, num_reused: int = 0) -> None:
        """Count a batch: groups trained for the first time, and again; sampled tokens by age in versions."""
        self.groups_trained += num_groups
        self.groups_reused += num_reused
        self.staleness_tokens.update(staleness_tokens)
        self.tokens_trained += sum(staleness_tokens.values())

    def to_document(self) -> dict[str, Any]:
        """Return the counters as plain JSON values."""
        return {
            "groups_trained": self.groups_trained,
            "groups_reused": self.groups_reused,
            "tokens_trained": self.tokens_trained,
            "groups_scored": self.groups_scored,
            "dropped_groups": dict(self.dropped_groups),
            "dropped_tokens": dict(self.dropped_tokens),
            "staleness_tokens": {str(age): count for age, count in sorted(self.staleness_tokens.items())},
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Counters:
        """Rebuild what `to_document` wrote."""
        counters = cls()
        for name in ("groups_trained", "tokens_trained", "groups_scored"):
            setattr(counters, name, int(document[name]))
        counters.groups_reused = int(document.get("groups_reused", 0))
        counters.dropped_groups.update(document["dropped_groups"])
        counters.dropped_tokens.update(document["dropped_tokens"])
        counters.staleness_tokens.update({int(age): count for age, count in document["staleness_tokens"].items()})
        return counters
