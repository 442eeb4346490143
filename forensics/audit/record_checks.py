"""Fold the chapters of a run's record into the state of every group, compare its steps with their reports.

Pure, but for `from_events` and `from_metrics`, which read the reports.

A group is issued once, then closed once: trained (or, held-out, evaluated) or dropped with a reason; until then it is
in flight. Only a dead letter that is sent again reopens a group.

A report of a step is its event in NATS or its line of `metrics.jsonl`. Both hold a `StepDigest`, which does not change
when the record is rewritten in the object store with all its hashes. Metrics up to the checkpoint are those of exactly
the committed steps. Events are more and fewer: of steps that a crash rolled back, and without those that were not
published or have expired; of them, only the ones with a recorded step's number and epoch are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.protocol import subjects
from penstock.protocol.errors import BusError, WireError
from penstock.protocol.facts import RunEvent, decode
from penstock.protocol.files import read_regular
from penstock.protocol.groups import AbandonedCompletion, BlobRef, Count, Split
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import (
    GROUP_DIGITS,
    STEP_DIGEST,
    DroppedGroup,
    EvaluatedGroup,
    LineageChapter,
    RecordedStep,
    SplitTotals,
    StepDigest,
    group_digest,
    step_digest,
)
from penstock.protocol.transport.bus import Bus

SPLITS: tuple[Split, ...] = get_args(Split)
_NEVER_VERIFIED = frozenset({"unreadable", "quarantined"})  # reasons for which the trainer had no readable pack
DIFFERS = "differs from its report"
_SHOWN_STEPS = 5
METRICS = "metrics.jsonl"
_STEP = "step"


@dataclass(frozen=True, slots=True)
class Breach:
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
    sizes: dict[str, int] = field(default_factory=dict)  # id -> sampled tokens of a closed group, where known

    @property
    def in_flight(self) -> set[str]:
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
            account.sizes.update({drop.group_id: drop.num_tokens} if drop.num_tokens else {})
            account.add_abandoned(drop.abandoned)
            self._fold_closed(chapter, drop)
        self._compare(chapter, where)

    def _fold_closed(self, chapter: LineageChapter, group: EvaluatedGroup | DroppedGroup) -> None:
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
            account.sizes[group.group_id] = group.num_tokens
            account.add_abandoned(group.scored.generated.abandoned)
        self.steps.append(step)

    def _close(self, split: Split, group_id: str, where: str, reason: str | None = None) -> None:
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
            detail = f"{earlier_use or earlier_drop} and {reason or ''} {where}"
            self._breach(f"{use} and also {other}", group_id, detail)

    def _compare(self, chapter: LineageChapter, where: str) -> None:
        for split, account in self.accounts.items():
            recorded = set(chapter.account.in_flight.get(split, ()))
            for group_id in sorted(account.in_flight - recorded):
                self._breach("issued and nowhere", group_id, f"{where}: neither closed nor in flight")
            for group_id in sorted(recorded - account.in_flight):
                self._breach("in flight but closed", group_id, f"{where}: closed, or never issued")
            counted = _counts(chapter.account.totals.get(split, SplitTotals()))
            for name, summed in _counts(account.totals(len(recorded))).items():
                if counted[name] != summed:
                    detail = f"{where}, {split}: {name}: counted {counted[name]}, recorded {summed}"
                    self._breach("totals differ", "", detail)
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


@dataclass(frozen=True, slots=True)
class ReportedSteps:
    source: str  # for people
    digests: Mapping[int, Sequence[StepDigest]] = field(default_factory=dict)  # by number of the step
    steps: frozenset[int] = frozenset()  # all that are reported, also without a digest, by an older build
    is_exact: bool = False  # whether it reports the committed steps and no others
    problems: Sequence[str] = ()  # why it, or a part of it, cannot be read


def check_steps(steps: Sequence[RecordedStep], reports: Sequence[ReportedSteps]) -> tuple[list[Breach], list[str]]:
    """Return each difference, with its step and group, and notes on steps that no source reports."""
    breaches: list[Breach] = []
    notes = [f"{report.source}: {problem}" for report in reports for problem in report.problems]
    unreported = []
    for step in steps:
        groups = _digests(step)
        expected = step_digest(step.epoch, step.step, step.trained_version, step.made_version, groups)
        is_reported = False
        for report in reports:
            digests = report.digests.get(step.step, ())
            of_epoch = [digest for digest in digests if digest.epoch == step.epoch]
            is_reported |= bool(of_epoch)
            for digest in of_epoch:
                if digest != expected:
                    breaches += _differences(step, groups, digest, report.source)
            if report.is_exact and report.steps and not of_epoch and (digests or step.step not in report.steps):
                is_reported = True
                epochs = ", ".join(str(digest.epoch) for digest in digests) or "none"
                recorded = f"step {step.step} of epoch {step.epoch} is recorded"
                detail = f"{recorded}; {report.source} has it of epoch: {epochs}"
                breaches.append(Breach("recorded but not reported", "", detail))
        if not is_reported:
            unreported.append(step.step)
    breaches += _not_recorded(steps, reports)
    if unreported:
        more = ", …" if len(unreported) > _SHOWN_STEPS else ""
        notes.append(
            f"{len(unreported)} of {len(steps)} steps have no digest in an event or metrics.jsonl (made by an older "
            "build, expired, or on another machine): rewards and order of their groups are checked by the record's "
            f"hashes alone: step {', '.join(map(str, unreported[:_SHOWN_STEPS]))}{more}"
        )
    return breaches, notes


def _digests(step: RecordedStep) -> list[str]:
    return [
        group_digest(group.scored, step.packs[group.pack], group.use) if group.pack < len(step.packs) else ""
        for group in step.groups
    ]


def _differences(step: RecordedStep, groups: Sequence[str], reported: StepDigest, source: str) -> list[Breach]:
    """Name the groups that differ; without a list of digests, or where they agree, only the step."""
    short, listed = [digest[:GROUP_DIGITS] for digest in groups], reported.listed()
    where = f"step {step.step}, {source}"
    if not listed or short == listed:
        return [Breach(DIFFERS, "", f"{where}: another epoch, version, number or content than the trainer reported")]
    left = Counter(listed)
    left.subtract(short)
    breaches = []
    for place, (group, digest) in enumerate(zip(step.groups, short, strict=True), start=1):
        if digest not in listed:
            what = "other rewards, lengths, versions or pack than the trainer reported, or another group"
            breaches.append(Breach(DIFFERS, group.group_id, f"{where}, place {place}: {what}"))
        elif len(short) == len(listed) and listed[place - 1] != digest:
            detail = f"{where}, place {place}: it was trained at place {listed.index(digest) + 1}"
            breaches.append(Breach(DIFFERS, group.group_id, detail))
    if len(short) != len(listed):
        missing = [str(place) for place, digest in enumerate(listed, start=1) if left[digest] > 0]
        detail = f"{where}: {len(listed)} groups were trained, {len(short)} are recorded"
        breaches.append(Breach(DIFFERS, "", f"{detail}; not recorded: place {', '.join(missing) or 'none'}"))
    return breaches


def _not_recorded(steps: Sequence[RecordedStep], reports: Sequence[ReportedSteps]) -> list[Breach]:
    recorded = {step.step for step in steps}
    return [
        Breach("reported but not recorded", "", f"step {step} was made before the checkpoint, by {report.source}")
        for report in reports
        if report.is_exact
        for step in sorted(report.steps - recorded)
    ]


class _Report(BaseModel):
    """The fields of a step's event or line that are read here."""

    model_config = ConfigDict(strict=True, extra="ignore")

    step: Count
    digest: StepDigest | None = Field(default=None, alias=STEP_DIGEST)


