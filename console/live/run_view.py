"""Show what is known about a run: its state at one moment, and its totals; pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from penstock.console.live.run_fold import RunFold, first_line
from penstock.console.live.run_snapshot import EvalPoint, Incident, Snapshot, StepPoint, elapsed_at
from penstock.console.report import diagnoses, learning
from penstock.console.report.learning import held_out, known_mean, recent_reward
from penstock.console.report.run_summary import (
    Diagnosis,
    GroupCounts,
    Overlap,
    RunSummary,
    ScorerShare,
    WeightsSummary,
    WorkerWeights,
)
from penstock.console.terminal import clock

_SPEED_STEPS = 12  # the ETA and the training rate are means over this many steps
_STALL_S = 20.0  # without a step, and ten times as long as a step takes, is an incident
_STEPS_BEFORE_STALLS = 5
_NUM_STALLS = 20
_UNSCORED = 16  # groups without a step, from which on failing rewards are named as the cause
_FAILING_S = 20.0  # seconds likewise
_ABSENT_S = 60.0  # a service that starts on a busy machine, or is started again, reports by then
_ABSENT = {  # by role: its name, its queue, what it does with a message, and the command that starts it
    "rollout": ("rollout worker", "tasks", "generate", "penstock rollout RUN.TOML"),
    "reward": ("reward service", "generated", "score", "penstock reward service RUN.TOML"),
}


class RunView(RunFold):
    """Everything known about one run; not thread-safe, one thread folds and reads."""

    def snapshot(self, now: float) -> Snapshot:
        points = self.points()
        rewards = _known(p.fields.reward_mean for p in points)
        staleness = self._staleness_tokens()
        primary = self._primary_evals()
        return Snapshot(
            run_id=self.run_id,
            started_at=self._first_at if self._first_at is not None else now,
            elapsed_s=max((self._last_at if self.finished else now) - (self._first_at or now) - self._paused_s, 0.0),
            state=self.state,
            step=points[-1].number if points else 0,
            total_steps=self.total_steps,
            eta_s=self._eta_s(points),
            rewards=rewards,
            reward_now=recent_reward(rewards),
            reward_first=known_mean(rewards[:5]),
            held_out=held_out(primary),
            generated_per_s=self._services.tokens_per_s,
            trained_per_s=_trained_per_s(points[-_SPEED_STEPS:]),
            staleness_tokens=staleness,
            staleness_mean=_staleness_mean(staleness),
            staleness_max=max(staleness, default=None),
            newest_version=max(self.published, default=points[-1].fields.version + 1 if points else 0),
            versions_published=len(self.published),
            queues=self.queues,
            services=self._services.lines(now),
            idle_share=self._services.idle_shares(),
            slots_used=self._services.slots_used,
            dropped=self._dropped(),
            groups_trained=self._groups.trained,
            no_signal_share=known_mean(_known(p.fields.zero_signal_groups for p in points[-5:])),
            learning=points[-1].learning if points else {},
            diagnoses=(
                *(() if self.finished else self._absent_services(now)),
                *self._diagnoses([p for p in points if p.at > self._restored_until]),  # settings may have changed since
            ),
            incidents=tuple(self.incidents),
            num_incidents=self._num_incidents,
            disconnected_s=self.disconnected_s,
            finished=self.finished,
            attention=self.attention,
            placement=self.placement,
            pauses=tuple(self._pauses),
            evaluated_at={point.step: point.at for point in primary},
        )

    def summary(self) -> RunSummary:
        points = self.points()
        rewards = _known(p.fields.reward_mean for p in points)
        tenth = max(len(rewards) // 10, 1)
        primary = self._primary_evals()
        staleness = self._staleness_tokens()
        cpu = self._services.cpu_s_per_role()
        return RunSummary(
            run_id=self.run_id,
            steps=points[-1].number if points else 0,
            attention=self.attention,
            accuracy_before=primary[0].accuracy if primary else None,
            accuracy_after=primary[-1].accuracy if primary else None,
            eval_reward_before=primary[0].reward if primary else None,
            eval_reward_after=primary[-1].reward if primary else None,
            success=primary[-1].success if primary else "",
            eval_prompts=primary[-1].num_prompts if primary else 0,
            reward_first=known_mean(rewards[:tenth]),
            reward_last=known_mean(rewards[-tenth:]),
            groups=self.group_counts(),
            staleness_tokens={str(k): v for k, v in staleness.items()},
            staleness_mean=_staleness_mean(staleness),
            staleness_max=max(staleness, default=None),
            learning=learning.spreads([p.learning for p in points]),
            skipped=dict(sum((Counter(p.fields.skipped) for p in points), Counter[str]())),
            scored_by=self.scorers(),
            versions_published=len(self.published),
            workers=self._worker_weights(),
            weights=self._weights_summary(),
            tokens_generated=self._tokens_generated(points),
            tokens_trained=sum(p.tokens_trained for p in points),
            idle_share=self._services.idle_shares(),
            slots_used=self._services.slots_used,
            overlap=self._overlap(points, staleness),
            unreadable=self.unreadable_messages,
            diagnoses=self._diagnoses(points),
            packs_given_back=self._services.count("packs_given_back"),
            incidents=tuple(
                f"{clock(elapsed_at(i.at, self._first_at or i.at, self._pauses))} {i.text}"
                for i in sorted([*self.incidents, *self._stalls(points)], key=lambda one: one.at)
            ),
            wall_s=max(self._last_at - self._first_at - self._paused_s, 0.0) if self._first_at is not None else 0.0,
            cpu_s=sum(cpu.values()),
            cpu_s_per_role=cpu,
        )

    def group_counts(self) -> GroupCounts:
        """Return the counts of the run's groups, without the rest of `summary`, whose cost grows with the steps."""
        by_heartbeats = self._services.count("groups_generated") - self._num_eval_groups
        return GroupCounts(
            issued=self._groups.issued,
            generated=max(by_heartbeats, self._groups.scored),  # a killed worker's last heartbeat is old
            scored=self._groups.scored,
            trained=self._groups.trained,
            in_flight=self._groups.outstanding,
            dropped=self._dropped(),
            dead_lettered=dict(self._dead),
        )

    def scorers(self) -> dict[str, ScorerShare]:
        """Return how many groups each scorer scored, and from which step to which."""
        shares: dict[str, ScorerShare] = {}
        for number, point in self.steps.items():
            for name, groups in point.fields.scored_by.items():
                known = shares.get(name) or ScorerShare(groups=0, first_step=number, last_step=number)
                more = {"groups": known.groups + groups, "last_step": number}
                shares[name] = known.model_copy(update=more)
        return shares

    def serving(self) -> dict[str, int]:
        return {worker: facts[-1].version for worker, facts in sorted(self._applied.items())}

    @property
    def unreadable_messages(self) -> dict[str, int]:
        return dict(self._unreadable)

    def points(self) -> list[StepPoint]:
        return list(self.steps.values())

    def _absent_services(self, now: float) -> Iterator[Diagnosis]:
        for role, since in self._absent_since.items():
            name, queue, verb, command = _ABSENT[role]
            waiting = self.queues.waiting.get(queue, 0)
            if waiting and now - since >= _ABSENT_S:
                yield Diagnosis(
                    key=f"no_{role}",
                    what=f"No {name} is running: {waiting} messages wait for one to {verb} their groups.",
                    cause="None was started for this run, it still loads, or it has ended: its own output says which.",
                    cure=f"Start one, on any machine that reaches NATS and the object store: {command}",
                )

    def _stalls(self, points: Sequence[StepPoint]) -> list[Incident]:
        """Return the longest times without a step, whatever the reason was; a pause between two sessions is none."""
        gaps: list[tuple[float, StepPoint]] = []
        for earlier, after in pairwise(points):
            before = self._rolled_back.get(after.number, earlier)
            if any(before.at < start <= after.at for start in self._old_starts):
                continue  # between two sessions
            paused_s = sum(pause.seconds for pause in self._pauses if before.at < pause.end <= after.at)
            gaps.append((after.at - before.at - paused_s, before))
        if len(gaps) < _STEPS_BEFORE_STALLS:
            return []
        limit = max(_STALL_S, 10 * statistics.median(gap for gap, _ in gaps))
        longest = sorted((stall for stall in gaps if stall[0] > limit), key=lambda one: one[0])[-_NUM_STALLS:]
        return [Incident(point.at, f"no step for {clock(gap)} after step {point.number}") for gap, point in longest]

    def _overlap(self, points: list[StepPoint], staleness: Mapping[int, int]) -> Overlap:
        tokens = sum(staleness.values())
        training_s = points[-1].at - points[0].at if len(points) > 1 else 0.0
        return Overlap(
            trained_stale_share=sum(n for k, n in staleness.items() if k >= 1) / tokens if tokens else None,
            both_working_s=self._services.both_working_s,
            both_working_share=min(self._services.both_working_s / training_s, 1.0) if training_s > 0 else None,
        )

    def _tokens_generated(self, points: Sequence[StepPoint]) -> int:
        """Return the sampled tokens, at least those trained: a session that was not watched has no heartbeats."""
        by_heartbeats = self._services.count("tokens_generated")
        is_generated = self._services.has("rollout")  # else the groups are those of another run
        if not is_generated or self._groups.reused:
            return by_heartbeats
        return max(by_heartbeats, sum(p.tokens_trained for p in points))

    def _diagnoses(self, points: Sequence[StepPoint]) -> tuple[Diagnosis, ...]:
        steps = [point.learning for point in points]
        metrics = diagnoses.RunMetrics(
            steps, self._groups.issued, self._dropped(), self._primary_evals(), self._failing()
        )
        return diagnoses.diagnose(metrics)

    def _failing(self) -> str:
        """Return the newest error of rewards where they have failed since the last step for long; empty where they have not."""
        since = next(reversed(self.steps.values())).at if self.steps else self._first_at
        newest = max(self.reward_errors.items(), key=lambda one: one[1].newest_at or 0.0, default=None)
        if newest is None or since is None or self._num_unscored < _UNSCORED:
            return ""
        reason, errors = newest
        return f"{reason}: {first_line(errors.newest)}" if (errors.newest_at or 0.0) - since >= _FAILING_S else ""

    def _worker_weights(self) -> dict[str, WorkerWeights]:
        return {
            worker: WorkerWeights(
                versions_applied=len(facts),
                newest_version=max(f.version for f in facts),
                mean_pause_s=known_mean([f.pause_s for f in facts]) or 0.0,
                mean_fetch_s=known_mean([f.fetch_s for f in facts]) or 0.0,
                num_lives=self._services.num_starts("rollout", worker),
            )
            for worker, facts in sorted(self._applied.items())
        }

    def _weights_summary(self) -> WeightsSummary:
        patches = [p for p in self.publications.values() if p.kind == "patch"]
        applied = [fact for facts in self._applied.values() for fact in facts]
        pauses = sorted(fact.pause_s for fact in applied if fact.previous_version is not None)
        return WeightsSummary(
            raw_bytes=sum(p.raw_bytes for p in self.publications.values()),
            sent_bytes=sum(p.sent_bytes for p in self.publications.values()),
            fetched_bytes=sum(fact.num_bytes for fact in applied),
            mean_density=sum(p.density or 0.0 for p in patches) / len(patches) if patches else None,
            pause_p50_s=_quantile(pauses, 0.5),
            pause_p99_s=_quantile(pauses, 0.99),
            refused=self._num_refused,
        )

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
        per_step = (recent[-1].at - recent[0].at) / (recent[-1].number - recent[0].number)
        return max(self.total_steps - recent[-1].number, 0) * per_step


def _trained_per_s(points: list[StepPoint]) -> float:
    seconds = points[-1].at - points[0].at if len(points) > 1 else 0.0
    return sum(p.tokens_trained for p in points[1:]) / seconds if seconds > 0 else 0.0


def _staleness_mean(tokens: Mapping[int, int]) -> float | None:
    whole = sum(tokens.values())
    return sum(k * n for k, n in tokens.items()) / whole if whole else None


def _known(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def _quantile(ordered: list[float], share: float) -> float | None:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None
