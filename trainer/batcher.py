"""Decides which scored groups make the next batch, and which are dropped and why; pure.

```
offer ──▶ ready ──▶ take ──▶ in use ──▶ settle (trained)
  │                  │
  └▶ dropped         └▶ dropped: stale at the moment of use
```
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.versions import PolicyVersion, is_fresh, staleness
from trainer.drops import DropReason
from trainer.filters import differs
from trainer.ledger import Ledger
from trainer.step_plan import ReadyGroup


@dataclass(frozen=True, slots=True)
class Drop:
    """One group that is not trained on."""

    group_id: str
    reason: DropReason
    num_tokens: int


class Batcher:
    """Holds groups between their arrival and their use. Not thread-safe: its owner locks."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        ledger: Ledger,
        needs_signal: bool = False,
        needs_baseline: bool = False,
    ) -> None:
        """Start empty; what ``needs_signal`` and has equal rewards, or ``needs_baseline`` and has none, is not held."""
        self._needs_signal = needs_signal
        self._needs_baseline = needs_baseline
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._ledger = ledger
        self._ready: dict[str, ReadyGroup] = {}  # in order of arrival
        self._in_use: set[str] = set()

    @property
    def num_ready(self) -> int:
        """Groups that could be taken, were they all fresh."""
        return len(self._ready)

    def holds(self, group_id: str) -> bool:
        """Say whether a group is here, waiting or in use."""
        return group_id in self._ready or group_id in self._in_use

    def is_spent(self, group_id: str) -> bool:
        """Say whether a group that arrives is here already, or was trained."""
        return group_id in self._ledger or self.holds(group_id)

    def offer(self, group: ReadyGroup) -> Drop | None:
        """Take in a group that is wanted and has been fetched; returns why not, when it teaches nothing."""
        if self._needs_signal and not differs(group.scored.rewards):
            return self._drop(group, DropReason.NO_SIGNAL)
        if self._needs_baseline and not group.scored.generated.has_baseline:
            return self._drop(group, DropReason.NO_BASELINE)
        self._ready[group.group_id] = group
        return None

    def take(self, version: PolicyVersion) -> tuple[list[ReadyGroup], list[Drop]]:
        """Return the batch to train at ``version`` (empty: not enough yet) and what is too old for it.

        The oldest samples go first, since they have the least time left; the batch itself is in the
        order of group ids, so that the same groups make the same batch whatever order they came in.
        """
        drops = [
            self._drop(group, reason) for group in self._ready.values() if (reason := self._verdict(group, version))
        ]
        for drop in drops:
            del self._ready[drop.group_id]
        if len(self._ready) < self._groups_per_step:
            return [], drops
        by_age = sorted(self._ready.values(), key=lambda g: g.scored.generated.oldest_version)
        batch = sorted(by_age[: self._groups_per_step], key=lambda g: g.group_id)
        for group in batch:
            del self._ready[group.group_id]
        self._in_use = {group.group_id for group in batch}
        return batch, drops

    def settle(self) -> None:
        """Say that the batch that was taken has been trained and is in the ledger."""
        self._in_use = set()

    def _verdict(self, group: ReadyGroup, version: PolicyVersion) -> DropReason | None:
        summary = group.scored.generated
        try:
            staleness(version, PolicyVersion(summary.newest_version))
        except ValueError:
            return DropReason.FUTURE
        fresh = is_fresh(version, PolicyVersion(summary.oldest_version), self._max_staleness)
        return None if fresh else DropReason.STALE

    @staticmethod
    def _drop(group: ReadyGroup, reason: DropReason) -> Drop:
        return Drop(group.group_id, reason, group.num_tokens)


def staleness_tokens(batch: list[ReadyGroup], version: PolicyVersion) -> dict[int, int]:
    """Return how many tokens to be trained on are how many versions old, by each token's own version."""
    histogram: dict[int, int] = {}
    for group in batch:
        for trajectory in group.group.trajectories[: group.scored.generated.num_trained]:
            for run in trajectory.version_runs:
                age = staleness(version, run.version)
                histogram[age] = histogram.get(age, 0) + run.end - run.start
    return dict(sorted(histogram.items()))
