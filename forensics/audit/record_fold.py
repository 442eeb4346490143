"""Fold the chapters of a run's record into the state of every group, and list every violation; pure.

A group is issued once, then closed once: trained (or, held-out, evaluated) or dropped with a reason; until then it is
in flight. Only a dead letter that is sent again reopens a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from penstock.protocol.groups import AbandonedCompletion, BlobRef, Split
from penstock.protocol.record.lineage import DroppedGroup, EvaluatedGroup, LineageChapter, RecordedStep, SplitTotals

SPLITS: tuple[Split, ...] = get_args(Split)
_NEVER_VERIFIED = frozenset({"unreadable", "quarantined"})  # reasons for which the trainer had no readable pack


@dataclass(frozen=True, slots=True)
class Breach:
    """One violation of the accounting; ``group_id`` is empty when it concerns no single group."""

    kind: str
    group_id: str
    detail: str


@dataclass(slots=True)
class SplitAccount:
    issued: set[str] = field(default_factory=set)
    used: dict[str, str] = field(default_factory=dict)  # id -> which step or evaluation
    dropped: dict[str, str] = field(default_factory=dict)  # id -> reason
    used_tokens: int = 0
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    abandoned: Counter[str] = field(default_factory=Counter)  # completions of used and dropped groups, by reason
    abandoned_tokens: Counter[str] = field(default_factory=Counter)

    @property
    def in_flight(self) -> set[str]:
        """Issued and not closed."""
        return self.issued - self.used.keys() - self.dropped.keys()

    def totals(self, in_flight: int) -> SplitTotals:
        return SplitTotals(
            issued=len(self.issued),
            used=len(self.used),
            used_tokens=self.used_tokens,
            dropped=dict(Counter(self.dropped.values())),
            dropped_tokens=dict(self.dropped_tokens),
            abandoned=dict(self.abandoned),
            abandoned_tokens=dict(self.abandoned_tokens),
            in_flight=in_flight,
        )

    def add_abandoned(self, completions: Iterable[AbandonedCompletion]) -> None:
        for completion in completions:
            self.abandoned[completion.reason] += 1
            self.abandoned_tokens[completion.reason] += completion.num_tokens


class RecordFold:
    """The record up to its last chapter."""

    def __init__(self, chapters: Iterable[LineageChapter]) -> None:
        self.accounts: dict[Split, SplitAccount] = {split: SplitAccount() for split in SPLITS}
        self.breaches: list[Breach] = []
        self.packs: dict[str, BlobRef] = {}
        self.groups_of_pack: dict[str, list[str]] = {}
        self.used_packs: set[str] = set()  # keys of packs of trained groups; the others may expire
        self.without_pack = 0  # evaluated and dropped groups whose pack is not recorded
        self.steps: list[RecordedStep] = []
        self.last: LineageChapter | None = None
        self._version: int | None = None
        self.uses: Counter[str] = Counter()  # of trained groups; above 1 only where the record marks a reuse
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
                if group_id in self.accounts[split].issued:
                    self._breach("issued twice", group_id, where)
                self.accounts[split].issued.add(group_id)
        self._reopen(chapter)
        for session in chapter.lives:
            self._version = session.version
        for step in chapter.steps:
            self._fold_step(step)
        for evaluated in chapter.evaluated:
            account = self.accounts["eval"]
            self._close("eval", evaluated.group_id, where)
            account.used[evaluated.group_id] = where
            account.used_tokens += evaluated.num_tokens
            self._fold_closed(chapter, evaluated)
        for drop in chapter.dropped:
            account = self.accounts[drop.split]
            self._close(drop.split, drop.group_id, where, drop.reason)
            account.dropped[drop.group_id] = drop.reason
            account.dropped_tokens[drop.reason] += drop.num_tokens
            account.add_abandoned(drop.abandoned)
            self._fold_closed(chapter, drop)
        self._compare(chapter, where)

    def _fold_closed(self, chapter: LineageChapter, group: EvaluatedGroup | DroppedGroup) -> None:
        """Add the pack of a group that is closed without being trained."""
        if group.pack is None:
            unread = isinstance(group, DroppedGroup) and (not group.num_tokens or group.reason in _NEVER_VERIFIED)
            self.without_pack += not unread
        else:
            pack = chapter.closed_packs[group.pack] if group.pack < len(chapter.closed_packs) else None
            self._add_pack(pack, group.group_id, f"chapter {chapter.number}")

    def _add_pack(self, pack: BlobRef | None, group_id: str, where: str) -> None:
        if pack is None or self.packs.setdefault(pack.key, pack) != pack:
            self._breach("pack unclear", group_id, f"{where} names two packs for it, or none")
        else:
            self.groups_of_pack.setdefault(pack.key, []).append(group_id)

    def _reopen(self, chapter: LineageChapter) -> None:
        """Reopen groups whose dead letters were sent again."""
        dropped = self.accounts["train"].dropped
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
        account = self.accounts["train"]
        for group in step.groups:
            pack = step.packs[group.pack] if group.pack < len(step.packs) else None
            self._add_pack(pack, group.group_id, f"step {step.step}")
            self.used_packs.update(() if pack is None else (pack.key,))
            self.uses[group.group_id] += 1
            if group.use > 1:
                if group.use != self.uses[group.group_id]:
                    self._breach("reuse unclear", group.group_id, f"step {step.step} records it as use {group.use}")
                continue
            self._close("train", group.group_id, f"step {step.step}")
            account.used[group.group_id] = f"step {step.step}"
            account.used_tokens += group.num_tokens
            account.add_abandoned(group.scored.generated.abandoned)
        self.steps.append(step)

    def _close(self, split: Split, group_id: str, where: str, reason: str | None = None) -> None:
        """Record violations of closing a group as used, or as dropped for ``reason``."""
        account, use = self.accounts[split], "trained" if split == "train" else "evaluated"
        if group_id not in account.issued:
            self._breach(f"{'dropped' if reason else use} but never issued", group_id, where)
        earlier_use, earlier_drop = account.used.get(group_id), account.dropped.get(group_id)
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
        """Compare the totals that the trainer counted with the sums of its record."""
        for split, account in self.accounts.items():
            recorded = set(chapter.account.in_flight.get(split, ()))
            for group_id in sorted(account.in_flight - recorded):
                self._breach("issued and nowhere", group_id, f"{where}: neither closed nor in flight")
            for group_id in sorted(recorded - account.in_flight):
                self._breach("in flight but closed", group_id, f"{where}: closed, or never issued")
            counted = chapter.account.totals.get(split, SplitTotals())
            summed = account.totals(len(recorded))
            for name, value in _counts(counted).items():
                if value != _counts(summed)[name]:
                    self._breach(
                        "totals differ",
                        "",
                        f"{where}, {split}: {name}: counted {value}, recorded {_counts(summed)[name]}",
                    )
        steps = self.steps[-1].step if self.steps else 0
        if chapter.step != steps:
            self._breach("record broken", "", f"{where} ends at step {chapter.step}, its last step is {steps}")


def _counts(totals: SplitTotals) -> Mapping[str, object]:
    return {
        "issued": totals.issued,
        "used": totals.used,
        "used tokens": totals.used_tokens,
        "dropped": {reason: n for reason, n in totals.dropped.items() if n},
        "dropped tokens": {reason: n for reason, n in totals.dropped_tokens.items() if n},
        "abandoned completions": dict(totals.abandoned),
        "abandoned tokens": dict(totals.abandoned_tokens),
        "in flight": totals.in_flight,
    }
