"""Which messages have arrived and are not settled: the collector's decisions, without threads and I/O.

A message is settled when each of its groups was trained, dropped, or refused on arrival. Only then may a checkpoint
cover it, and only after that checkpoint may it be acknowledged.

```
receive ──▶ wanted ──fetched──▶ offer ──▶ take ──▶ trained ──▶ settled ──checkpoint──▶ acknowledged
   └▶ refused (twice, foreign)     └▶ dropped  └▶ dropped: stale
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from penstock.protocol.errors import ReaderKilled
from penstock.protocol.facts import DeadLetter, ScoredGroup
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.drops import Drop, DropReason, claimed_tokens
from penstock.trainer.learner.step_plan import ReadyGroup

_OWN_STAGE = "scored"


class IssuedGroups(Protocol):
    """The groups that were issued: which are outstanding, and what is issued again. `Issuer` implements it."""

    def outstanding(self) -> Collection[str]:
        """Return the ids issued and neither trained nor dropped."""
        ...

    def accept(self, group_id: str, holds: Callable[[str], bool]) -> bool:
        """Record that a group arrived; return False if it must not be used. Raises ValueError for one that was never issued."""
        ...

    def promise(self, group_id: str) -> TaskPromise:
        """Return what the task of a group asked for; raises ValueError for a foreign id."""
        ...

    def is_late(self, version: PolicyVersion, holds: Callable[[str], bool]) -> bool:
        """Return True if a group that ``holds`` is False for may be too old for every step after the one at ``version``."""
        ...

    def drop(self, drop: Drop) -> None:
        """Close an outstanding group; the issuer decides whether its prompt is issued again."""
        ...

    def refuse(self, drop: Drop) -> None:
        """Count a group that is not outstanding: delivered twice, given up, or never issued."""
        ...

    def drop_dead(self, drops: Sequence[Drop], sequence: int) -> None:
        """Drop the groups of a dead letter, and set the letters read to ``sequence``, in one atomic change."""
        ...

    def pause(self, is_paused: bool) -> None:
        """Issue nothing while ``is_paused``."""
        ...


class DeliveryTracker:
    """Unsettled groups by message sequence number. Not thread-safe: the owner locks."""

    def __init__(self, batcher: Batcher, issued: IssuedGroups) -> None:
        """Start empty; only this tracker may use ``batcher`` from now on."""
        self._batcher = batcher
        self._issued = issued
        self._unsettled: dict[int, set[str]] = {}  # groups neither trained nor dropped, by message
        self._fetching: set[str] = set()  # wanted and not offered yet; they count as held
        self.dropped: Counter[DropReason] = Counter()  # groups of this session

    @property
    def num_ready(self) -> int:
        """Groups that could be trained if all were fresh."""
        return self._batcher.num_ready

    @property
    def may_be_full(self) -> bool:
        """Whether there may be a full batch (`Batcher.may_be_full`)."""
        return self._batcher.may_be_full

    @property
    def abandoned(self) -> tuple[tuple[PolicyVersion, PolicyVersion], ...]:
        """The ranges of versions whose samples are not trained on (`Batcher.abandoned`)."""
        return self._batcher.abandoned

    def abandon(self, after: PolicyVersion, until: PolicyVersion) -> None:
        """Train on no sample of the versions between both (`Batcher.abandon`)."""
        self._batcher.abandon(after, until)

    def receive(self, sequence: int, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Track a message; return the groups to fetch and offer. The others are counted as refused."""
        wanted: list[ScoredGroup] = []
        for scored in groups:
            reason = self._refusal(scored.generated.group_id)
            if reason is None:
                wanted.append(scored)
                self._fetching.add(scored.generated.group_id)
            else:
                self._issued.refuse(_drop(scored, reason))
        self._unsettled[sequence] = {scored.generated.group_id for scored in wanted}
        return wanted

    def offer(self, groups: Iterable[ReadyGroup]) -> None:
        """Hand fetched groups to the batcher, and drop those it rejects."""
        offered = list(groups)
        self._close([drop for group in offered if (drop := self._batcher.offer(group)) is not None])
        self._fetching.difference_update(group.group_id for group in offered)
        self._settle(self._batcher.take_retired())

    def drop_unreadable(
        self, sequence: int, wanted: Iterable[ScoredGroup], reason: DropReason = DropReason.UNREADABLE
    ) -> None:
        """Drop groups whose pack cannot be read; the caller moves their message to the dead letters.

        A group that an earlier session trained and kept for another use is closed already: it is only not used again.
        """
        del self._unsettled[sequence]
        self._fetching.difference_update(scored.generated.group_id for scored in wanted)
        new = [scored for scored in wanted if not self._batcher.cancel_reuse(scored.generated.group_id)]
        self._close([_drop(scored, reason) for scored in new])

    def overtakes(self, version: PolicyVersion) -> bool:
        """Return True if a batch taken at ``version`` now would leave behind groups that may be too old for every later one.

        They are under way, as is a group whose pack is being read. False while there is no full batch.
        """
        return self._batcher.is_full(version) and self._issued.is_late(version, self._batcher.holds)

    def take(self, version: PolicyVersion) -> list[ReadyGroup]:
        """Return the batch to train at ``version``, or nothing while it is not full; drop what is too old."""
        batch, drops = self._batcher.take(version)
        self._close(drops)
        self._settle(self._batcher.take_retired())
        return batch

    def mark_trained(self, group_ids: Sequence[str]) -> None:
        """Settle the groups of a batch that was trained and is in the ledger.

        The message of a group that is kept for another use stays unsettled until the group is retired.
        """
        self._batcher.settle()
        self._settle([group_id for group_id in group_ids if not self._batcher.holds(group_id)])

    def close(self) -> None:
        """Settle the groups that are kept for another use, after the last batch of the run."""
        self._batcher.close()
        self._settle(self._batcher.take_retired())

    def settled(self) -> list[int]:
        """Return the messages that a checkpoint taken now covers."""
        return [sequence for sequence, left in self._unsettled.items() if not left]

    def forget(self, sequences: Iterable[int]) -> None:
        """Remove messages that were acknowledged."""
        for sequence in sequences:
            self._unsettled.pop(sequence, None)

    def missing(self) -> list[str]:
        """Return the outstanding groups that have not arrived."""
        return [group_id for group_id in self._issued.outstanding() if not self._has_arrived(group_id)]

    @property
    def is_drained(self) -> bool:
        """True when every outstanding group has arrived, and none is being read."""
        return not self._fetching and not self.missing()

    def drop_missing(self) -> list[str]:
        """Drop what is missing with reason ``lost``; return the ids."""
        missing = self.missing()
        self._close([Drop(group_id, DropReason.LOST, 0) for group_id in missing])
        return missing

    def dead_letter(self, letter: DeadLetter, sequence: int) -> int:
        """Drop the outstanding groups of a dead letter, except those that arrived all the same; return their number."""
        dead = set(self._issued.outstanding()) & set(letter.group_ids)
        # The trainer's own letter, read again after a crash: the object of the next attempt may be readable.
        reason = DropReason.UNREADABLE if letter.stage == _OWN_STAGE else DropReason.DEAD
        if letter.reason == ReaderKilled.__name__:  # perhaps not its fault: the prompt is issued again
            reason = DropReason.QUARANTINED
        drops = [Drop(group_id, reason, 0) for group_id in sorted(dead) if not self._has_arrived(group_id)]
        self._issued.drop_dead(drops, sequence)
        self.dropped.update(drop.reason for drop in drops)
        self._settle([drop.group_id for drop in drops])
        return len(drops)

    def _refusal(self, group_id: str) -> DropReason | None:
        if self._batcher.is_returning(group_id):
            return None if group_id not in self._fetching else DropReason.DUPLICATE
        try:
            spent = group_id in self._fetching or self._batcher.is_spent(group_id)
            wanted = not spent and self._issued.accept(group_id, self._has_arrived)
        except ValueError:
            return DropReason.FOREIGN
        return None if wanted else DropReason.DUPLICATE

    def _has_arrived(self, group_id: str) -> bool:
        return group_id in self._fetching or self._batcher.holds(group_id)

    def _close(self, drops: Sequence[Drop]) -> None:
        for drop in drops:
            self._issued.drop(drop)
        self.dropped.update(drop.reason for drop in drops)
        self._settle([drop.group_id for drop in drops])

    def _settle(self, group_ids: Sequence[str]) -> None:
        if not group_ids:
            return
        closed = set(group_ids)
        for left in self._unsettled.values():
            if not left.isdisjoint(closed):
                left -= closed


def _drop(scored: ScoredGroup, reason: DropReason) -> Drop:
    abandoned = scored.generated.abandoned
    return Drop(scored.generated.group_id, reason, claimed_tokens(scored), abandoned=abandoned)
