"""The account of every group: issued once, then used or dropped once; what each chapter of the record tells.

`Counters` counts for people, this is the book that an audit proves: issued = used + dropped + in flight, by id.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from penstock.protocol.facts import Split
from penstock.protocol.record.lineage import AccountState, DroppedGroup, EvaluatedGroup, SplitTotals
from penstock.trainer.groups.batcher import Drop
from penstock.trainer.groups.drops import DropReason

SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, slots=True)
class Entries:
    """What happened since the entries before, and where everything stands after it."""

    issued: dict[Split, tuple[str, ...]]
    revived: tuple[str, ...]
    dropped: tuple[DroppedGroup, ...]
    evaluated: tuple[EvaluatedGroup, ...]
    account: AccountState

    @property
    def is_empty(self) -> bool:
        """Whether nothing was issued, dropped, revived or evaluated."""
        return not (any(self.issued.values()) or self.revived or self.dropped or self.evaluated)


@dataclass(slots=True)
class _Book:
    totals: SplitTotals
    in_flight: set[str]
    issued: list[str] = field(default_factory=list)
    revived: list[str] = field(default_factory=list)
    dropped: list[DroppedGroup] = field(default_factory=list)
    evaluated: list[EvaluatedGroup] = field(default_factory=list)


class Accounting:
    """One book for each split; thread-safe. Every method raises ValueError for a group that breaks the account."""

    def __init__(self, state: AccountState | None = None) -> None:
        """Start empty, or where a checkpoint ended."""
        state = state or AccountState()
        self._books: dict[Split, _Book] = {
            split: _Book(state.totals.get(split, SplitTotals()), set(state.in_flight.get(split, ())))
            for split in SPLITS
        }
        self._lock = threading.Lock()

    def in_flight(self, split: Split) -> frozenset[str]:
        """Return the ids that are issued and not closed."""
        with self._lock:
            return frozenset(self._books[split].in_flight)

    def issue(self, split: Split, group_ids: Iterable[str]) -> None:
        """Open groups."""
        with self._lock:
            book = self._books[split]
            before = len(book.issued)
            for group_id in group_ids:
                if group_id in book.in_flight:
                    raise ValueError(f"group {group_id} is issued already")
                book.in_flight.add(group_id)
                book.issued.append(group_id)
            issued = book.totals.issued + len(book.issued) - before
            book.totals = book.totals.model_copy(update={"issued": issued})

    def use(self, split: Split, tokens: Mapping[str, int]) -> None:
        """Close groups that were trained or evaluated; ``tokens`` are sampled tokens by id."""
        with self._lock:
            book = self._books[split]
            for group_id, num_tokens in tokens.items():
                self._close(book, group_id)
                if split == "eval":
                    book.evaluated.append(EvaluatedGroup(group_id=group_id, num_tokens=num_tokens))
            totals = book.totals
            book.totals = totals.model_copy(
                update={"used": totals.used + len(tokens), "used_tokens": totals.used_tokens + sum(tokens.values())}
            )

    def drop(self, split: Split, drop: Drop) -> None:
        """Close a group that is not used."""
        with self._lock:
            book = self._books[split]
            self._close(book, drop.group_id)
            reason, tokens = str(drop.reason), drop.num_tokens
            book.dropped.append(DroppedGroup(group_id=drop.group_id, split=split, reason=reason, num_tokens=tokens))
            totals = book.totals
            book.totals = totals.model_copy(
                update={
                    "dropped": _plus(totals.dropped, reason, 1),
                    "dropped_tokens": _plus(totals.dropped_tokens, reason, tokens),
                }
            )

    def revive(self, group_id: str) -> None:
        """Open a training group again that was dropped as dead, without tokens: its dead letter was sent again."""
        with self._lock:
            book = self._books["train"]
            if group_id in book.in_flight:
                raise ValueError(f"group {group_id} is in flight; it cannot come back from the dead letters")
            told = [drop for drop in book.dropped if drop.group_id == group_id]
            if told:
                book.dropped.remove(told[-1])
            else:
                book.revived.append(group_id)
            book.in_flight.add(group_id)
            dead = str(DropReason.DEAD)
            book.totals = book.totals.model_copy(update={"dropped": _plus(book.totals.dropped, dead, -1)})

    def refuse(self, split: Split, drop: Drop) -> None:
        """Count a delivery of a group that is closed already, or was never issued: it changes no group."""
        with self._lock:
            book = self._books[split]
            totals = book.totals
            book.totals = totals.model_copy(
                update={
                    "refused": _plus(totals.refused, str(drop.reason), 1),
                    "refused_tokens": _plus(totals.refused_tokens, str(drop.reason), drop.num_tokens),
                }
            )

    def take_entries(self) -> Entries:
        """Return what happened since the last call: what the next chapter tells."""
        with self._lock:
            books = self._books
            issued: dict[Split, tuple[str, ...]] = {s: tuple(book.issued) for s, book in books.items() if book.issued}
            in_flight: dict[Split, tuple[str, ...]] = {s: tuple(sorted(book.in_flight)) for s, book in books.items()}
            totals: dict[Split, SplitTotals] = {
                s: book.totals.model_copy(update={"in_flight": len(book.in_flight)}) for s, book in books.items()
            }
            entries = Entries(
                issued=issued,
                revived=tuple(books["train"].revived),
                dropped=tuple(drop for book in books.values() for drop in book.dropped),
                evaluated=tuple(books["eval"].evaluated),
                account=AccountState(totals=totals, in_flight=in_flight),
            )
            for book in self._books.values():
                book.issued, book.revived, book.dropped, book.evaluated = [], [], [], []
            return entries

    @staticmethod
    def _close(book: _Book, group_id: str) -> None:
        if group_id not in book.in_flight:
            raise ValueError(f"group {group_id} is not in flight; it was closed before, or never issued")
        book.in_flight.discard(group_id)


def _plus(counts: Mapping[str, int], reason: str, number: int) -> dict[str, int]:
    return {**counts, reason: counts.get(reason, 0) + number}
