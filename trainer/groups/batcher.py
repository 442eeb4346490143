"""Decides which scored groups make the next batch, and which are dropped and why; pure.

```
offer ──▶ ready ──▶ take ──▶ in use ──▶ settle (trained) ──▶ kept for another use ──▶ retired
  │                  │  ▲                                        │
  └▶ dropped         │  └────────────────────────────────────────┘
                     └▶ dropped: stale at the moment of use
```

Groups are kept only if `algorithm.max_trained_count` is above 1. New groups go first: a kept one fills a batch that
would otherwise wait, and is retired when it was used often enough or is too old.
"""

from __future__ import annotations

from penstock.protocol.versions import PolicyVersion, is_fresh, staleness
from penstock.trainer.algorithm.group_rules import ONCE, Reuse, rewards_differ
from penstock.trainer.groups.drops import Drop, DropReason
from penstock.trainer.groups.ledger import Ledger
from penstock.trainer.learner.step_plan import ReadyGroup


class Batcher:
    """Holds groups between arrival and use. Not thread-safe: the owner locks."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        ledger: Ledger,
        needs_signal: bool = False,
        needs_baseline: bool = False,
        reuse: Reuse = ONCE,
    ) -> None:
        """Start empty.

        Args:
            groups_per_step: Groups of a batch.
            max_staleness: Most versions a group may be behind.
            ledger: What was trained, also by earlier sessions.
            needs_signal: Drop groups whose rewards are all equal.
            needs_baseline: Drop groups without a greedy completion.
            reuse: How often a group may be trained on.
        """
        self._reuse = reuse
        self._kept: dict[str, ReadyGroup] = {}  # trained, and may be again
        self._retired: list[str] = []
        # trained by an earlier session, which kept them: their messages are delivered again
        self._returning = {i for i in ledger.ids() if ledger.uses(i) < reuse.max_trained_count}
        self._needs_signal = needs_signal
        self._needs_baseline = needs_baseline
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._ledger = ledger
        self._ready: dict[str, ReadyGroup] = {}  # in order of arrival
        self._checked_at: PolicyVersion | None = None  # each ready group is checked once for a version
        self._unchecked: list[ReadyGroup] = []  # arrived since then
        self._too_old: dict[str, DropReason] = {}  # ready groups that are not fresh at that version
        self._in_use: dict[str, ReadyGroup] = {}
        self.abandoned: tuple[tuple[PolicyVersion, PolicyVersion], ...] = ()
        """Ranges of versions, both ends exclusive, whose samples are not trained on; oldest first."""

    def abandon(self, after: PolicyVersion, until: PolicyVersion) -> None:
        """Train on no token of the versions between ``after`` and ``until``, both exclusive.

        A session that was rolled back had published them. ``until`` has the weights of ``after`` again, so that the numbers
        of the versions between would make the samples look one or two versions old: they are of weights that this run never had.
        """
        self.abandoned = (*self.abandoned, (after, until))

    @property
    def num_ready(self) -> int:
        """Groups that could be taken if all were fresh."""
        return len(self._ready)

    @property
    def may_be_full(self) -> bool:
        """Whether there are enough groups for a batch if none is too old; cheap, for each group that arrives."""
        return len(self._ready) + len(self._kept) >= self._groups_per_step

    def holds(self, group_id: str) -> bool:
        """Return True if a group is held: ready, in use, or kept for another use."""
        return group_id in self._ready or group_id in self._in_use or group_id in self._kept

    def is_returning(self, group_id: str) -> bool:
        """Return True if an earlier session trained a group and it will be used again on arrival."""
        return group_id in self._returning

    def cancel_reuse(self, group_id: str) -> bool:
        """Do not use a returning group again, since it cannot be read; return False if it was not trained."""
        self._returning.discard(group_id)
        return group_id in self._ledger

    def is_spent(self, group_id: str) -> bool:
        """Return True if a group is held already, or was trained."""
        return group_id in self._ledger or self.holds(group_id)

    def offer(self, group: ReadyGroup) -> Drop | None:
        """Hold a fetched group; return its drop instead if it has no signal or no baseline."""
        if group.group_id in self._returning:
            self._returning.discard(group.group_id)
            self._kept[group.group_id] = group
            return None
        if group.group_id in self._ledger:  # kept for another use, and `close` was called while it was fetched
            self._retired.append(group.group_id)
            return None
        if self._needs_signal and not rewards_differ(group.scored.rewards):
            return self._drop(group, DropReason.NO_SIGNAL)
        if self._needs_baseline and not group.scored.generated.has_baseline:
            return self._drop(group, DropReason.NO_BASELINE)
        self._ready[group.group_id] = group
        self._unchecked.append(group)
        return None

    def is_full(self, version: PolicyVersion) -> bool:
        """Return True if a full batch can be taken at ``version``."""
        self._check(version)
        return len(self._ready) - len(self._too_old) + len(self._again(version)) >= self._groups_per_step

    def take(self, version: PolicyVersion) -> tuple[list[ReadyGroup], list[Drop]]:
        """Return the batch to train at ``version`` (empty: not enough yet) and the drops of what is too old for it.

        The oldest samples are chosen first, since they become stale first. The batch is sorted by group id, so that the
        same groups make the same batch in whatever order they arrived.
        """
        self._check(version)
        drops = [self._drop(self._ready.pop(group_id), reason) for group_id, reason in self._too_old.items()]
        self._too_old = {}
        self._retire(version)
        missing = max(0, self._groups_per_step - len(self._ready))
        again = self._again(version)
        if missing > len(again):
            return [], drops
        new = sorted(self._ready.values(), key=_age)[: self._groups_per_step]
        batch = sorted([*new, *again[:missing]], key=lambda g: g.group_id)
        for group in batch:
            self._ready.pop(group.group_id, None)
            self._kept.pop(group.group_id, None)
        self._in_use = {group.group_id: group for group in batch}
        return batch, drops

    def settle(self) -> None:
        """Release the batch that was taken, once it is trained and in the ledger; keep what may be used again."""
        for group_id, group in self._in_use.items():
            if 0 < self._ledger.uses(group_id) < self._reuse.max_trained_count:
                self._kept[group_id] = group
        self._in_use = {}

    def take_retired(self) -> list[str]:
        """Return the kept groups that will not be used again; each is returned once."""
        retired, self._retired = self._retired, []
        return retired

    def close(self) -> None:
        """Retire all kept groups, since no further batch is taken; those still to arrive count as trained."""
        self._retired += self._kept
        self._kept = {}
        self._returning.clear()

    def _check(self, version: PolicyVersion) -> None:
        """Find the ready groups that are too old for ``version``; those known from an earlier call are not checked again."""
        if version != self._checked_at:
            self._checked_at, self._unchecked, self._too_old = version, list(self._ready.values()), {}
        for group in self._unchecked:
            if (reason := self._verdict(group, version)) is not None:
                self._too_old[group.group_id] = reason
        self._unchecked = []

    def _again(self, version: PolicyVersion) -> list[ReadyGroup]:
        """Return the kept groups that may be used at ``version``: the least used first, then the oldest."""
        free = [
            (self._ledger.uses(group_id), _age(group), group_id)
            for group_id, group in self._kept.items()
            if self._reuse.reason(self._ledger.uses(group_id), self._ledger.last_use(group_id), version) is None
        ]
        return [self._kept[group_id] for _, _, group_id in sorted(free)]

    def _retire(self, version: PolicyVersion) -> None:
        """Stop keeping groups that are too old; they were trained, so no data is discarded."""
        too_old = [group_id for group_id, group in self._kept.items() if self._verdict(group, version) is not None]
        for group_id in too_old:
            del self._kept[group_id]
        self._retired += too_old

    def _verdict(self, group: ReadyGroup, version: PolicyVersion) -> DropReason | None:
        summary = group.scored.generated
        try:
            staleness(version, PolicyVersion(summary.newest_version))
        except ValueError:
            return DropReason.FUTURE
        if self._is_of_abandoned_weights(group):
            return DropReason.FUTURE
        fresh = is_fresh(version, PolicyVersion(summary.oldest_version), self._max_staleness)
        return None if fresh else DropReason.STALE

    def _is_of_abandoned_weights(self, group: ReadyGroup) -> bool:
        summary = group.scored.generated
        touched = [(a, u) for a, u in self.abandoned if summary.newest_version > a and summary.oldest_version < u]
        rows = group.group.trained_rows if touched else ()
        return any(a < run.version < u for a, u in touched for row in rows for run in row.version_runs)

    @staticmethod
    def _drop(group: ReadyGroup, reason: DropReason) -> Drop:
        return Drop(group.group_id, reason, group.num_tokens, group.pack)


def _age(group: ReadyGroup) -> int:
    return group.scored.generated.oldest_version


def staleness_tokens(batch: list[ReadyGroup], version: PolicyVersion, *, least: int = 0) -> dict[int, int]:
    """Return the histogram of token ages in versions, by each token's own version.

    ``least`` is the least age possible: above 0 the versions are another run's (`StepPlan`).
    """
    histogram: dict[int, int] = {}
    for group in batch:
        for trajectory in group.group.trained_rows:
            for run in trajectory.version_runs:
                age = max(least, version - run.version) if least else staleness(version, run.version)
                histogram[age] = histogram.get(age, 0) + run.end - run.start
    return dict(sorted(histogram.items()))
