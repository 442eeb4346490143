"""Training on preferences: DPO and its relatives (`trainer/algorithm/preferences/`), exact for any micro-batches and ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import structlog
import torch
from torch import Tensor

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.data.pairs import Pair, PairSet
from penstock.trainer.dpo_settings import DpoSettings
from penstock.trainer.fine_tuning.length import Length
from penstock.trainer.fine_tuning.loop import Made, Plan, Training
from penstock.trainer.fine_tuning.pair_batches import (
    PairBatch,
    answer_sums,
    answer_weights,
    build_pairs,
    mismatched,
    plan_pairs,
)
from penstock.trainer.fine_tuning.preference_objective import (
    Answers,
    Preference,
    PreferenceObjective,
    answers_of,
    coupled_loss,
    mean_figures,
)
from penstock.trainer.fine_tuning.result import Result
from penstock.trainer.fine_tuning.session import load_trained, open_folder, optimisation, plan_of
from penstock.trainer.learner.load_model import load_reference
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.reference import WithoutAdapter
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings

log = structlog.get_logger("trainer.dpo")

_SCORED_TOGETHER = 2048  # pairs whose micro-batches are planned together


class Scorer(Protocol):
    """A policy that scores answers: the one that is trained, or its reference."""

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Score a micro-batch without a gradient; [N] float32."""
        ...


class PreferenceTask:
    """Learn preferences."""

    def __init__(
        self, policy: Policy, pairs: PairSet, held_out: PairSet | None, settings: TrainerSettings, dims: ParallelDims
    ) -> None:
        """Hold the model and the rows; `use_reference` before the first step, if a loss has one."""
        chosen = settings.dpo
        self.policy = policy
        self.num_rows = len(pairs)
        self.has_validation = held_out is not None
        self._pairs = pairs
        self._held_out = held_out
        self._dims = dims
        self._budget = settings.trainer.micro_batch_tokens
        self._batch_size = chosen.batch_size
        self._couples = any(one.loss.couples_pairs for one in chosen.losses)
        self._is_weighted = chosen.weighting == "wpo"
        self._needs_kl = any(one.loss.needs_kl for one in chosen.losses)
        self._preference = Preference(
            chosen.losses, chosen.divergence, chosen.alpha, chosen.length_alpha, chosen.reward_scale
        )
        self._live: Scorer | None = None
        self._stored: dict[int, Tensor] = {}  # of pairs that are trained on
        self._stored_held_out: Tensor | None = None

    def use_live(self, reference: Scorer) -> None:
        """Compute the reference's log-probabilities in each step."""
        self._live = reference

    def precompute(self, reference: Scorer, rows: Sequence[int]) -> None:
        """Compute the reference's log-probabilities of some rows, and of all held-out rows, now; collective."""
        found = self._reference_sums([self._pairs[row] for row in rows], reference)
        self._stored = {row: found[2 * number : 2 * number + 2] for number, row in enumerate(rows)}
        if self._held_out is not None:
            self._stored_held_out = self._reference_sums(self._all_held_out(), reference)

    def step(self, rows: Sequence[int]) -> Made:
        """Make one optimizer step on pairs, of which this rank computes its share."""
        pairs = [self._pairs[row] for row in rows]
        stored = torch.stack([self._stored[row] for row in rows]).flatten() if self._stored else None
        own = list(self._own(pairs, stored))
        mean_tokens = _mean_tokens(pairs)
        kl = self._kl(pairs) if self._needs_kl else 0.0
        if self._couples:
            answers = self._gathered(own, len(pairs))
            losses, *gradients = coupled_loss(self._preference, answers, mean_chosen_tokens=mean_tokens, kl=kl)
            own = [(part, _with_gradients(batch, part, losses, torch.stack(gradients))) for part, batch in own]
        objective = PreferenceObjective(self._preference, len(pairs), mean_tokens, kl)
        figures = self.policy.train_step([batch for _, batch in own], objective)
        reported = mean_figures(figures.sums, len(pairs)) | ({"kl": kl} if self._needs_kl else {})
        return Made(figures, int(figures.sums["tokens"]), reported)

    def validate(self) -> Mapping[str, float]:
        """Return loss and figures of the held-out pairs, in batches of the training's size; the last one may be smaller."""
        pairs = self._all_held_out()
        total, sums = 0.0, dict[str, float]()
        with self.policy.without_dropout():
            kl = self._kl(pairs) if self._needs_kl else 0.0
            answers = self._gathered(self._own(pairs, self._stored_held_out), len(pairs))
        for first in range(0, len(pairs), self._batch_size):
            batch = pairs[first : first + self._batch_size]
            part = _slice(answers, range(2 * first, 2 * (first + len(batch))))
            total += float(self._preference.per_pair(part, mean_chosen_tokens=_mean_tokens(batch), kl=kl).sum())
            found = self._preference.figures(part)
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in found.items()}
        means = mean_figures(sums, len(pairs))
        shown = {name: means[name] for name in ("rewards/accuracies", "rewards/margins") if name in means}
        return {"loss": total / len(pairs), **shown}

    def _own(self, pairs: Sequence[Pair], stored: Tensor | None) -> Iterator[tuple[list[int], PairBatch]]:
        """Yield the micro-batches of this rank with the reference's sums, each with the numbers of its pairs."""
        for part, plain in self._micro_batches(pairs):
            batch = plain
            if self._is_weighted:
                batch = replace(plain, weighting=answer_weights(self.policy.collisions(plain).cpu(), plain))
            if stored is not None:
                yield part, replace(batch, references=stored.view(-1, 2)[part].flatten())
            elif self._live is not None:
                yield part, replace(batch, references=self._sums(self._live, batch))
            else:
                yield part, batch

    def _micro_batches(self, pairs: Sequence[Pair]) -> Iterator[tuple[list[int], PairBatch]]:
        for first in range(0, len(pairs), _SCORED_TOGETHER):
            some = pairs[first : first + _SCORED_TOGETHER]
            plan = plan_pairs(some, budget_tokens=self._budget, num_shares=self._dims.rows.count)
            for part in plan[self._dims.rows.index]:
                yield [first + number for number in part], build_pairs([some[number] for number in part])

    def _sums(self, scorer: Scorer, batch: PairBatch) -> Tensor:
        """Return each answer's weighed log-probability under a policy, [2 P] on the CPU."""
        return answer_sums(scorer.logprobs(batch).cpu(), batch, self._preference.length_alpha)[1]

    def _gathered(
        self, own: Iterator[tuple[list[int], PairBatch]] | list[tuple[list[int], PairBatch]], num_pairs: int
    ) -> Answers:
        """Return the answers of all pairs, over all ranks, as the policy scores them now."""
        found = torch.zeros(5, 2 * num_pairs, dtype=torch.float64)
        for part, batch in own:
            answers = answers_of(self.policy.logprobs(batch).cpu(), batch, self._preference.length_alpha)
            places = _places(part)
            weights = torch.ones_like(answers.plain) if answers.weights is None else answers.weights
            values = answers.plain, answers.weighed, answers.reference, answers.lengths, weights
            for row, value in zip(found, values, strict=True):
                row[places] = value
        summed = self._dims.sum(found.flatten().tolist())
        return Answers(*torch.tensor(summed, dtype=torch.float64).view(5, -1))

    def _reference_sums(self, pairs: Sequence[Pair], reference: Scorer) -> Tensor:
        found = torch.zeros(2 * len(pairs), dtype=torch.float64)
        for part, batch in self._micro_batches(pairs):
            found[_places(part)] = self._sums(reference, batch)
        return torch.tensor(self._dims.sum(found.tolist()), dtype=torch.float64)

    def _kl(self, pairs: Sequence[Pair]) -> float:
        """Return the KL of policy and reference, estimated on each prompt with the answers of another one, at least 0."""
        assert self._live is not None
        total = 0.0
        for _, batch in self._micro_batches(mismatched(pairs)):
            total += float((self._sums(self.policy, batch) - self._sums(self._live, batch)).sum())
        [summed] = self._dims.sum([total])
        return max(0.0, summed / sum(pair.num_answers for pair in pairs))

    def _all_held_out(self) -> list[Pair]:
        assert self._held_out is not None
        return [self._held_out[row] for row in range(len(self._held_out))]