def from_events(run_id: str, bus: Bus) -> ReportedSteps:
    """Return the steps in the stream of events; a stream that cannot be read is a problem, not an error."""
    source, stream = "its event", f"{run_id}-events"
    try:
        messages = bus.read_stream(stream, subjects.events(run_id, _STEP)).wait()
    except BusError as err:
        return ReportedSteps(source, problems=[f"stream {stream} was not read: {err}"])
    rows: list[Any] = []
    for message in messages:
        try:
            rows.append(decode(message.data, RunEvent).data)
        except WireError:
            rows.append(None)
    return _collect(source, rows, f"messages of {stream}")


def from_metrics(folder: Path, state: CheckpointState | None) -> ReportedSteps:
    """Return the steps in `metrics.jsonl` up to the checkpoint; lines after it may be of steps that are repeated."""
    path = folder / METRICS
    if state is None:
        return ReportedSteps(METRICS)
    try:
        data = read_regular(path, state.metrics_bytes)
    except OSError as err:
        return ReportedSteps(METRICS, problems=[f"{path} cannot be read: {type(err).__name__}: {err}"])
    rows = [_row(line) for line in data.split(b"\n") if line.strip()]
    found = _collect(METRICS, [row for row in rows if row is None or row.get("kind") == _STEP], f"lines of {path}")
    if found.problems:
        return found
    if len(data) == state.metrics_bytes:
        return replace(found, is_exact=True)
    problem = f"{path} has {len(data)} bytes, at the checkpoint it had {state.metrics_bytes}: steps are missing"
    return replace(found, problems=[problem])


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _collect(source: str, rows: Iterable[Any], what: str) -> ReportedSteps:
    digests: dict[int, list[StepDigest]] = {}
    steps, unreadable = set[int](), 0
    for row in rows:
        try:
            report = _Report.model_validate(row)
        except ValidationError:
            unreadable += 1
            continue
        steps.add(report.step)
        if report.digest is not None and report.digest not in digests.setdefault(report.step, []):
            digests[report.step].append(report.digest)
    problems = [f"{unreadable} {what} cannot be read and are left out"] if unreadable else []
    return ReportedSteps(source, digests, frozenset(steps), problems=problems)
