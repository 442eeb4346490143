"""Accounting by group id: every group is issued once, then used or dropped once.

An audit checks what this writes: issued = used + dropped + in flight, id by id. `Counters` reads its sums from here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import get_args

from penstock.protocol.facts import AbandonedCompletion, BlobRef, Split
from penstock.protocol.record.lineage import AccountState, DroppedGroup, EvaluatedGroup, SplitTotals
from penstock.trainer.groups.drops import Drop, DropReason

SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, slots=True)
class Entries:
    """What happened since the previous entries, and the resulting state."""

    issued: dict[Split, tuple[str, ...]]
    reopened: tuple[str, ...]  # stored in the chapter as ``revived``
    dropped: tuple[DroppedGroup, ...]
    evaluated: tuple[EvaluatedGroup, ...]
    closed_packs: tuple[BlobRef, ...]  # of the dropped and evaluated groups, which hold their numbers
    account: AccountState

    @property
    def is_empty(self) -> bool:
        """Whether nothing was issued, dropped, reopened or evaluated."""
        return not (any(self.issued.values()) or self.reopened or self.dropped or self.evaluated)


@dataclass(slots=True)
class _SplitAccount:
    totals: SplitTotals  # of the whole run; its ``in_flight`` is filled in by `Accounting.totals`
    in_flight: set[str]
    issued: list[str] = field(default_factory=list)  # this and the following: since the last entries
    reopened: list[str] = field(default_factory=list)
    dropped: list[Drop] = field(default_factory=list)
    evaluated: list[tuple[EvaluatedGroup, BlobRef | None]] = field(default_factory=list)


class Accounting:
    """One account per split; thread-safe. Methods that open or close a group raise ValueError when it is not closed or open."""

    def __init__(self, state: AccountState | None = None) -> None:
        """Start empty, or from the state in a checkpoint."""
        state = state or AccountState()
        self._splits: dict[Split, _SplitAccount] = {
            split: _SplitAccount(state.totals.get(split, SplitTotals()), set(state.in_flight.get(split, ())))
            for split in SPLITS
        }
        self._lock = threading.Lock()

    def in_flight(self, split: Split) -> frozenset[str]:
        """Return the ids that are issued and not closed."""
        with self._lock:
            return frozenset(self._splits[split].in_flight)

    def totals(self, split: Split) -> SplitTotals:
        """Return the sums of the whole run."""
        with self._lock:
            return self._totals(split)

    def issue(self, split: Split, group_ids: Iterable[str]) -> None:
        """Open groups."""
        with self._lock:
            account = self._splits[split]
            before = len(account.issued)
            for group_id in group_ids:
                if group_id in account.in_flight:
                    raise ValueError(f"group {group_id} is issued already")
                account.in_flight.add(group_id)
                account.issued.append(group_id)
            issued = account.totals.issued + len(account.issued) - before
            account.totals = account.totals.model_copy(update={"issued": issued})

    def use(
        self,
        split: Split,
        tokens: Mapping[str, int],
        packs: Mapping[str, BlobRef] = MappingProxyType({}),
        *,
        abandoned: Iterable[AbandonedCompletion] = (),
    ) -> None:
        """Close groups that were trained or evaluated.

        Args:
            split: Of all of them.
            tokens: Sampled tokens by id.
            packs: The packs of evaluated groups by id; those of trained groups are recorded with their step.
            abandoned: Their completions that were started and not kept.
        """
        with self._lock:
            account = self._splits[split]
            for group_id, num_tokens in tokens.items():
                self._close(account, group_id)
                if split == "eval":
                    evaluated = EvaluatedGroup(group_id=group_id, num_tokens=num_tokens)
                    account.evaluated.append((evaluated, packs.get(group_id)))
            totals = _plus_abandoned(account.totals, abandoned)
            account.totals = totals.model_copy(
                update={"used": totals.used + len(tokens), "used_tokens": totals.used_tokens + sum(tokens.values())}
            )

    def drop(self, split: Split, drop: Drop) -> None:
        """Close a group that is not used."""
        with self._lock:
            account = self._splits[split]
            self._close(account, drop.group_id)
            reason, tokens = str(drop.reason), drop.num_tokens
            account.dropped.append(drop)
            totals = _plus_abandoned(account.totals, drop.abandoned)
            account.totals = totals.model_copy(
                update={
                    "dropped": _plus(totals.dropped, reason, 1),
                    "dropped_tokens": _plus(totals.dropped_tokens, reason, tokens),
                }
            )

    def reopen(self, group_id: str) -> None:
        """Open a training group again that was dropped as ``dead``, without tokens: its dead letter was sent again."""
        with self._lock:
            account = self._splits["train"]
            if group_id in account.in_flight:
                raise ValueError(f"group {group_id} is in flight; it cannot be reopened")
            unwritten = [drop for drop in account.dropped if drop.group_id == group_id]
            if unwritten:
                account.dropped.remove(unwritten[-1])
            else:
                account.reopened.append(group_id)
            account.in_flight.add(group_id)
            dead = str(DropReason.DEAD)
            account.totals = account.totals.model_copy(update={"dropped": _plus(account.totals.dropped, dead, -1)})

    def refuse(self, split: Split, drop: Drop) -> None:
        """Count a delivery of a group that is closed already or was never issued; no group changes."""
        with self._lock:
            account = self._splits[split]
            totals = account.totals
            account.totals = totals.model_copy(
                update={
                    "refused": _plus(totals.refused, str(drop.reason), 1),
                    "refused_tokens": _plus(totals.refused_tokens, str(drop.reason), drop.num_tokens),
                }
            )

    def take_entries(self) -> Entries:
        """Return what happened since the last call, for the next chapter of the record."""
        with self._lock:
            splits = self._splits
            issued: dict[Split, tuple[str, ...]] = {s: tuple(a.issued) for s, a in splits.items() if a.issued}
            in_flight: dict[Split, tuple[str, ...]] = {s: tuple(sorted(a.in_flight)) for s, a in splits.items()}
            packs = _PackNumbers()
            entries = Entries(
                issued=issued,
                reopened=tuple(splits["train"].reopened),
                dropped=tuple(
                    DroppedGroup(
                        group_id=drop.group_id,
                        split=split,
                        reason=str(drop.reason),
                        num_tokens=drop.num_tokens,
                        pack=packs.number(drop.pack),
                        abandoned=drop.abandoned,
                    )
                    for split, account in splits.items()
                    for drop in account.dropped
                ),
                evaluated=tuple(
                    group.model_copy(update={"pack": packs.number(pack)}) for group, pack in splits["eval"].evaluated
                ),
                closed_packs=packs.listed(),
                account=AccountState(totals={split: self._totals(split) for split in splits}, in_flight=in_flight),
            )
            for account in splits.values():
                account.issued, account.reopened, account.dropped, account.evaluated = [], [], [], []
            return entries

    def _totals(self, split: Split) -> SplitTotals:
        account = self._splits[split]
        return account.totals.model_copy(update={"in_flight": len(account.in_flight)})

    @staticmethod
    def _close(account: _SplitAccount, group_id: str) -> None:
        if group_id not in account.in_flight:
            raise ValueError(f"group {group_id} is not in flight; it was closed before, or never issued")
        account.in_flight.discard(group_id)


class _PackNumbers:
    """Numbers the packs of one chapter in the order in which they are named."""

    def __init__(self) -> None:
        self._numbers: dict[BlobRef, int] = {}

    def number(self, pack: BlobRef | None) -> int | None:
        return None if pack is None else self._numbers.setdefault(pack, len(self._numbers))

    def listed(self) -> tuple[BlobRef, ...]:
        return tuple(self._numbers)


def _plus_abandoned(totals: SplitTotals, abandoned: Iterable[AbandonedCompletion]) -> SplitTotals:
    counts, tokens = dict(totals.abandoned), dict(totals.abandoned_tokens)
    for one in abandoned:
        counts[one.reason] = counts.get(one.reason, 0) + 1
        tokens[one.reason] = tokens.get(one.reason, 0) + one.num_tokens
    return totals.model_copy(update={"abandoned": counts, "abandoned_tokens": tokens}) if counts else totals


def _plus(counts: Mapping[str, int], reason: str, number: int) -> dict[str, int]:
    return {**counts, reason: counts.get(reason, 0) + number}
