"""Training on preferences: DPO and its relatives (`trainer/algorithm/preferences/`), exact for any micro-batches and ranks."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog
import torch
from torch import Tensor

from penstock.fine_tuning.loop import Length, Made, Plan, Training
from penstock.fine_tuning.session import load_trained, open_folder, plan_of
from penstock.fine_tuning.training_folder import Result
from penstock.trainer.data.pairs import Pair, PairSet
from penstock.trainer.data.row_checks import read_tokenizer
from penstock.trainer.dpo_settings import DpoSettings
from penstock.trainer.learner.load_model import load_reference
from penstock.trainer.learner.pair_planner import PairPlanner, Scorer, mean_tokens_of
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.preference_objective import Answers, mean_metrics
from penstock.trainer.learner.reference import WithoutAdapter
from penstock.trainer.learner.trainable import optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer.dpo")


class PreferenceTask:
    def __init__(
        self, policy: Policy, pairs: PairSet, held_out: PairSet | None, settings: TrainerSettings, dims: ParallelDims
    ) -> None:
        chosen = settings.dpo
        self.policy = policy
        self.num_rows = len(pairs)
        self.has_validation = held_out is not None
        self._pairs, self._held_out = pairs, held_out
        self._batch_size = chosen.batch_size
        self._planner = PairPlanner(policy, dims, chosen, budget_tokens=settings.trainer.micro_batch_tokens)
        self._stored: dict[int, Tensor] = {}  # of pairs that are trained on
        self._stored_held_out: Tensor | None = None

    def use_live(self, reference: Scorer) -> None:
        self._planner.use_live(reference)

    def precompute(self, reference: Scorer, rows: Sequence[int]) -> None:
        """Compute the reference's log-probabilities of some rows, and of all held-out rows, now; collective."""
        found = self._planner.reference_sums([self._pairs[row] for row in rows], reference)
        self._stored = {row: found[2 * number : 2 * number + 2] for number, row in enumerate(rows)}
        if self._held_out is not None:
            self._stored_held_out = self._planner.reference_sums(self._all_held_out(), reference)

    def step(self, rows: Sequence[int]) -> Made:
        pairs = [self._pairs[row] for row in rows]
        stored = torch.stack([self._stored[row] for row in rows]).flatten() if self._stored else None
        batches, objective = self._planner.prepare(pairs, stored)
        figures = self.policy.train_step(batches, objective)
        reported = mean_metrics(figures.sums, len(pairs)) | ({"kl": objective.kl} if self._planner.needs_kl else {})
        return Made(figures, int(figures.sums["tokens"]), reported)

    def validate(self) -> Mapping[str, float]:
        pairs = self._all_held_out()
        total, sums = 0.0, dict[str, float]()
        preference = self._planner.preference
        with self.policy.without_dropout():
            kl = self._planner.kl(pairs)
            answers = self._planner.answers(pairs, self._stored_held_out)
        for first in range(0, len(pairs), self._batch_size):
            batch = pairs[first : first + self._batch_size]
            part = _slice(answers, range(2 * first, 2 * (first + len(batch))))
            total += float(preference.per_pair(part, mean_chosen_tokens=mean_tokens_of(batch), kl=kl).sum())
            found = preference.figures(part)
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in found.items()}
        means = mean_metrics(sums, len(pairs))
        shown = {name: means[name] for name in ("rewards/accuracies", "rewards/margins") if name in means}
        return {"loss": total / len(pairs), **shown}

    def _all_held_out(self) -> list[Pair]:
        assert self._held_out is not None
        return [self._held_out[row] for row in range(len(self._held_out))]


def run(settings: TrainerSettings, ranks: Ranks, stop: threading.Event) -> Result | None:
    """Train ``model.path`` on the preferences of ``dpo.data`` on every rank; None if ``stop`` was set first."""
    dims = ParallelDims(ranks, settings.trainer.layout)
    with open_folder(settings, "dpo", dims) as folder:
        pairs = open_pairs(settings, settings.dpo.files or settings.data.train_files, dims)
        held_out = open_pairs(settings, settings.dpo.eval_files, dims) if settings.dpo.eval_files else None
        data = {"dpo.data": pairs.fingerprint} | ({"dpo.eval_data": held_out.fingerprint} if held_out else {})
        plan = plan_of(settings, "dpo", dims, num_rows=len(pairs), data=data)
        policy = load_trained(settings, settings.dpo, plan.length, dims)
        task = PreferenceTask(policy, pairs, held_out, settings, dims)
        if settings.dpo.needs_reference:
            _use_reference(task, policy, settings, plan)
        return Training(plan, task, folder, stop).run()


def open_pairs(settings: TrainerSettings, files: Sequence[Path], dims: ParallelDims) -> PairSet:
    """Open preference rows, and log what was read; raises MalformedData or ConfigError."""
    data = settings.data
    longest = settings.trainer.micro_batch_tokens // 2  # both answers of a pair are in one micro-batch
    one_answer = settings.dpo.takes_one_answer
    pairs = PairSet.open(
        files, data=data, tokenizer=read_tokenizer(settings), max_tokens=longest, takes_one_answer=one_answer
    )
    if dims.writes_files:
        for path, count in pairs.num_rows.items():
            log.info("data read", file=str(path), rows=count)
        log.info("pairs", kept=len(pairs), dropped=dict(pairs.dropped))
    return pairs


def _use_reference(task: PreferenceTask, policy: Policy, settings: TrainerSettings, plan: Plan) -> None:
    chosen = settings.dpo
    has_adapters = settings.model.lora.rank > 0
    reference: Scorer = WithoutAdapter(policy) if has_adapters else policy
    is_live = _is_live(chosen, has_adapters=has_adapters)
    if chosen.reference_path is not None or (is_live and not has_adapters):
        how = optimisation(settings, chosen, plan.length.num_steps)
        folder = chosen.reference_path or settings.model.path
        reference = load_reference(folder, how, policy.device, plan.dims, temperature=1.0)
    if is_live:
        task.use_live(reference)
        return
    task.precompute(reference, _rows_used(plan))  # the policy is its own reference until its first step


def _is_live(chosen: DpoSettings, *, has_adapters: bool) -> bool:
    if chosen.reference != "auto":
        return chosen.reference == "live"
    return has_adapters or any(weighed.loss.needs_kl for weighed in chosen.losses)


def _rows_used(plan: Plan) -> list[int]:
    length: Length = plan.length
    positions = range(min(length.num_positions, length.num_rows))
    return sorted({plan.order.at(position).prompt for position in positions})


def _slice(answers: Answers, places: range) -> Answers:
    chosen = slice(places.start, places.stop)
    return Answers(
        answers.plain[chosen],
        answers.weighed[chosen],
        answers.reference[chosen],
        answers.lengths[chosen],
        None if answers.weights is None else answers.weights[chosen],
    )
