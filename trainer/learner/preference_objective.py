"""The objective of training on pairs: from log-probabilities of a micro-batch to its part of the batch's loss; pure.

The denominators are those of the whole batch, over all micro-batches and ranks: pairs, or tokens of chosen answers for a
cross-entropy. A loss that couples the pairs of a batch is computed on all of them first (`coupled_loss`); its gradients to the
answers' log-probabilities are then the factors of a linear loss, micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.algorithm.batch import MicroBatch, Row, build, plan_micro_batches
from penstock.trainer.algorithm.objective import Outcome, PlainObjective
from penstock.trainer.algorithm.preferences.interface import Divergence, Pairs, WeighedLoss, combined
from penstock.trainer.data.pairs import Ids, Pair


@dataclass(frozen=True, slots=True, eq=False)
class PairBatch(MicroBatch):
    """A micro-batch whose sequences are chosen, rejected, chosen, … of P pairs."""

    num_pairs: int = 0
    references: Tensor | None = None  # [2 P] float64, sums of the reference's log-probabilities
    weighting: Tensor | None = None  # [2 P] float64, factors of each answer on the loss of its pair
    gradients: Tensor | None = None  # [2, 2 P] float64, of a coupled loss to weighed and to plain sums
    loss_share: float = 0.0  # of these pairs in that loss


def plan_pairs(pairs: Sequence[Pair], *, budget_tokens: int, num_shares: int) -> list[list[list[int]]]:
    """Return ``plan[share][micro_batch]`` = numbers of pairs; the padding of both answers is within the budget."""
    return plan_micro_batches([2 * pair.longest for pair in pairs], budget_tokens=budget_tokens, num_ranks=num_shares)


def build_pairs(pairs: Sequence[Pair]) -> PairBatch:
    rows = [
        _row(pair.prompt, answer, other)
        for pair in pairs
        for answer, other in ((pair.chosen, pair.rejected), (pair.rejected, pair.chosen))
    ]
    plain = build(rows)
    held = {field.name: getattr(plain, field.name) for field in fields(MicroBatch)}
    return PairBatch(**held, num_pairs=len(pairs))


def mismatched(pairs: Sequence[Pair]) -> list[Pair]:
    """Return each prompt with the answers of the pair before it, the first with those of the last, as TRL does."""
    before = [*pairs[-1:], *pairs[:-1]]
    return [Pair(pair.prompt, other.chosen, other.rejected) for pair, other in zip(pairs, before, strict=True)]


def answer_sums(logprobs: Tensor, batch: PairBatch, length_alpha: float | None) -> tuple[Tensor, Tensor]:
    """Return each answer's log-probability, [2 P] float64, and the same with tokens of its tail weighed.

    The tail begins at the length of the shorter answer of a pair (LD-DPO, arXiv 2409.06411).
    """
    values = logprobs.double()
    plain = batch.sequences.sum(values)[: 2 * batch.num_pairs]
    if length_alpha is None or not batch.num_pairs:
        return plain, plain
    lengths = batch.sequences.lengths(values)
    shared = lengths.view(-1, 2).amin(dim=1).repeat_interleave(2)
    is_tail = batch.sequences.place() >= batch.sequences.spread(shared)
    weighed = torch.where(is_tail, length_alpha * values, values)
    return plain, batch.sequences.sum(weighed)


def answer_weights(collisions: Tensor, batch: PairBatch) -> Tensor:
    """Return how much of each answer the policy would have sampled itself, [2 P] float64 (WPO, arXiv 2406.11827, eq. 2).

    The exponential of the mean over its tokens of ``log p - log sum p²``; ``collisions`` are both, [2, N].
    """
    values = collisions.double()
    return batch.sequences.mean(values[0] - values[1]).exp()[: 2 * batch.num_pairs]


def _row(prompt: Ids, answer: Ids, other: Ids) -> Row:
    """Return the row of an answer; one that is not there has no trained token, in a row that is computed anyway."""
    token_ids = np.concatenate([prompt, answer if len(answer) else other])
    length = len(token_ids)
    return Row(
        token_ids=token_ids,
        loss_mask=(np.arange(length) >= len(prompt)) & bool(len(answer)),
        behaviour_logprobs=np.zeros(length, dtype=np.float32),
        advantage=0.0,
        weight=0.0,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Log-probabilities of the answers of P pairs, chosen, rejected, chosen, …: every tensor is [2 P] float64."""

    plain: Tensor  # sums over tokens
    weighed: Tensor  # the same with weighed tails
    reference: Tensor  # weighed sums under the reference
    lengths: Tensor
    weights: Tensor | None = None  # of the loss, as factors of both answers; None: 1


