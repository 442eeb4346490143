"""Fold the chapters of a run into what became of every group, and name every group that breaks the account; pure.

Issued once, then closed once: trained (or, held-out, evaluated) or dropped with a reason; until then in flight.
Only a dead letter that is sent again opens a group once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from penstock.protocol.facts import BlobRef, Split
from penstock.protocol.record.lineage import LineageChapter, RecordedStep, SplitTotals

SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, slots=True)
class Breach:
    """One thing that must not be: ``group_id`` is empty when it is about no single group."""

    kind: str
    group_id: str
    detail: str


@dataclass(slots=True)
class Book:
    """One split: where every issued group went."""

    issued: set[str] = field(default_factory=set)
    used: dict[str, str] = field(default_factory=dict)  # id -> which step or evaluation
    dropped: dict[str, str] = field(default_factory=dict)  # id -> reason
    used_tokens: int = 0
    dropped_tokens: Counter[str] = field(default_factory=Counter)

    @property
    def in_flight(self) -> set[str]:
        """Issued and not closed."""
        return self.issued - self.used.keys() - self.dropped.keys()

    def totals(self, in_flight: int) -> SplitTotals:
        """The same in numbers."""
        return SplitTotals(
            issued=len(self.issued),
            used=len(self.used),
            used_tokens=self.used_tokens,
            dropped=dict(Counter(self.dropped.values())),
            dropped_tokens=dict(self.dropped_tokens),
            in_flight=in_flight,
        )


class RecordFold:
    """The record up to its last chapter."""

    def __init__(self, chapters: Iterable[LineageChapter]) -> None:
        """Fold chapters, the oldest first."""
        self.books: dict[Split, Book] = {split: Book() for split in SPLITS}
        self.breaches: list[Breach] = []
        self.packs: dict[str, BlobRef] = {}
        self.groups_of_pack: dict[str, list[str]] = {}
        self.steps: list[RecordedStep] = []
        self.last: LineageChapter | None = None
        self._version: int | None = None
        self.uses: Counter[str] = Counter()  # of trained groups; above 1 only by design, and told as such
        for chapter in chapters:
            self._fold(chapter)
            self.last = chapter

    def _breach(self, kind: str, group_id: str, detail: str) -> None:
        self.breaches.append(Breach(kind, group_id, detail))

    def _fold(self, chapter: LineageChapter) -> None:
        where = f"chapter {chapter.number}"
        expected = self.last.number + 1 if self.last else 1
        if chapter.number != expected:
            self._breach("record broken", "", f"expected chapter {expected}, found {chapter.number}")
        for split, ids in chapter.issued.items():
            for group_id in ids:
                if group_id in self.books[split].issued:
                    self._breach("issued twice", group_id, where)
                self.books[split].issued.add(group_id)
        self._revive(chapter)
        for life in chapter.lives:
            self._version = life.version
        for step in chapter.steps:
            self._fold_step(step)
        for evaluated in chapter.evaluated:
            book = self.books["eval"]
            self._close("eval", evaluated.group_id, where)
            book.used[evaluated.group_id] = where
            book.used_tokens += evaluated.num_tokens
        for drop in chapter.dropped:
            book = self.books[drop.split]
            self._close(drop.split, drop.group_id, where, drop.reason)
            book.dropped[drop.group_id] = drop.reason
            book.dropped_tokens[drop.reason] += drop.num_tokens
        self._compare(chapter, where)

    def _revive(self, chapter: LineageChapter) -> None:
        """Open groups again whose dead letters were sent again."""
        dropped = self.books["train"].dropped
        for group_id in chapter.revived:
            if dropped.pop(group_id, "") != "dead":
                self._breach("revived but not dead", group_id, f"chapter {chapter.number}")

    def _fold_step(self, step: RecordedStep) -> None:
        last = self.steps[-1] if self.steps else None
        expected = last.step + 1 if last else 1
        if step.step != expected:
            self._breach("record broken", "", f"step {expected} is missing, step {step.step} comes next")
        if step.trained_version != self._version:
            self._breach("record broken", "", f"step {step.step} trained {step.trained_version}, not {self._version}")
        self._version = step.made_version
        book = self.books["train"]
        for group in step.groups:
            pack = step.packs[group.pack] if group.pack < len(step.packs) else None
            if pack is None or self.packs.setdefault(pack.key, pack) != pack:
                self._breach("pack unclear", group.group_id, f"step {step.step} names it in two ways, or not at all")
            else:
                self.groups_of_pack.setdefault(pack.key, []).append(group.group_id)
            self.uses[group.group_id] += 1
            if group.use > 1:
                if group.use != self.uses[group.group_id]:
                    self._breach("reuse unclear", group.group_id, f"step {step.step} calls it use {group.use}")
                continue
            self._close("train", group.group_id, f"step {step.step}")
            book.used[group.group_id] = f"step {step.step}"
            book.used_tokens += group.num_tokens
        self.steps.append(step)

    def _close(self, split: Split, group_id: str, where: str, reason: str | None = None) -> None:
        """Note what is wrong with closing a group: as used, or as dropped for a reason."""
        book, use = self.books[split], "trained" if split == "train" else "evaluated"
        if group_id not in book.issued:
            self._breach(f"{'dropped' if reason else use} but never issued", group_id, where)
        earlier_use, earlier_drop = book.used.get(group_id), book.dropped.get(group_id)
        if earlier_use and not reason:
            self._breach(f"{use} twice", group_id, f"{earlier_use} and {where}")
        elif earlier_drop and reason:
            self._breach("dropped twice", group_id, f"as {earlier_drop}, and as {reason} in {where}")
        elif earlier_use or earlier_drop:
            other = "a dead letter" if (reason or earlier_drop) == "dead" else "dropped"
            self._breach(
                f"{use} and also {other}", group_id, f"{earlier_use or earlier_drop} and {reason or ''} {where}"
            )

    def _compare(self, chapter: LineageChapter, where: str) -> None:
        """Hold what the trainer counted against what its own record adds up to."""
        for split, book in self.books.items():
            recorded = set(chapter.account.in_flight.get(split, ()))
            for group_id in sorted(book.in_flight - recorded):
                self._breach("issued and nowhere", group_id, f"{where}: neither closed nor in flight")
            for group_id in sorted(recorded - book.in_flight):
                self._breach("in flight but closed", group_id, f"{where}: closed, or never issued")
            said = chapter.account.totals.get(split, SplitTotals())
            added = book.totals(len(recorded))
            for name, value in _figures(said).items():
                if value != _figures(added)[name]:
                    self._breach(
                        "totals differ",
                        "",
                        f"{where}, {split}: {name}: counted {value}, recorded {_figures(added)[name]}",
                    )
        steps = self.steps[-1].step if self.steps else 0
        if chapter.step != steps:
            self._breach("record broken", "", f"{where} ends at step {chapter.step}, its last step is {steps}")


def _figures(totals: SplitTotals) -> Mapping[str, object]:
    return {
        "issued": totals.issued,
        "used": totals.used,
        "used tokens": totals.used_tokens,
        "dropped": {reason: n for reason, n in totals.dropped.items() if n},
        "dropped tokens": {reason: n for reason, n in totals.dropped_tokens.items() if n},
        "in flight": totals.in_flight,
    }
