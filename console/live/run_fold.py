"""Fold the messages of a run's services into what is known about it.

Pure: a function of facts and clock readings. Steps are kept by number: a step that a resumed trainer
takes again replaces the first instead of being counted twice.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.console.live.run_snapshot import (
    EvalPoint,
    Incident,
    Pause,
    QueueDepths,
    RewardErrors,
    StepPoint,
    WatchedTotals,
)
from penstock.console.live.services import Services
from penstock.console.report import event_fields, learning
from penstock.console.report.event_fields import (
    EvalFields,
    GroupFields,
    NoteFields,
    PublicationFields,
    RewardErrorFields,
    StateFields,
    StepFields,
    UnreadableEvent,
)
from penstock.protocol.facts import DeadLetter, Heartbeat, RunEvent, WeightsApplied, WeightsPublished, WeightsRefused

_SESSION_STARTS = "starting"  # the text of the trainer's first event
_OUTAGE_S = 5.0  # of NATS: a shorter one is no incident
_CAUSE_CHARS = 200
_NUM_CAUSES = 20  # of dead letters that become incidents; all of them are counted
_GROUP_ID = re.compile(r"\b(?:eval\.v\d+|e\d+)\.p\d+(?:\.a\d+)?\b")
_NUM_INCIDENTS = 200  # newest kept; a worker that restarts every minute must not fill the memory
_MAX_REASONS = 100  # of reward errors
WORKING_ROLES = ("rollout", "reward")


class RunFold:
    """What the messages of one run say; not thread-safe, one thread folds and reads."""

    def __init__(self, run_id: str, *, total_steps: int | None = None) -> None:
        self.run_id = run_id
        self.total_steps = total_steps
        self.steps: dict[int, StepPoint] = {}
        self.evals: list[EvalPoint] = []
        self.incidents: deque[Incident] = deque(maxlen=_NUM_INCIDENTS)
        self._num_incidents = 0
        self.queues = QueueDepths()
        self.state = "waiting for the services"
        self.attention = ""  # what computes it in the trainer
        self.placement = ""  # which GPUs do what, where that is known
        self.disconnected_s = 0.0
        self.finished = False
        self._services = Services()
        self._absent_since: dict[str, float] = {}  # by role: since when no service of it has reported
        self._groups = GroupFields()
        self._unreadable: Counter[str] = Counter()  # messages by kind
        self._num_eval_groups = 0
        self._staleness: Counter[int] = Counter()  # tokens of all steps by staleness
        self._dead: Counter[str] = Counter()
        self._causes: set[str] = set()  # of dead letters, as their incidents say them
        self.reward_errors: dict[str, RewardErrors] = {}  # by reason
        self._num_unscored = 0  # groups that rewards failed on since the last step, each time they did
        self.published: set[int] = set()  # versions that were announced
        self.publications: dict[int, PublicationFields] = {}  # by version
        self._num_refused = 0
        self._applied: dict[str, list[WeightsApplied]] = {}
        self._first_at: float | None = None
        self._last_at = 0.0
        self._restored: WatchedTotals | None = None
        self._paused_s = 0.0  # between sessions
        self._pauses: list[Pause] = []
        self._old_starts: set[float] = set()  # of earlier sessions' trainers
        self._restored_until = -math.inf
        self._rolled_back: dict[int, StepPoint] = {}  # by the step that was then taken: the last that was rolled back
        self._noted: deque[Incident] = deque(maxlen=_NUM_INCIDENTS)  # incidents that no stored event repeats

    def restore(self, totals: WatchedTotals) -> None:
        self._restored = totals
        self._paused_s = totals.paused_s
        self._pauses = list(totals.pauses)
        self._restored_until = totals.until
        self._first_at = totals.since
        self._services.restore(totals)
        self._causes.update(i.text for i in totals.incidents if i.kind == "dead_letter")
        self._note(totals.incidents)

    def totals(self) -> WatchedTotals:
        return WatchedTotals(
            until=self._last_at,
            since=self._first_at,
            paused_s=self._paused_s,
            pauses=tuple(self._pauses),
            both_working_s=self._services.both_working_s,
            slot_s=self._services.slot_s,
            services=self._services.totals(),
            incidents=tuple(self._noted),
        )

    def add_recorded(self, rows: Iterable[Mapping[str, Any]]) -> None:
        missing = RunFold(self.run_id)
        for row in rows:
            at = event_fields.number(row.get("at"))
            kind = row.get("kind")
            if at is None or kind not in {"step", "eval"}:
                continue
            with contextlib.suppress(ValueError):  # counted by the reader of the file
                missing.fold_event(RunEvent(run_id=self.run_id, source="trainer", kind=kind, at=at, data=dict(row)))
        added = {number: point for number, point in missing.steps.items() if number not in self.steps}
        if missing.steps and next(reversed(missing.steps)) > next(reversed(self.steps), -1):
            self._groups = missing._groups
        for point in added.values():
            self._staleness.update(point.fields.staleness_tokens)
        self.steps = dict(sorted({**self.steps, **added}.items()))
        known = {(e.version, e.split) for e in self.evals}
        self.evals = sorted(
            [*self.evals, *(e for e in missing.evals if (e.version, e.split) not in known)], key=lambda e: e.step
        )
        for point in (*added.values(), *missing.evals):
            self._saw(point.at)

    def fold_event(self, event: RunEvent) -> None:
        try:
            self._fold_event(event)
        except UnreadableEvent as err:
            self.unreadable(event.at, f"{event.kind} event", f"{err}, from {event.source}")

    def unreadable(self, at: float, what: str, problem: str) -> None:
        """Count a message that cannot be read; the first one of its kind is an incident."""
        self._unreadable[what] += 1
        if self._unreadable[what] == 1:
            text = f"{what} skipped, it cannot be read: {problem}; others like it are counted"
            self._remember([Incident(at, text, "note")])

    def _fold_event(self, event: RunEvent) -> None:
        at, data = event.at, event.data
        match event.kind:
            case "step":
                self._fold_step(at, data)
            case "eval":
                self._fold_eval(at, data)
            case "state":
                self._fold_state(at, event.source, data)
            case "reward_error":
                self._fold_reward_error(at, data)
            case "drop":
                self._groups = event_fields.read(GroupFields, data["totals"]) if data.get("totals") else self._groups
            case "weights":
                fields = event_fields.read(PublicationFields, data)
                if fields.version is not None:
                    self.publications[fields.version] = fields
            case "alarm" | "evaluation_lost" | "log":
                text, is_log = event_fields.read(NoteFields, data).text, event.kind == "log"
                if text or not is_log:
                    self._remember([Incident(at, text or event.kind, "note" if is_log else "lost")])
        self._saw(at)

    def fold_heartbeats(self, beats: Sequence[Heartbeat], now: float) -> None:
        """Take all heartbeats of the live bucket as read at ``now``, in the reader's wall-clock seconds."""
        if not self.finished:  # after the run services only wait
            for beat in beats:
                self._saw(beat.at)
        self._note(self._services.fold(beats, now))
        present = {line.role for line in self._services.lines(now) if line.alive}
        self._absent_since = {r: self._absent_since.get(r, now) for r in WORKING_ROLES if r not in present}

    def fold_published(self, fact: WeightsPublished) -> None:
        self.published.add(fact.version)

    def fold_applied(self, fact: WeightsApplied) -> None:
        self._applied.setdefault(fact.worker_id, []).append(fact)

    def fold_refused(self, fact: WeightsRefused, now: float) -> None:
        self._num_refused += 1
        text = f"{fact.worker_id} cannot use version {fact.version}: {fact.reason}"
        self._remember([Incident(now, text, "lost")])

    def fold_dead_letter(self, letter: DeadLetter, now: float) -> None:
        """Take a dead letter; the first of each cause is an incident, in this session or an earlier one."""
        num_groups = max(len(letter.group_ids), 1)
        self._dead[letter.reason] += num_groups
        if letter.stage == "generated":
            errors = self._errors_of(letter.reason)
            errors.dead += num_groups
            errors.newest = letter.detail
        what = "groups" if letter.group_ids else "messages"
        text = f"{what} of {letter.stage} dead-lettered, {letter.reason}: {first_line(letter.detail)}; `penstock dead-letters list {self.run_id}` has all"
        if text not in self._causes and len(self._causes) < _NUM_CAUSES:
            self._causes.add(text)
            self._note([Incident(now, text, "dead_letter")])

    def fold_connection(self, down_s: float, now: float) -> None:
        """Take how long NATS has been unreachable, 0.0 while it answers; an outage that has ended is an incident."""
        if down_s == 0.0 and self.disconnected_s > _OUTAGE_S:
            self._note([Incident(now, f"NATS answers again, after {self.disconnected_s:.0f} s", "back")])
        self.disconnected_s = down_s

    def fold_queues(self, queues: QueueDepths) -> None:
        self.queues = queues

    def note(self, at: float, text: str) -> None:
        self._saw(at)
        self._note([Incident(at, text, "note")])

    def _fold_step(self, at: float, data: Mapping[str, Any]) -> None:
        fields = event_fields.read(StepFields, data)
        step = len(self.steps) + 1 if fields.step is None else fields.step
        if self.steps and step <= next(reversed(self.steps)):  # resumed from a checkpoint: these steps are repeated
            self._rolled_back[step] = self.steps[next(reversed(self.steps))]
            for later in [s for s in self.steps if s >= step]:
                self._staleness.subtract(self.steps.pop(later).fields.staleness_tokens)
        trained = fields.tokens_trained if "tokens_trained" in data else sum(fields.staleness_tokens.values())
        self.steps[step] = StepPoint(step, at, trained, fields, learning.read(data))
        self._staleness.update(fields.staleness_tokens)
        self._groups = fields.groups or self._groups
        self.state = "training"
        self._num_unscored = 0
        self.finished = False  # a run that had ended was resumed with more steps
        self._services.open_window(at)
        if self.total_steps and step >= self.total_steps:
            self._services.close_window()

    def _fold_eval(self, at: float, data: Mapping[str, Any]) -> None:
        fields = event_fields.read(EvalFields, data)
        self._num_eval_groups += fields.num_prompts
        if fields.accuracy is None and fields.reward_mean is None:
            return
        point = EvalPoint(
            step=fields.step,
            accuracy=fields.accuracy,
            reward=fields.reward_mean,
            at=at,
            version=fields.version,
            split=fields.split or fields.name or "eval",
            num_prompts=fields.num_prompts,
            success=fields.success,
            primary=fields.primary,
        )
        others = [e for e in self.evals if (e.version, e.split) != (point.version, point.split)]
        self.evals = sorted([*others, point], key=lambda e: e.step)

    def _fold_reward_error(self, at: float, data: Mapping[str, Any]) -> None:
        fields = event_fields.read(RewardErrorFields, data)
        reason = fields.reason or "unknown"
        errors = self._errors_of(reason)
        if not errors.waited:  # one incident per reason, not per group
            cause = first_line(fields.detail)
            why = f"{reason}: {cause}" if cause else reason
            self._remember([Incident(at, f"rewards fail ({why}); their groups are retried", "dead_letter")])
        errors.waited += max(len(fields.group_ids), 1)
        self._num_unscored += max(len(fields.group_ids), 1)
        errors.newest, errors.newest_at = fields.detail, at

    def _errors_of(self, reason: str) -> RewardErrors:
        if reason not in self.reward_errors and len(self.reward_errors) >= _MAX_REASONS:
            reason = "other reasons"
        return self.reward_errors.setdefault(reason, RewardErrors())

    def _fold_state(self, at: float, source: str, data: Mapping[str, Any]) -> None:
        fields = event_fields.read(StateFields, data)
        text = fields.text or fields.state
        if text == _SESSION_STARTS and self._restored is not None:
            if at <= self._restored.until:
                self._old_starts.add(at)
            else:
                self._pauses.append(Pause(at, at - self._restored.until))
                self._paused_s += at - self._restored.until
                self._restored = None  # once: later starts of the trainer are in this session
        if text and source.startswith("trainer"):
            self.state = text
        if fields.total_steps:
            self.total_steps = fields.total_steps
        if fields.attention:
            self.attention = fields.attention
        if fields.finished:
            self.finished = True
            self._services.close_window()

    def _saw(self, at: float) -> None:
        self._first_at = at if self._first_at is None else min(self._first_at, at)
        self._last_at = max(self._last_at, at)

    def _note(self, incidents: Sequence[Incident]) -> None:
        self._noted.extend(incidents)
        self._remember(incidents)

    def _remember(self, incidents: Iterable[Incident]) -> None:
        for incident in incidents:
            self.incidents.append(incident)
            self._num_incidents += 1


def first_line(detail: str) -> str:
    """Return the first line of an error without the ids of its groups."""
    return _GROUP_ID.sub("…", detail.strip().partition("\n")[0])[:_CAUSE_CHARS]