@dataclass(frozen=True, slots=True)
class Preference:
    losses: tuple[WeighedLoss, ...]
    divergence: Divergence
    alpha: float
    length_alpha: float | None
    reward_scale: float  # from log-ratios to reported rewards

    def per_pair(self, answers: Answers, *, mean_chosen_tokens: float, kl: float) -> Tensor:
        chosen, rejected = answers.weighed[0::2], answers.weighed[1::2]
        pairs = Pairs(
            chosen=chosen,
            rejected=rejected,
            reference_chosen=answers.reference[0::2],
            reference_rejected=answers.reference[1::2],
            chosen_tokens=answers.lengths[0::2],
            rejected_tokens=answers.lengths[1::2],
            chosen_nll=-answers.plain[0::2] / mean_chosen_tokens,
            divergence=self.divergence,
            alpha=self.alpha,
            kl=kl,
        )
        losses = combined(pairs, self.losses)
        return losses if answers.weights is None else losses * answers.weights[0::2] * answers.weights[1::2]

    def figures(self, answers: Answers) -> dict[str, Tensor]:
        held = answers.weighed.detach()
        rewards = self.reward_scale * (held - answers.reference)
        if any(weighed.loss.averages for weighed in self.losses):
            rewards = self.reward_scale * held / answers.lengths
        is_there = (answers.lengths > 0).double()
        chosen, rejected = rewards[0::2], rewards[1::2]
        return {
            "num_chosen": is_there[0::2].sum(),
            "num_rejected": is_there[1::2].sum(),
            "rewards/chosen": chosen.sum(),
            "rewards/rejected": rejected.sum(),
            "rewards/margins": (chosen - rejected).sum(),
            "rewards/accuracies": (chosen > rejected).double().sum(),
            "logps/chosen": answers.plain.detach()[0::2].sum(),
            "logps/rejected": answers.plain.detach()[1::2].sum(),
        }


def answers_of(logprobs: Tensor, batch: PairBatch, length_alpha: float | None) -> Answers:
    plain, weighed = answer_sums(logprobs, batch, length_alpha)
    reference = torch.zeros_like(plain) if batch.references is None else batch.references.to(plain.device)
    weights = None if batch.weighting is None else batch.weighting.to(plain.device)
    lengths = batch.sequences.lengths(batch.targets.double())[: 2 * batch.num_pairs]
    return Answers(plain, weighed, reference, lengths, weights)


def coupled_loss(
    preference: Preference, answers: Answers, *, mean_chosen_tokens: float, kl: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each pair of a whole batch, and its mean's gradients to weighed and plain sums, each [2 P]."""
    weighed, plain = (tensor.detach().requires_grad_(True) for tensor in (answers.weighed, answers.plain))
    leaves = Answers(plain, weighed, answers.reference, answers.lengths)
    losses = preference.per_pair(leaves, mean_chosen_tokens=mean_chosen_tokens, kl=kl)
    grads = torch.autograd.grad(losses.mean(), (weighed, plain), allow_unused=True)
    gradients = [torch.zeros_like(plain) if tensor is None else tensor for tensor in grads]
    return losses.detach(), gradients[0], gradients[1]


@dataclass(frozen=True, slots=True)
class PreferenceObjective(PlainObjective):
    preference: Preference
    num_pairs: int  # of the whole batch
    mean_chosen_tokens: float
    kl: float = 0.0

    def __call__(self, logprobs: Tensor, batch: MicroBatch, **scores: Tensor) -> Outcome:
        assert isinstance(batch, PairBatch)
        answers = answers_of(logprobs, batch, self.preference.length_alpha)
        if batch.gradients is None:
            losses = self.preference.per_pair(answers, mean_chosen_tokens=self.mean_chosen_tokens, kl=self.kl)
            loss = losses.sum() / self.num_pairs
        else:
            factors = batch.gradients.to(answers.weighed.device)
            linear = (factors[0] * answers.weighed).sum() + (factors[1] * answers.plain).sum()
            loss = linear - linear.detach() + batch.loss_share
        sums: dict[str, Tensor | float] = {"tokens": float(len(logprobs)), **self.preference.figures(answers)}
        return Outcome(loss=loss.float() if batch.num_pairs else logprobs.sum(), sums=sums, maxima={})


def mean_metrics(sums: Mapping[str, float], num_pairs: int) -> dict[str, float]:
    counts = {"chosen": sums["num_chosen"], "rejected": sums["num_rejected"]}
    if set(counts.values()) == {float(num_pairs)}:
        return {name: value / num_pairs for name, value in sums.items() if "/" in name}
    means = {
        name: value / counts[side]
        for name, value in sums.items()
        if (side := name.rpartition("/")[2]) in counts and "/" in name and counts[side]
    }
    if all(counts.values()):
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    return means
