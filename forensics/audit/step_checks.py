"""Compare the steps of a record with what the trainer reported of them when it made them; pure.

A report is the step's event in NATS or its line of `metrics.jsonl`. Both hold a `StepDigest`, which does not change when
the record is rewritten in the object store with all its hashes. Metrics up to the checkpoint are those of exactly the
committed steps. Events are more and fewer: of steps that a crash rolled back, and without those that were not published
or have expired; of them, only the ones with a recorded step's number and epoch are compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.forensics.audit.record_fold import Breach
from penstock.protocol import subjects
from penstock.protocol.errors import BusError, WireError
from penstock.protocol.facts import RunEvent, decode
from penstock.protocol.files import read_regular
from penstock.protocol.groups import Count
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import (
    GROUP_DIGITS,
    STEP_DIGEST,
    RecordedStep,
    StepDigest,
    group_digest,
    step_digest,
)
from penstock.protocol.transport.bus import Bus

DIFFERS = "differs from its report"
_SHOWN_STEPS = 5


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
        found = False
        for report in reports:
            digests = report.digests.get(step.step, ())
            of_epoch = [digest for digest in digests if digest.epoch == step.epoch]
            found |= bool(of_epoch)
            for digest in of_epoch:
                if digest != expected:
                    breaches += _differences(step, groups, digest, report.source)
            if report.is_exact and report.steps and not of_epoch and (digests or step.step not in report.steps):
                found = True
                epochs = ", ".join(str(digest.epoch) for digest in digests) or "none"
                detail = (
                    f"step {step.step} of epoch {step.epoch} is recorded; {report.source} has it of epoch: {epochs}"
                )
                breaches.append(Breach("recorded but not reported", "", detail))
        if not found:
            unreported.append(step.step)
    breaches += _not_recorded(steps, reports)
    if unreported:
        more = ", …" if len(unreported) > _SHOWN_STEPS else ""
        notes.append(
            f"{len(unreported)} of {len(steps)} steps have no digest in an event or metrics.jsonl (made by an older build, "
            "expired, or on another machine): rewards and order of their groups are checked by the record's hashes alone: "
            f"step {', '.join(map(str, unreported[:_SHOWN_STEPS]))}{more}"
        )
    return breaches, notes


def _digests(step: RecordedStep) -> list[str]:
    """Return the digest of each group; empty text for one whose pack is not in the step's list."""
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
    found = []
    for place, (group, digest) in enumerate(zip(step.groups, short, strict=True), start=1):
        if digest not in listed:
            what = "other rewards, lengths, versions or pack than the trainer reported, or another group"
            found.append(Breach(DIFFERS, group.group_id, f"{where}, place {place}: {what}"))
        elif len(short) == len(listed) and listed[place - 1] != digest:
            trained = listed.index(digest) + 1
            found.append(Breach(DIFFERS, group.group_id, f"{where}, place {place}: it was trained at place {trained}"))
    if len(short) != len(listed):
        missing = [str(place) for place, digest in enumerate(listed, start=1) if left[digest] > 0]
        detail = f"{where}: {len(listed)} groups were trained, {len(short)} are recorded"
        found.append(Breach(DIFFERS, "", f"{detail}; not recorded: place {', '.join(missing) or 'none'}"))
    return found


def _not_recorded(steps: Sequence[RecordedStep], reports: Sequence[ReportedSteps]) -> list[Breach]:
    recorded = {step.step for step in steps}
    return [
        Breach("reported but not recorded", "", f"step {step} was made before the checkpoint, by {report.source}")
        for report in reports
        if report.is_exact
        for step in sorted(report.steps - recorded)
    ]


METRICS = "metrics.jsonl"
_STEP = "step"


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
    if found.problems or len(data) == state.metrics_bytes:
        return ReportedSteps(METRICS, found.digests, found.steps, not found.problems, found.problems)
    problem = f"{path} has {len(data)} bytes, at the checkpoint it had {state.metrics_bytes}: steps are missing"
    return ReportedSteps(METRICS, found.digests, found.steps, problems=[problem])


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