def run(settings: TrainerSettings, ranks: Ranks, stop: threading.Event) -> Result | None:
    """Train ``model.path`` on the preferences of ``dpo.data`` and write the result; on every rank.

    Returns None if ``stop`` was set first: then everything is in a checkpoint.
    """
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
    tokenizer = ChatTokenizer.read(
        settings.model.path, arguments=data.template_arguments, needs_template=data.text_prompts == "chat"
    )
    longest = settings.trainer.micro_batch_tokens // 2  # both answers of a pair are in one micro-batch
    one_answer = settings.dpo.takes_one_answer
    pairs = PairSet.open(files, data=data, tokenizer=tokenizer, max_tokens=longest, takes_one_answer=one_answer)
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
        how = optimisation(settings, chosen, plan.length)
        folder = chosen.reference_path or settings.model.path
        reference = load_reference(folder, how, policy.device, plan.dims, temperature=1.0)
    if is_live:
        task.use_live(reference)
        return
    task.precompute(reference, _rows_used(plan))  # the policy is its own reference until its first step


def _is_live(chosen: DpoSettings, *, has_adapters: bool) -> bool:
    if chosen.reference != "auto":
        return chosen.reference == "live"
    return has_adapters or any(one.loss.needs_kl for one in chosen.losses)


def _rows_used(plan: Plan) -> list[int]:
    """Return the rows that some step of the training uses."""
    length: Length = plan.length
    positions = range(min(length.num_positions, length.num_rows))
    return sorted({plan.order.at(position).prompt for position in positions})


def _mean_tokens(pairs: Sequence[Pair]) -> float:
    """Return the tokens of chosen answers for each pair; at least 1, where rows of one answer have none."""
    return max(1.0, sum(len(pair.chosen) for pair in pairs) / len(pairs))


def _with_gradients(batch: PairBatch, part: list[int], losses: Tensor, gradients: Tensor) -> PairBatch:
    """Give a micro-batch its part of a coupled loss and of its gradients, [2, 2 P]."""
    share = float(losses[part].sum()) / len(losses)
    return replace(batch, gradients=gradients[:, _places(part)], loss_share=share)


def _places(part: Sequence[int]) -> Tensor:
    """Return the places of the answers of pairs: 2 n and 2 n + 1 of pair n."""
    numbers = torch.tensor(part, dtype=torch.int64)
    return torch.stack([2 * numbers, 2 * numbers + 1], dim=1).flatten()


def _slice(answers: Answers, places: range) -> Answers:
    chosen = slice(places.start, places.stop)
    return Answers(
        answers.plain[chosen],
        answers.weighed[chosen],
        answers.reference[chosen],
        answers.lengths[chosen],
        None if answers.weights is None else answers.weights[chosen],
    )
