"""What the page needs of a run's messages beyond the panel's `RunView`: every figure of every step, versions, heartbeats; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.console.live.run_view import RunView
from penstock.console.report import event_fields
from penstock.console.report.event_fields import RewardErrorFields, UnreadableEvent
from penstock.console.web.reading.step_series import StepSeries, step_figures
from penstock.protocol.facts import DeadLetter, Heartbeat, RunEvent, WeightsApplied, WeightsPublished, WeightsRefused

_MAX_VERSIONS = 20_000  # whose adoption is remembered
_MAX_REASONS = 100
_MAX_SERVICES = 2000


@dataclass(slots=True)
class VersionNotes:
    """What is known of one version."""

    step: int | None = None
    num_bytes: int = 0
    announced_at: float | None = None  # wall-clock seconds, by the trainer
    adopted: dict[str, WeightsApplied] = field(default_factory=dict)  # by worker
    refused: dict[str, str] = field(default_factory=dict)  # reason by worker


@dataclass(slots=True)
class ErrorNotes:
    """Reward errors of one reason."""

    waited: int = 0  # times that groups were returned to the queue
    dead: int = 0  # groups that were given up
    newest: str = ""
    newest_at: float | None = None


class PageView(RunView):
    """A `RunView` that also keeps what the page draws; one thread folds and reads."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.series = StepSeries()
        self.versions: dict[int, VersionNotes] = {}
        self.reward_errors: dict[str, ErrorNotes] = {}
        self.beats: dict[tuple[str, str], Heartbeat] = {}

    def add_recorded(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the rows of metrics.jsonl whose events are no longer on the stream."""
        kept = list(rows)
        super().add_recorded(kept)
        recorded = StepSeries()
        for row in kept:
            at = event_fields.number(row.get("at"))
            if row.get("kind") == "step" and at is not None:
                _add_step(recorded, at, row)
        self.series.fill(recorded)

    @property
    def unreadable_messages(self) -> dict[str, int]:
        """The messages that could not be read, by kind."""
        return dict(self._unreadable)

    @property
    def last_at(self) -> float:
        """When the newest message was sent, in wall-clock seconds."""
        return self._last_at

    def fold_event(self, event: RunEvent) -> None:
        super().fold_event(event)
        if event.kind == "step":
            _add_step(self.series, event.at, event.data)
        elif event.kind == "weights":
            version = event.data.get("version")
            if isinstance(version, int) and 0 <= version < 2**53:
                self._version(version).announced_at = event.at
        elif event.kind == "reward_error":
            self._note_error(event)

    def fold_published(self, fact: WeightsPublished) -> None:
        super().fold_published(fact)
        notes = self._version(fact.version)
        notes.step, notes.num_bytes = fact.step, fact.num_bytes

    def fold_applied(self, fact: WeightsApplied) -> None:
        super().fold_applied(fact)
        self._version(fact.version).adopted[fact.worker_id] = fact

    def fold_refused(self, fact: WeightsRefused, now: float) -> None:
        super().fold_refused(fact, now)
        self._version(fact.version).refused[fact.worker_id] = fact.reason

    def fold_dead_letter(self, letter: DeadLetter, now: float) -> None:
        super().fold_dead_letter(letter, now)
        if letter.stage == "generated":
            notes = self._errors(letter.reason)
            notes.dead += max(len(letter.group_ids), 1)
            notes.newest = letter.detail

    def fold_heartbeats(self, beats: Sequence[Heartbeat], now: float) -> None:
        super().fold_heartbeats(beats, now)
        for beat in beats[:_MAX_SERVICES]:
            self.beats[beat.role, beat.service_id] = beat

    def _version(self, version: int) -> VersionNotes:
        found = self.versions.get(version)
        if found is None:
            found = self.versions[version] = VersionNotes()
            if len(self.versions) > _MAX_VERSIONS:
                del self.versions[min(self.versions)]
        return found

    def _note_error(self, event: RunEvent) -> None:
        try:
            fields = event_fields.read(RewardErrorFields, event.data)
        except UnreadableEvent:
            return  # counted by RunView
        notes = self._errors(fields.reason or "unknown")
        notes.waited += max(len(fields.group_ids), 1)
        notes.newest, notes.newest_at = fields.detail, event.at

    def _errors(self, reason: str) -> ErrorNotes:
        if reason not in self.reward_errors and len(self.reward_errors) >= _MAX_REASONS:
            reason = "other reasons"
        return self.reward_errors.setdefault(reason, ErrorNotes())


def _add_step(series: StepSeries, at: float, data: Mapping[str, Any]) -> None:
    step = data.get("step")
    if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53:
        series.add(step, at, step_figures(data))
