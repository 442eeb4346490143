"""Training on preferences: DPO and its relatives (`trainer/algorithm/preferences/`), exact for any micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog
import torch
from torch import Tensor

from penstock.fine_tuning.loop import Made, Task
from penstock.fine_tuning.session import Plan, load_trained
from penstock.trainer.data.pairs import Pair, PairSet
from penstock.trainer.data.row_checks import read_tokenizer
from penstock.trainer.learner.load_model import load_reference
from penstock.trainer.learner.pair_planner import PairPlanner, Scorer, mean_tokens_of
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.preference_objective import Answers, mean_metrics
from penstock.trainer.learner.reference import WithoutAdapter
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer.dpo")


class PreferenceTask(Task[PairSet]):
    def __init__(
        self, policy: Policy, rows: PairSet, held_out: PairSet | None, settings: TrainerSettings, dims: ParallelDims
    ) -> None:
        super().__init__(policy, rows, held_out, settings, dims)
        self._planner = PairPlanner(policy, dims, settings.dpo, budget_tokens=self.budget_tokens)
        self._stored: dict[int, Tensor] = {}  # of pairs that are trained on
        self._stored_held_out: Tensor | None = None

    def use_live(self, reference: Scorer) -> None:
        self._planner.use_live(reference)

    def precompute(self, reference: Scorer, rows: Sequence[int]) -> None:
        """Compute the reference's log-probabilities of some rows, and of all held-out rows, now; collective."""
        sums = self._planner.reference_sums([self.rows[row] for row in rows], reference)
        self._stored = {row: sums[2 * number : 2 * number + 2] for number, row in enumerate(rows)}
        if self.held_out is not None:
            self._stored_held_out = self._planner.reference_sums(self._all_held_out(), reference)

    def step(self, rows: Sequence[int]) -> Made:
        pairs = [self.rows[row] for row in rows]
        stored = torch.stack([self._stored[row] for row in rows]).flatten() if self._stored else None
        batches, objective = self._planner.prepare(pairs, stored)
        figures = self.policy.train_step(batches, objective)
        reported = mean_metrics(figures.sums, len(pairs)) | ({"kl": objective.kl} if self._planner.needs_kl else {})
        return Made(figures, int(figures.sums["tokens"]), reported)

    def validate(self) -> Mapping[str, float]:
        pairs = self._all_held_out()
        total, sums = 0.0, dict[str, float]()
        preference, batch_size = self._planner.preference, self.settings.dpo.batch_size
        with self.policy.without_dropout():
            kl = self._planner.kl(pairs)
            answers = self._planner.answers(pairs, self._stored_held_out)
        for first in range(0, len(pairs), batch_size):
            batch = pairs[first : first + batch_size]
            part = _slice(answers, range(2 * first, 2 * (first + len(batch))))
            total += float(preference.per_pair(part, mean_chosen_tokens=mean_tokens_of(batch), kl=kl).sum())
            batch_metrics = preference.figures(part)
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in batch_metrics.items()}
        means = mean_metrics(sums, len(pairs))
        shown = {name: means[name] for name in ("rewards/accuracies", "rewards/margins") if name in means}
        return {"loss": total / len(pairs), **shown}

    def _all_held_out(self) -> list[Pair]:
        assert self.held_out is not None
        return [self.held_out[row] for row in range(len(self.held_out))]


def open_task(plan: Plan, rows: PairSet, held_out: PairSet | None) -> PreferenceTask:
    task = PreferenceTask(load_trained(plan), rows, held_out, plan.settings, plan.dims)
    if plan.settings.dpo.needs_reference:
        _use_reference(task, plan)
    return task


def open_rows(settings: TrainerSettings, files: Sequence[Path], dims: ParallelDims) -> PairSet:
    """Open preference rows, and log what was read; raises MalformedData or ConfigError."""
    data = settings.data_of("dpo")
    longest = settings.trainer.micro_batch_tokens // 2  # both answers of a pair are in one micro-batch
    one_answer = settings.dpo.takes_one_answer
    pairs = PairSet(
        files, data=data, tokenizer=read_tokenizer(settings), max_tokens=longest, takes_one_answer=one_answer
    )
    if dims.writes_files:
        for path, count in pairs.num_rows.items():
            log.info("data read", file=str(path), rows=count)
        log.info("pairs", kept=len(pairs), dropped=dict(pairs.dropped), not_used=sorted(pairs.unread))
    return pairs


def _use_reference(task: PreferenceTask, plan: Plan) -> None:
    chosen, lora = plan.settings.dpo, plan.settings.model.lora
    has_adapters = (
        lora.rank > 0 and lora.path is None
    )  # switched off, those of a folder leave another model than it began with
    reference: Scorer = WithoutAdapter(task.policy) if has_adapters else task.policy
    is_live = chosen.is_live(has_adapters=has_adapters)
    if chosen.reference_path is not None or (is_live and not has_adapters):
        folder = chosen.reference_path or plan.settings.model.path
        reference = load_reference(folder, plan.optimisation, task.policy.device, plan.dims, temperature=1.0)
    if is_live:
        task.use_live(reference)
        return
    positions = range(min(plan.length.num_positions, plan.length.num_rows))
    rows = sorted({plan.order.at(position).prompt for position in positions})
    task.precompute(reference, rows)  # the policy serves as the reference until its first step


def _slice(answers: Answers, places: range) -> Answers:
    chosen = slice(places.start, places.stop)
    weights = None if answers.weights is None else answers.weights[chosen]
    sums = (answers.plain[chosen], answers.weighed[chosen], answers.reference[chosen], answers.lengths[chosen])
    return Answers(*sums, weights)
