"""Plans the steps of a session, with the state that the algorithm keeps from one step to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean
from typing import Any, Literal

from penstock.protocol.packs.step_logprobs import MAX_GROUPS, MAX_ROWS, MAX_TOKENS
from penstock.trainer.algorithm.credit import AlgorithmState, Scored, credit_rule
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.step_metrics import StepMetrics
from penstock.trainer.learner.step_plan import (
    NO_AGES,
    Passes,
    ReadyGroup,
    StepPlan,
    all_rows,
    by_trajectory,
    make_plan,
    plan_passes,
    trajectories_alone,
)
from penstock.trainer.settings import TrainerSettings


class Planner:
    def __init__(self, settings: TrainerSettings, learner: Learner, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's ``state``; raises CheckpointError if it is of another algorithm."""
        self._algorithm = settings.algorithm
        self._longest = settings.rollout.max_new_tokens
        self._budget = settings.trainer.micro_batch_tokens
        self._least_age = settings.data.least_age
        self._seed = settings.run.seed
        self._learner = learner
        self._state = AlgorithmState.resumed(settings.algorithm, state)
        self._credit = credit_rule(settings.algorithm, longest=self._longest, state=self._state)
        self._reward_kl: float | None = None  # of the batch that was planned last, per token
        self._num_rows = 0

    def plan(self, batch: Sequence[ReadyGroup], version: int, ages: Mapping[int, int] = NO_AGES) -> StepPlan:
        """Plan a step at ``version``; ``ages`` are those that are not the difference of the numbers (`VersionTree.ages`)."""
        gaps: list[float] = []
        algorithm = self._algorithm
        lengths = [count for group in batch for count in group.trained.lengths]
        self._num_rows = len(lengths)
        if algorithm.reward_kl_coefficient:
            every_row = all_rows(batch, self._learner.capacity(self._budget))
            row_gaps = self._learner.reference_gaps(every_row, batch, form=algorithm.reward_kl_form)
            gaps = by_trajectory(batch, row_gaps)
            self._reward_kl = fmean(gap / max(1, length) for gap, length in zip(gaps, lengths, strict=True))
        influences: list[float] = []
        if algorithm.parts.estimator.value.by_gradient:
            alone = trajectories_alone(batch, self._learner.capacity(self._budget))
            influences = by_trajectory(batch, self._learner.influences(alone, batch))
        steers_loss = algorithm.kl_target is not None and algorithm.kl_coefficient > 0.0
        plan = make_plan(
            batch,
            credit=lambda groups: self._credit(_measured(groups, gaps, influences)),
            aggregation=algorithm.aggregation,
            max_completion_tokens=self._longest,
            capacity=self._learner.capacity(self._budget),
            version=version,
            sft_coefficient=algorithm.sft_coefficient,
            split=self._split if algorithm.many_updates else None,
        )
        plan = replace(plan, least_age=self._least_age, ages=tuple(ages.items()))
        if algorithm.has_critic and algorithm.reward_kl_coefficient:
            plan = replace(plan, token_kl=self._state.kl.coefficient)
        return replace(plan, kl_coefficient=self._state.kl.coefficient) if steers_loss else plan

    def _split(self, groups: Sequence[int]) -> Passes:
        algorithm = self._algorithm
        return plan_passes(
            groups,
            epochs=algorithm.epochs,
            minibatches=algorithm.minibatches,
            seed=self._seed,
            step=self._learner.policy.steps_done,
            stop_kl=algorithm.stop_kl,
        )

    def learned(self, metrics: StepMetrics) -> dict[str, Any]:
        measured = self._reward_kl
        if "kl_reference" in metrics.sums and measured is None and metrics.sums["tokens"]:
            measured = metrics.sums["kl_reference"] / metrics.sums["tokens"]
        if measured is None:
            return {}
        used = self._state.kl.coefficient
        self._state.kl.update(measured, self._num_rows)
        reported = {"kl_coefficient": used}
        return reported if self._reward_kl is None else {**reported, "reward_kl": self._reward_kl}

    def document(self) -> dict[str, Any]:
        return self._state.to_document()


@dataclass(frozen=True, slots=True)
class Learned:
    plan: StepPlan
    metrics: StepMetrics
    reported: dict[str, Any]
    skipped: Mapping[str, int] = field(default_factory=dict)  # trajectories that changed nothing, by reason

    @property
    def left_out(self) -> tuple[int, ...]:
        return tuple(number for number, reason in enumerate(self.metrics.left_out) if reason)

    @property
    def updates(self) -> tuple[tuple[int, ...], ...]:
        return self.plan.passes.updates(len(self.metrics.passes)) if self.plan.passes else ()


def learn(
    planner: Planner,
    learner: Learner,
    batch: Sequence[ReadyGroup],
    version: int,
    *,
    ages: Mapping[int, int] = NO_AGES,
    keep_groups: int | Literal["all"] = 0,
) -> Learned:
    """Make the optimizer steps on a batch at ``version``; the only code that changes weights, in a run and its replay.

    ``ages`` as in `Planner.plan`. The metrics keep the log-probabilities of the first ``keep_groups`` groups, see `num_kept_rows`.
    """
    plan = planner.plan(batch, version, ages)
    metrics = learner.step(plan, batch, keep_rows=num_kept_rows(plan, batch, keep_groups))
    return Learned(plan, metrics, planner.learned(metrics), skipped_trajectories(plan, metrics, batch))


def skipped_trajectories(plan: StepPlan, metrics: StepMetrics, batch: Sequence[ReadyGroup]) -> dict[str, int]:
    skipped = dict(plan.skipped)
    if not any(metrics.left_out):
        return skipped
    updates = plan.passes.updates(len(metrics.passes)) if plan.passes else (tuple(range(len(batch))),)
    reasons = {place: reason for places, reason in zip(updates, metrics.left_out, strict=True) for place in places}
    made = {place for places, reason in zip(updates, metrics.left_out, strict=True) if not reason for place in places}
    planned = {(plan.packs[row.pack].key, row.row_group, row.trajectory) for row in plan.rows}
    return skipped | Counter(
        reasons[place]
        for place, group in enumerate(batch)
        if place not in made
        for rows in group.group.rows_of[: group.scored.generated.num_trained]
        if (group.pack.key, group.scored.generated.row_group, rows[0]) in planned
    )


def num_kept_rows(
    plan: StepPlan, groups: Sequence[ReadyGroup], wanted: int | Literal["all"], *, max_tokens: int = MAX_TOKENS
) -> int:
    most = MAX_GROUPS if wanted == "all" else min(wanted, MAX_GROUPS)
    tokens = {(group.pack.key, group.scored.generated.row_group): group.num_tokens for group in groups}
    counts: dict[tuple[str, int], int] = {}
    for row in plan.rows:
        place = plan.packs[row.pack].key, row.row_group
        counts[place] = counts.get(place, 0) + 1
    num_rows = num_tokens = 0
    for place, count in list(counts.items())[:most]:
        num_tokens += tokens[place]
        if num_tokens > max_tokens or num_rows + count > MAX_ROWS:
            break
        num_rows += count
    return num_rows


def _measured(groups: Sequence[Scored], gaps: Sequence[float], influences: Sequence[float]) -> list[Scored]:
    """Return the groups with what was measured of each trajectory, in the order of the batch, or empty."""
    kl, own = iter(gaps), iter(influences)
    counts = [len(group.rewards) for group in groups]
    return [
        replace(group, kl=list(islice(kl, count)), influences=list(islice(own, count)))
        for group, count in zip(groups, counts, strict=True)
    ]
