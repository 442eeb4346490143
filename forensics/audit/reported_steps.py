"""Read what the trainer reported of its steps: events in NATS, and `metrics.jsonl` in the folder of the run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.forensics.audit.step_checks import ReportedSteps
from penstock.protocol import subjects
from penstock.protocol.errors import BusError, WireError
from penstock.protocol.facts import Count, RunEvent, decode
from penstock.protocol.files import read_regular
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import STEP_DIGEST, StepDigest
from penstock.protocol.transport.bus import Bus

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
