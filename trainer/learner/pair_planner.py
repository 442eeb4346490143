"""What an optimizer step on some pairs needs: this rank's micro-batches, the reference's sums, and the objective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from penstock.protocol.errors import ConfigError
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.objective import Outcome, PolicyGradient
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.pairs import Pair, PairSet
from penstock.trainer.data.row_checks import read_tokenizer
from penstock.trainer.dpo_settings import DpoSettings
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.preference_objective import (
    Answers,
    PairBatch,
    Preference,
    PreferenceObjective,
    answer_sums,
    answer_weights,
    answers_of,
    build_pairs,
    coupled_loss,
    mean_metrics,
    mismatched,
    plan_pairs,
)
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.settings import TrainerSettings

_PLANNED_TOGETHER = 2048  # pairs whose micro-batches are planned together

Numbered = tuple[list[int], PairBatch]  # a micro-batch, and which of the pairs are in it
_PREFIX = "pairs/"  # of the sums of pairs, which are beside those of the groups


class Scorer(Protocol):
    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Score a micro-batch without a gradient; [N] float32."""
        ...


class PairPlanner:
    """Prepares steps on pairs; every method is called on all ranks with the same pairs."""

    def __init__(self, policy: Policy, dims: ParallelDims, chosen: DpoSettings, *, budget_tokens: int) -> None:
        self._policy, self._dims = policy, dims
        self._budget = budget_tokens
        self._couples = any(weighed.loss.couples_pairs for weighed in chosen.losses)
        self._is_weighted = chosen.weighting == "wpo"
        self._needs_kl = any(weighed.loss.needs_kl for weighed in chosen.losses)
        self.preference = Preference(
            chosen.losses, chosen.divergence, chosen.alpha, chosen.length_alpha, chosen.reward_scale
        )
        self._live: Scorer | None = None

    def use_live(self, reference: Scorer) -> None:
        self._live = reference

    def prepare(
        self, pairs: Sequence[Pair], stored: Tensor | None = None
    ) -> tuple[list[PairBatch], PreferenceObjective]:
        numbered = list(self._own(pairs, stored))
        mean_tokens, kl = mean_tokens_of(pairs), self.kl(pairs)
        if self._couples:
            answers = self._gathered(numbered, len(pairs))
            losses, *gradients = coupled_loss(self.preference, answers, mean_chosen_tokens=mean_tokens, kl=kl)
            numbered = [
                (part, _with_gradients(batch, part, losses, torch.stack(gradients))) for part, batch in numbered
            ]
        return [batch for _, batch in numbered], PreferenceObjective(self.preference, len(pairs), mean_tokens, kl)

    def answers(self, pairs: Sequence[Pair], stored: Tensor | None = None) -> Answers:
        """Return the answers of all pairs, over all ranks, as the policy scores them now; collective."""
        return self._gathered(self._own(pairs, stored), len(pairs))

    def reference_sums(self, pairs: Sequence[Pair], reference: Scorer) -> Tensor:
        """Return each answer's weighed log-probability under a policy, [2 P] float64, over all ranks; collective."""
        sums = torch.zeros(2 * len(pairs), dtype=torch.float64)
        for part, batch in self._micro_batches(pairs):
            sums[_places(part)] = self._sums(reference, batch)
        return torch.tensor(self._dims.sum(sums.tolist()), dtype=torch.float64)

    def kl(self, pairs: Sequence[Pair]) -> float:
        """Return the KL, at least 0, on each prompt with the answers of another one, 0 where there is no other; collective."""
        if not self._needs_kl or len(pairs) < 2:
            return 0.0
        assert self._live is not None
        total = 0.0
        for _, batch in self._micro_batches(mismatched(pairs)):
            total += float((self._sums(self._policy, batch) - self._sums(self._live, batch)).sum())
        [summed] = self._dims.sum([total])
        return max(0.0, summed / sum(pair.num_answers for pair in pairs))

    @property
    def needs_kl(self) -> bool:
        return self._needs_kl

    def _own(self, pairs: Sequence[Pair], stored: Tensor | None) -> Iterator[Numbered]:
        for part, plain in self._micro_batches(pairs):
            batch = plain
            if self._is_weighted:
                batch = replace(plain, weighting=answer_weights(self._policy.collisions(plain).cpu(), plain))
            if stored is not None:
                yield part, replace(batch, references=stored.view(-1, 2)[part].flatten())
            elif self._live is not None:
                yield part, replace(batch, references=self._sums(self._live, batch))
            else:
                yield part, batch

    def _micro_batches(self, pairs: Sequence[Pair]) -> Iterator[Numbered]:
        for first in range(0, len(pairs), _PLANNED_TOGETHER):
            some = pairs[first : first + _PLANNED_TOGETHER]
            plan = plan_pairs(some, budget_tokens=self._budget, num_shares=self._dims.rows.count)
            for part in plan[self._dims.rows.index]:
                yield [first + number for number in part], build_pairs([some[number] for number in part])

    def _sums(self, scorer: Scorer, batch: PairBatch) -> Tensor:
        return answer_sums(scorer.logprobs(batch).cpu(), batch, self.preference.length_alpha)[1]

    def _gathered(self, numbered: Iterable[Numbered], num_pairs: int) -> Answers:
        table = torch.zeros(5, 2 * num_pairs, dtype=torch.float64)
        for part, batch in numbered:
            answers = answers_of(self._policy.logprobs(batch).cpu(), batch, self.preference.length_alpha)
            places = _places(part)
            weights = torch.ones_like(answers.plain) if answers.weights is None else answers.weights
            values = answers.plain, answers.weighed, answers.reference, answers.lengths, weights
            for row, value in zip(table, values, strict=True):
                row[places] = value
        summed = self._dims.sum(table.flatten().tolist())
        return Answers(*torch.tensor(summed, dtype=torch.float64).view(5, -1))


