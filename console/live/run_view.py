"""Fold the messages of a run's services into snapshots and a summary.

Pure: a function of facts and clock readings. Steps are kept by number: a step that a resumed trainer
takes again replaces the first instead of being counted twice.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from penstock.console.live.absent_services import AbsentServices
from penstock.console.live.fleet import Fleet
from penstock.console.live.run_snapshot import EvalPoint, Incident, QueueDepths, Snapshot, StepPoint, elapsed_at
from penstock.console.live.watched_totals import NotedIncident, Pause, WatchedTotals
from penstock.console.live.weights_view import WeightsView
from penstock.console.report import diagnoses, event_fields, learning
from penstock.console.report.event_fields import (
    EvalFields,
    GroupFields,
    NoteFields,
    RewardErrorFields,
    StateFields,
    StepFields,
    UnreadableEvent,
)
from penstock.console.report.learning import Evaluation, held_out, recent_reward
from penstock.console.report.run_summary import Diagnosis, GroupCounts, Overlap, RunSummary, ScorerShare, WorkerWeights
from penstock.console.terminal import clock
from penstock.protocol.facts import DeadLetter, Heartbeat, RunEvent, WeightsApplied, WeightsPublished, WeightsRefused

_SPEED_STEPS = 12  # the ETA and the training rate are means over this many steps
_SESSION_STARTS = "starting"  # the text of the trainer's first event
_OUTAGE_S = 5.0  # of NATS: a shorter one is no incident
_STALL_S = 20.0  # without a step, and ten times as long as a step takes, is one
_STEPS_BEFORE_STALLS = 5
_NUM_STALLS = 20
_CAUSE_CHARS = 200
_NUM_CAUSES = 20  # of dead letters that become incidents; all of them are counted
_GROUP_ID = re.compile(r"\b(?:eval\.v\d+|e\d+)\.p\d+(?:\.a\d+)?\b")
_NUM_INCIDENTS = 200  # newest kept; a worker that restarts every minute must not fill the memory


class RunView:
    """Everything known about one run; not thread-safe, one thread folds and reads."""

    def __init__(self, run_id: str, *, total_steps: int | None = None) -> None:
        """Start empty; ``total_steps`` may also arrive with the trainer's events."""
        self.run_id = run_id
        self.total_steps = total_steps
        self.steps: dict[int, StepPoint] = {}
        self.evals: list[EvalPoint] = []
        self.incidents: deque[Incident] = deque(maxlen=_NUM_INCIDENTS)
        self._num_incidents = 0
        self.queues = QueueDepths()
        self.state = "waiting for the services"
        self.attention = ""  # what computes it in the trainer
        self.disconnected_s = 0.0
        self.finished = False
        self._fleet = Fleet()
        self._absent = AbsentServices()
        self._groups = GroupFields()
        self._unreadable: Counter[str] = Counter()  # messages by kind
        self._num_eval_groups = 0
        self._staleness: Counter[int] = Counter()  # tokens of all steps by staleness
        self._dead: Counter[str] = Counter()
        self._causes: set[str] = set()  # of dead letters, as their incidents say them
        self._reward_errors: Counter[str] = Counter()
        self.published: set[int] = set()  # versions that were announced
        self.weights = WeightsView()
        self._applied: dict[str, list[WeightsApplied]] = {}
        self._first_at: float | None = None
        self._last_at = 0.0
        self._restored: WatchedTotals | None = None
        self._paused_s = 0.0  # between sessions
        self._pauses: list[tuple[float, float]] = []  # ends and lengths, seconds
        self._old_starts: set[float] = set()  # of earlier sessions' trainers
        self._restored_until = -math.inf
        self._rolled_back: dict[
            int, StepPoint
        ] = {}  # the last step that was rolled back, by the step that was then taken
        self._noted: deque[Incident] = deque(maxlen=_NUM_INCIDENTS)  # incidents that no stored event repeats

    # ── earlier sessions ──────────────────────────────────────────────────────────────────────

    def restore(self, totals: WatchedTotals) -> None:
        """Continue with what was watched in earlier sessions, before anything else is folded."""
        self._restored = totals
        self._paused_s = totals.paused_s
        self._pauses = [(pause.end, pause.seconds) for pause in totals.pauses]
        self._restored_until = totals.until
        self._first_at = totals.since
        self._fleet.restore(totals)
        self._causes.update(i.text for i in totals.incidents if i.kind == "dead_letter")
        self._note([Incident(i.at, i.text, i.kind) for i in totals.incidents])

    def totals(self) -> WatchedTotals:
        return WatchedTotals(
            until=self._last_at,
            since=self._first_at,
            paused_s=self._paused_s,
            pauses=tuple(Pause(end=end, seconds=seconds) for end, seconds in self._pauses),
            both_working_s=self._fleet.both_working_s,
            services=self._fleet.totals(),
            incidents=tuple(NotedIncident(at=i.at, text=i.text, kind=i.kind) for i in self._noted),
        )

    def add_recorded(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the steps and evaluations of metrics.jsonl whose events are no longer on the stream."""
        missing = RunView(self.run_id)
        for row in rows:
            at = event_fields.number(row.get("at"))
            kind = row.get("kind")
            if at is None or kind not in {"step", "eval"}:
                continue
            with contextlib.suppress(ValueError):  # counted by the reader of the file
                missing.fold_event(RunEvent(run_id=self.run_id, source="trainer", kind=kind, at=at, data=dict(row)))
        self._merge(missing)

    def _merge(self, other: RunView) -> None:
        added = {number: point for number, point in other.steps.items() if number not in self.steps}
        if other.steps and next(reversed(other.steps)) > next(reversed(self.steps), -1):
            self._groups = other._groups
        for point in added.values():
            self._staleness.update(point.staleness_tokens)
        self.steps = dict(sorted({**self.steps, **added}.items()))
        known = {(e.version, e.split) for e in self.evals}
        self.evals = sorted([*self.evals, *(e for e in other.evals if (e.version, e.split) not in known)], key=_by_step)
        for point in (*added.values(), *other.evals):
            self._saw(point.at)

    # ── input ─────────────────────────────────────────────────────────────────────────────────

    def fold_event(self, event: RunEvent) -> None:
        """Take one event of a service; other kinds are ignored, one whose data does not fit is counted."""
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
        if event.kind == "step":
            self._fold_step(event.at, event.data)
        elif event.kind == "eval":
            self._fold_eval(event.at, event.data)
        elif event.kind == "state":
            self._fold_state(event.at, event.source, event.data)
        elif event.kind == "reward_error":
            self._fold_reward_error(event.at, event.data)
        elif event.kind == "weights":
            self.weights.fold_publication(event.data)
        elif event.kind in {"alarm", "evaluation_lost"}:
            text = event_fields.read(NoteFields, event.data).text
            self._remember([Incident(event.at, text or event.kind, "lost")])
        elif event.kind == "log" and (text := event_fields.read(NoteFields, event.data).text):
            self._remember([Incident(event.at, text, "note")])
        self._saw(event.at)

    def fold_heartbeats(self, beats: Sequence[Heartbeat], now: float) -> None:
        """Take all heartbeats of the live bucket as read at ``now``, in the reader's wall-clock seconds."""
        if not self.finished:  # after the run services only wait
            for beat in beats:
                self._saw(beat.at)
        self._note(self._fleet.fold(beats, now))
        self._absent.fold(self._fleet.lines(now), now)

    def fold_published(self, fact: WeightsPublished) -> None:
        self.published.add(fact.version)

    def fold_applied(self, fact: WeightsApplied) -> None:
        self._applied.setdefault(fact.worker_id, []).append(fact)
        self.weights.fold_applied(fact)

    def fold_refused(self, fact: WeightsRefused, now: float) -> None:
        self._remember([Incident(now, self.weights.fold_refused(fact), "lost")])

    def fold_dead_letter(self, letter: DeadLetter, now: float) -> None:
        """Take a dead letter; the first of each cause is an incident, in this session or an earlier one."""
        self._dead[letter.reason] += max(len(letter.group_ids), 1)
        what = "groups" if letter.group_ids else "messages"
        cause = _GROUP_ID.sub("…", letter.detail.strip().partition("\n")[0])[:_CAUSE_CHARS]
        text = f"{what} of {letter.stage} dead-lettered, {letter.reason}: {cause}; `penstock dead-letters list {self.run_id}` has all"
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

    # ── output ────────────────────────────────────────────────────────────────────────────────

    def snapshot(self, now: float) -> Snapshot:
        points = self.points()
        rewards = tuple(p.reward_mean for p in points if p.reward_mean is not None)
        staleness = self._staleness_tokens()
        step = points[-1].step if points else 0
        return Snapshot(
            run_id=self.run_id,
            started_at=self._first_at if self._first_at is not None else now,
            elapsed_s=max((self._last_at if self.finished else now) - (self._first_at or now) - self._paused_s, 0.0),
            state=self.state,
            step=step,
            total_steps=self.total_steps,
            eta_s=self._eta_s(points),
            rewards=rewards,
            reward_now=recent_reward(rewards),
            reward_first=_mean(rewards[:5]),
            held_out=held_out([Evaluation(e.step, e.accuracy, e.reward) for e in self._primary_evals()]),
            generated_per_s=self._fleet.tokens_per_s,
            trained_per_s=_trained_per_s(points[-_SPEED_STEPS:]),
            staleness_tokens=staleness,
            staleness_mean=_staleness_mean(staleness),
            staleness_max=max(staleness, default=None),
            newest_version=max(self.published, default=points[-1].version if points else 0),
            versions_published=len(self.published),
            queues=self.queues,
            services=self._fleet.lines(now),
            idle_share=self._fleet.idle_shares(),
            dropped=self._dropped(),
            groups_trained=self._groups.trained,
            no_signal_share=_mean([p.no_signal_share for p in points[-5:] if p.no_signal_share is not None]),
            learning=points[-1].learning if points else {},
            diagnoses=(
                *(() if self.finished else self._absent.diagnoses(self.queues, now)),
                *self._diagnoses([p for p in points if p.at > self._restored_until]),  # settings may have changed since
            ),
            incidents=tuple(self.incidents),
            num_incidents=self._num_incidents,
            disconnected_s=self.disconnected_s,
            finished=self.finished,
            attention=self.attention,
            pauses=tuple(self._pauses),
            evaluated_at={e.step: e.at for e in self._primary_evals()},
        )

    def summary(self) -> RunSummary:
        points = self.points()
        rewards = [p.reward_mean for p in points if p.reward_mean is not None]
        tenth = max(len(rewards) // 10, 1)
        primary = self._primary_evals()
        staleness = self._staleness_tokens()
        cpu = self._fleet.cpu_s_per_role()
        return RunSummary(
            run_id=self.run_id,
            steps=points[-1].step if points else 0,
            attention=self.attention,
            accuracy_before=primary[0].accuracy if primary else None,
            accuracy_after=primary[-1].accuracy if primary else None,
            eval_reward_before=primary[0].reward if primary else None,
            eval_reward_after=primary[-1].reward if primary else None,
            success=primary[-1].success if primary else "",
            eval_prompts=primary[-1].num_prompts if primary else 0,
            reward_first=_mean(rewards[:tenth]),
            reward_last=_mean(rewards[-tenth:]),
            groups=GroupCounts(
                issued=self._groups.issued,
                generated=self._generated(),
                scored=self._groups.scored,
                trained=self._groups.trained,
                in_flight=self._groups.outstanding,
                dropped=self._dropped(),
                dead_lettered=dict(self._dead),
            ),
            staleness_tokens={str(k): v for k, v in staleness.items()},
            staleness_mean=_staleness_mean(staleness),
            staleness_max=max(staleness, default=None),
            learning=learning.spreads([p.learning for p in points]),
            skipped=dict(sum((Counter(p.skipped) for p in points), Counter[str]())),
            scored_by=_scorers(points),
            versions_published=len(self.published),
            workers=self._worker_weights(),
            weights=self.weights.summary(),
            tokens_generated=self._tokens_generated(points),
            tokens_trained=sum(p.tokens_trained for p in points),
            idle_share=self._fleet.idle_shares(),
            overlap=self._overlap(points, staleness),
            unreadable=dict(self._unreadable),
            diagnoses=self._diagnoses(points),
            packs_given_back=self._fleet.count("packs_given_back"),
            incidents=tuple(
                f"{clock(elapsed_at(i.at, self._first_at or i.at, self._pauses))} {i.text}"
                for i in sorted([*self.incidents, *self._stalls(points)], key=lambda one: one.at)
            ),
            wall_s=max(self._last_at - self._first_at - self._paused_s, 0.0) if self._first_at is not None else 0.0,
            cpu_s=sum(cpu.values()),
            cpu_s_per_role=cpu,
        )

    def serving(self) -> dict[str, int]:
        return {worker: facts[-1].version for worker, facts in sorted(self._applied.items())}

    def points(self) -> list[StepPoint]:
        return list(self.steps.values())

    # ── folding ───────────────────────────────────────────────────────────────────────────────

    def _fold_step(self, at: float, data: Mapping[str, Any]) -> None:
        fields = event_fields.read(StepFields, data)
        step = len(self.steps) + 1 if fields.step is None else fields.step
        if self.steps and step <= next(reversed(self.steps)):  # resumed from a checkpoint: these steps are repeated
            self._rolled_back[step] = self.steps[next(reversed(self.steps))]
            for later in [s for s in self.steps if s >= step]:
                self._staleness.subtract(self.steps.pop(later).staleness_tokens)
        histogram = fields.staleness_tokens
        self.steps[step] = StepPoint(
            step=step,
            at=at,
            version=fields.version,
            reward_mean=fields.reward_mean,
            loss=fields.loss,
            tokens_trained=fields.tokens_trained or sum(histogram.values()),
            staleness_tokens=histogram,
            no_signal_share=fields.zero_signal_groups,
            learning=learning.read(data),
            skipped=fields.skipped,
            scored_by=fields.scored_by,
        )
        self._staleness.update(histogram)
        self._groups = fields.groups or self._groups
        self.state = "training"
        self.finished = False  # a run that had ended was resumed with more steps
        self._fleet.open_window(at)
        if self.total_steps and step >= self.total_steps:
            self._fleet.close_window()

    def _fold_eval(self, at: float, data: Mapping[str, Any]) -> None:
        fields = event_fields.read(EvalFields, data)
        self._num_eval_groups += fields.num_prompts
        if fields.accuracy is None and fields.reward_mean is None:
            return
        point = EvalPoint(
            step=fields.step,
            at=at,
            version=fields.version,
            split=fields.split or fields.name or "eval",
            accuracy=fields.accuracy,
            reward=fields.reward_mean,
            num_prompts=fields.num_prompts,
            success=fields.success,
            primary=fields.primary,
        )
        others = [e for e in self.evals if (e.version, e.split) != (point.version, point.split)]
        self.evals = sorted([*others, point], key=_by_step)

    def _fold_reward_error(self, at: float, data: Mapping[str, Any]) -> None:
        fields = event_fields.read(RewardErrorFields, data)
        reason = fields.reason or "unknown"
        if reason not in self._reward_errors:  # one incident per reason, not per group
            cause = _GROUP_ID.sub("…", fields.detail.strip().partition("\n")[0])[:_CAUSE_CHARS]
            why = f"{reason}: {cause}" if cause else reason
            self._remember([Incident(at, f"rewards fail ({why}); their groups are retried", "dead_letter")])
        self._reward_errors[reason] += 1

    def _fold_state(self, at: float, source: str, data: Mapping[str, Any]) -> None:
        fields = event_fields.read(StateFields, data)
        text = fields.text or fields.state
        if text == _SESSION_STARTS and self._restored is not None:
            if at <= self._restored.until:
                self._old_starts.add(at)
            else:
                self._pauses.append((at, at - self._restored.until))
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
            self._fleet.close_window()

    def _stalls(self, points: Sequence[StepPoint]) -> list[Incident]:
        """Return the longest times without a step, whatever the reason was; a pause between two sessions is none."""
        gaps: list[tuple[float, StepPoint]] = []
        for earlier, after in pairwise(points):
            before = self._rolled_back.get(after.step, earlier)
            if any(before.at < start <= after.at for start in self._old_starts):
                continue  # between two sessions
            paused_s = sum(length for end, length in self._pauses if before.at < end <= after.at)
            gaps.append((after.at - before.at - paused_s, before))
        if len(gaps) < _STEPS_BEFORE_STALLS:
            return []
        limit = max(_STALL_S, 10 * statistics.median(gap for gap, _ in gaps))
        longest = sorted((one for one in gaps if one[0] > limit), key=lambda one: one[0])[-_NUM_STALLS:]
        return [
            Incident(point.at, f"no step for {clock(gap)} after step {point.step}", "note") for gap, point in longest
        ]

    def _overlap(self, points: list[StepPoint], staleness: Mapping[int, int]) -> Overlap:
        tokens = sum(staleness.values())
        training_s = points[-1].at - points[0].at if len(points) > 1 else 0.0
        return Overlap(
            trained_stale_share=sum(n for k, n in staleness.items() if k >= 1) / tokens if tokens else None,
            both_working_s=self._fleet.both_working_s,
            both_working_share=min(self._fleet.both_working_s / training_s, 1.0) if training_s > 0 else None,
        )

    def _generated(self) -> int:
        """Return the generated groups of the training split, at least those scored: a killed worker's last heartbeat is old."""
        by_heartbeats = self._fleet.count("groups_generated") - self._num_eval_groups
        return max(by_heartbeats, self._groups.scored)

    def _tokens_generated(self, points: Sequence[StepPoint]) -> int:
        """Return the sampled tokens, at least those trained: of a session that nobody watched there are no heartbeats."""
        by_heartbeats = self._fleet.count("tokens_generated")
        is_generated = self._fleet.has("rollout")  # else the groups are those of another run
        if not is_generated or self._groups.reused:
            return by_heartbeats
        return max(by_heartbeats, sum(p.tokens_trained for p in points))

    def _diagnoses(self, points: Sequence[StepPoint]) -> tuple[Diagnosis, ...]:
        steps = [point.learning for point in points]
        return diagnoses.diagnose(diagnoses.RunFigures(steps, self._groups.issued, self._dropped()))

    def _worker_weights(self) -> dict[str, WorkerWeights]:
        found = {}
        for worker, facts in sorted(self._applied.items()):
            found[worker] = WorkerWeights(
                versions_applied=len(facts),
                newest_version=max(f.version for f in facts),
                mean_pause_s=_mean([f.pause_s for f in facts]) or 0.0,
                mean_fetch_s=_mean([f.fetch_s for f in facts]) or 0.0,
                num_lives=self._fleet.num_starts("rollout", worker),
            )
        return found

    def _staleness_tokens(self) -> dict[int, int]:
        return {versions: tokens for versions, tokens in sorted(self._staleness.items()) if tokens}

    def _dropped(self) -> dict[str, int]:
        return {reason: groups for reason, groups in self._groups.dropped.items() if groups}

    def _primary_evals(self) -> list[EvalPoint]:
        first = next((e for e in self.evals if e.primary), self.evals[0] if self.evals else None)
        return [] if first is None else [e for e in self.evals if e.split == first.split]

    def _eta_s(self, points: list[StepPoint]) -> float | None:
        recent = points[-_SPEED_STEPS:]
        if not self.total_steps or len(recent) < 2:
            return None
        per_step = (recent[-1].at - recent[0].at) / (recent[-1].step - recent[0].step)
        return max(self.total_steps - recent[-1].step, 0) * per_step

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


def _trained_per_s(points: list[StepPoint]) -> float:
    seconds = points[-1].at - points[0].at if len(points) > 1 else 0.0
    return sum(p.tokens_trained for p in points[1:]) / seconds if seconds > 0 else 0.0


def _staleness_mean(tokens: Mapping[int, int]) -> float | None:
    whole = sum(tokens.values())
    return sum(k * n for k, n in tokens.items()) / whole if whole else None


def _scorers(points: Sequence[StepPoint]) -> dict[str, ScorerShare]:
    found: dict[str, ScorerShare] = {}
    for point in points:
        for scorer, groups in point.scored_by.items():
            before = found.get(scorer, ScorerShare(first_step=point.step, last_step=point.step))
            found[scorer] = before.model_copy(update={"groups": before.groups + groups, "last_step": point.step})
    return found


def _by_step(point: EvalPoint) -> int:
    return point.step


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
