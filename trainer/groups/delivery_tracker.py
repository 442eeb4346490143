"""What has arrived and is not settled yet: the collector's decisions, without its threads and doors.

A message is settled when each of its groups was trained, dropped, or refused as it came. Only then may a
checkpoint cover it, and only after that checkpoint may it be acknowledged.

```
receive ──▶ wanted ──fetched──▶ offer ──▶ take ──▶ trained ──▶ settled ──checkpoint──▶ acknowledged
   └▶ refused (twice, foreign)     └▶ dropped  └▶ dropped: stale
```
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from penstock.protocol.facts import DeadLetter, ScoredGroup
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.groups.batcher import Batcher, Drop
from penstock.trainer.groups.drops import DropReason
from penstock.trainer.learner.step_plan import ReadyGroup

_OWN_STAGE = "scored"


class Issued(Protocol):
    """Whoever issued the groups: knows which are outstanding and issues dropped ones again."""

    def outstanding(self) -> Collection[str]:
        """Ids issued and neither trained nor dropped."""
        ...

    def expects(self, group_id: str, holds: Callable[[str], bool]) -> bool:
        """Take note of a group that arrived; False when it must not be used. Raises ValueError for a foreign id."""
        ...

    def in_last_chance(self, version: PolicyVersion) -> Collection[str]:
        """Ids outstanding that may be too old for every step after the one at ``version``."""
        ...

    def dropped(self, drop: Drop) -> None:
        """Take a group out of what is outstanding; whether its prompt comes again is decided there."""
        ...

    def refused(self, drop: Drop) -> None:
        """Count a group that came although nobody waits for it: twice, or from an earlier life."""
        ...

    def read_letter(self, drops: Sequence[Drop], sequence: int) -> None:
        """Drop what a dead letter is about, and note as one act that the letters are read up to ``sequence``."""
        ...


class DeliveryTracker:
    """Messages by their sequence number, and what is left of them. Not thread-safe: its owner locks."""

    def __init__(self, batcher: Batcher, issued: Issued) -> None:
        """Start empty; ``batcher`` is owned by this intake from now on."""
        self._batcher = batcher
        self._issued = issued
        self._unsettled: dict[int, set[str]] = {}  # groups neither trained nor dropped, by message
        self._fetching: set[str] = set()  # wanted, and not offered yet: as good as here

    @property
    def num_ready(self) -> int:
        """Groups that could be trained, were they all fresh."""
        return self._batcher.num_ready

    def receive(self, sequence: int, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Take in a message; returns the groups that are wanted, to be fetched and offered. The others are counted."""
        wanted: list[ScoredGroup] = []
        for scored in groups:
            reason = self._refusal(scored.generated.group_id)
            if reason is None:
                wanted.append(scored)
                self._fetching.add(scored.generated.group_id)
            else:
                self._issued.refused(_drop(scored, reason))
        self._unsettled[sequence] = {scored.generated.group_id for scored in wanted}
        return wanted

    def offer(self, groups: Iterable[ReadyGroup]) -> None:
        """Take in groups that were fetched."""
        offered = list(groups)
        self._close([drop for group in offered if (drop := self._batcher.offer(group)) is not None])
        self._fetching.difference_update(group.group_id for group in offered)
        self._settle(self._batcher.retired())

    def unreadable(self, sequence: int, wanted: Iterable[ScoredGroup]) -> None:
        """Drop groups whose pack cannot be read; their message ends among the dead letters.

        One that an earlier life had trained, and that was to be used again, was closed then: it is only not used again.
        """
        del self._unsettled[sequence]
        self._fetching.difference_update(scored.generated.group_id for scored in wanted)
        new = [scored for scored in wanted if not self._batcher.lets_go(scored.generated.group_id)]
        self._close([_drop(scored, DropReason.UNREADABLE) for scored in new])

    def overtaken(self, version: PolicyVersion) -> list[str]:
        """Return the groups still under way that a batch taken at ``version`` now would overtake for good.

        They may be too old for the batch after it. One whose pack is being read is still under way. Empty as long as
        there is no batch to be taken.
        """
        if not self._batcher.is_full(version):
            return []
        return [group_id for group_id in self._issued.in_last_chance(version) if not self._batcher.holds(group_id)]

    def take(self, version: PolicyVersion) -> list[ReadyGroup]:
        """Return the batch to train at ``version``; empty when it is not full yet. What is too old is dropped."""
        batch, drops = self._batcher.take(version)
        self._close(drops)
        self._settle(self._batcher.retired())
        return batch

    def trained(self, group_ids: Sequence[str]) -> None:
        """Say that a batch was trained and is in the ledger.

        The message of a group that is kept, to be used again, stays unsettled until the group is retired.
        """
        self._batcher.settle()
        self._settle([group_id for group_id in group_ids if not self._batcher.holds(group_id)])

    def close(self) -> None:
        """Say that the last batch was trained: groups that are kept, to be used again, are settled."""
        self._batcher.close()
        self._settle(self._batcher.retired())

    def settled(self) -> list[int]:
        """Return the messages that a checkpoint now will cover."""
        return [sequence for sequence, left in self._unsettled.items() if not left]

    def acknowledged(self, sequences: Iterable[int]) -> None:
        """Forget messages that do not come again."""
        for sequence in sequences:
            self._unsettled.pop(sequence, None)

    def missing(self) -> list[str]:
        """Return what is outstanding and neither here nor in use."""
        return [group_id for group_id in self._issued.outstanding() if not self._is_here(group_id)]

    def give_up_missing(self) -> list[str]:
        """Drop what is missing, as lost; returns the ids."""
        missing = self.missing()
        self._close([Drop(group_id, DropReason.LOST, 0) for group_id in missing])
        return missing

    def bury(self, letter: DeadLetter, sequence: int) -> int:
        """Drop what a dead letter is about, unless it is here all the same; returns how many groups that were."""
        dead = set(self._issued.outstanding()) & set(letter.group_ids)
        # our own letter, read again after a crash: the object may be readable for the next attempt
        reason = DropReason.UNREADABLE if letter.stage == _OWN_STAGE else DropReason.DEAD
        drops = [Drop(group_id, reason, 0) for group_id in sorted(dead) if not self._is_here(group_id)]
        self._issued.read_letter(drops, sequence)
        self._settle([drop.group_id for drop in drops])
        return len(drops)

    def _refusal(self, group_id: str) -> DropReason | None:
        if self._batcher.returns(group_id):
            return None if group_id not in self._fetching else DropReason.DUPLICATE
        try:
            spent = group_id in self._fetching or self._batcher.is_spent(group_id)
            wanted = not spent and self._issued.expects(group_id, self._is_here)
        except ValueError:
            return DropReason.FOREIGN
        return None if wanted else DropReason.DUPLICATE

    def _is_here(self, group_id: str) -> bool:
        return group_id in self._fetching or self._batcher.holds(group_id)

    def _close(self, drops: Sequence[Drop]) -> None:
        for drop in drops:
            self._issued.dropped(drop)
        self._settle([drop.group_id for drop in drops])

    def _settle(self, group_ids: Sequence[str]) -> None:
        if not group_ids:
            return
        for left in self._unsettled.values():
            left.difference_update(group_ids)


def _drop(scored: ScoredGroup, reason: DropReason) -> Drop:
    return Drop(scored.generated.group_id, reason, sum(scored.generated.completion_tokens))