def mean_tokens_of(pairs: Sequence[Pair]) -> float:
    return max(1.0, sum(len(pair.chosen) for pair in pairs) / len(pairs))


def _with_gradients(batch: PairBatch, part: list[int], losses: Tensor, gradients: Tensor) -> PairBatch:
    share = float(losses[part].sum()) / len(losses)
    return replace(batch, gradients=gradients[:, _places(part)], loss_share=share)


def _places(part: Sequence[int]) -> Tensor:
    numbers = torch.tensor(part, dtype=torch.int64)
    return torch.stack([2 * numbers, 2 * numbers + 1], dim=1).flatten()


@dataclass(frozen=True, slots=True)
class MixedObjective:
    groups: PolicyGradient
    pairs: PreferenceObjective
    coefficient: float  # of the pairs' loss

    needs_teacher_kl = False  # settings refuse a teacher's likeliest tokens, which pairs have not

    @property
    def needs_entropy(self) -> bool:
        return self.groups.needs_entropy

    @property
    def needs_full_kl(self) -> bool:
        return self.groups.needs_full_kl

    def __call__(self, logprobs: Tensor, batch: MicroBatch, **scores: Tensor) -> Outcome:
        if not isinstance(batch, PairBatch):
            return self.groups(logprobs, batch, **scores)
        outcome = self.pairs(logprobs, batch)
        sums = {"loss": outcome.loss.detach(), **outcome.sums}
        return Outcome(
            loss=self.coefficient * outcome.loss,
            sums={f"{_PREFIX}{name}": value for name, value in sums.items()},
            maxima={},
        )

    def lr_factor(self, sums: Mapping[str, float]) -> float:
        return self.groups.lr_factor(sums)

    def trains(self, sums: Mapping[str, float]) -> bool:
        return True  # no correction rejects pairs


class MixedPairs:
    def __init__(
        self, pairs: PairSet, planner: PairPlanner, order: DataOrder, *, batch_size: int, coefficient: float
    ) -> None:
        self._pairs, self._planner, self._order = pairs, planner, order
        self._batch_size, self._coefficient = batch_size, coefficient
        self.fingerprint = pairs.fingerprint

    def at(self, step: int) -> list[Pair]:
        first = step * self._batch_size
        return [self._pairs[self._order.at(place).prompt] for place in range(first, first + self._batch_size)]

    def prepare(self, step: int, groups: PolicyGradient) -> tuple[list[PairBatch], MixedObjective]:
        """Return this rank's micro-batches of a step's pairs, and the objective of both kinds; collective."""
        batches, objective = self._planner.prepare(self.at(step))
        return batches, MixedObjective(groups, objective, self._coefficient)


def open_mixed_pairs(settings: TrainerSettings) -> PairSet | None:
    """Read the pairs among the rows of ``data.train``; None without any. Raises MalformedData and ConfigError."""
    if not settings.algorithm.dpo_coefficient:
        return None
    data, num_wanted = settings.data, settings.dpo.batch_size
    pairs = PairSet(
        data.train_files,
        data=data,
        tokenizer=read_tokenizer(settings),
        max_tokens=settings.trainer.micro_batch_tokens // 2,  # both answers of a pair are in one micro-batch
        skips_prompts=True,
    )
    if len(pairs) < num_wanted:
        raise ConfigError(
            f"data.train has {len(pairs)} pairs that can be trained on (left out: {dict(pairs.dropped)}), and a step has "
            f"dpo.batch_size = {num_wanted}; lower it, or set algorithm.dpo_coefficient = 0"
        )
    return pairs


def pair_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    pair_sums = {name.removeprefix(_PREFIX): value for name, value in sums.items() if name.startswith(_PREFIX)}
    if not pair_sums:
        return {}
    means = mean_metrics(pair_sums, int(pair_sums["num_chosen"]))
    return {
        "pair_loss": pair_sums["loss"],
        "pair_accuracy": means["rewards/accuracies"],
        "pair_margin": means["rewards/margins"],
        "pair_reward_chosen": means["rewards/chosen"],
        "pair_reward_rejected": means["rewards/rejected"],
        "pairs_trained": int(pair_sums["num_chosen"]),
    }
