"""Advantages that differ by token, from a critic's values; pure, over all micro-batches of all ranks.

The plan gives every trajectory, or every turn of an episode's row, its shaped reward in place of an advantage. Here it
becomes the reward of the last token of the trajectory or turn, GAE turns rewards and values into advantages and returns, and the advantages
are whitened and limited over the whole batch. A sequence is whole in one micro-batch; whether rows share a
prompt makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.estimators.gae import gae_tokens
from penstock.trainer.algorithm.kl import AnyKlForm, kl_estimate
from penstock.trainer.algorithm.reward_shaping import clip_symmetric, kl_in_reward

SumOverRanks = Callable[[Sequence[float]], list[float]]  # of a vector of figures
_EPSILON = 1e-8
_FLAT = 1e-12  # a variance below this, relative to the mean square, is rounding


@dataclass(frozen=True, slots=True, eq=False)
class ValueTargets:
    values: Tensor  # [N] float32, of the critic before it learned from the batch
    returns: Tensor  # [N] float32
    weight: float  # of each token: 1 / tokens of the whole batch


@dataclass(frozen=True, slots=True)
class CreditedBatch:
    micro_batches: list[MicroBatch]
    targets: list[ValueTargets]
    figures: dict[str, float]  # over all ranks


@dataclass(frozen=True, slots=True)
class TokenCredit:
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    clip: float | None = None
    kl_form: AnyKlForm = "k1"  # of the KL to the reference in every token's reward
    whiten_rewards: bool = False  # the rewards of all tokens of the batch, before GAE

    def __call__(
        self,
        micro_batches: Sequence[MicroBatch],
        values: Sequence[Tensor],
        sum_over_ranks: SumOverRanks = list,
        *,
        kl_coefficient: float = 0.0,
    ) -> CreditedBatch:
        """Return a batch with an advantage for every token.

        Args:
            micro_batches: Of this rank; their advantages are the rewards of whole trajectories.
            values: [N] float32 of each, without gradient.
            sum_over_ranks: Sums vectors over the ranks; the default is for one rank.
            kl_coefficient: Of the KL from the sampler to the reference, in every token's reward; 0: none.
        """
        rewards = [self._rewards(batch, kl_coefficient) for batch in micro_batches]
        if self.whiten_rewards:
            _, mean, variance = moments(rewards, sum_over_ranks)
            rewards = [_whitened(some, mean, variance) for some in rewards]
        found = [
            gae_tokens(some, value, batch.sequences, gamma=self.gamma, lam=self.lam, whitened=False)
            for some, value, batch in zip(rewards, values, micro_batches, strict=True)
        ]
        count, mean, variance = moments([advantages for advantages, _ in found], sum_over_ranks)
        weight = 1.0 / max(count, 1.0)
        credited = [
            replace(batch, advantages=self._finished(advantages, mean, variance))
            for batch, (advantages, _) in zip(micro_batches, found, strict=True)
        ]
        targets = [ValueTargets(value, returns, weight) for value, (_, returns) in zip(values, found, strict=True)]
        return CreditedBatch(credited, targets, value_figures(targets, sum_over_ranks))

    def _rewards(self, batch: MicroBatch, kl_coefficient: float) -> Tensor:
        """Return every token's reward, [N]: minus its KL, plus the turn's at its last token."""
        scores = batch.turns.maximum(batch.advantages)  # equal for all tokens of a turn
        kl = self._kl(batch) if kl_coefficient else torch.zeros_like(batch.advantages)
        return kl_in_reward(scores, kl, batch.turns, coefficient=kl_coefficient)

    def _kl(self, batch: MicroBatch) -> Tensor:
        if self.kl_form == "full":
            if batch.reference_kl is None:
                raise ValueError(
                    "algorithm.reward_kl_form is full, and the micro-batch carries no KL over the vocabulary"
                )
            return batch.reference_kl
        if batch.reference_logprobs is None:
            raise ValueError(
                "a KL in the reward needs the reference's log-probabilities, and the micro-batch carries none"
            )
        return kl_estimate(batch.behaviour_logprobs, batch.reference_logprobs.cpu(), self.kl_form)

    def _finished(self, advantages: Tensor, mean: float, variance: float) -> Tensor:
        return clip_symmetric(_whitened(advantages, mean, variance) if self.whiten else advantages, self.clip)


def _whitened(values: Tensor, mean: float, variance: float) -> Tensor:
    if variance <= _FLAT * mean * mean:
        return torch.zeros_like(values)
    return (values - mean) / math.sqrt(variance + _EPSILON)


def moments(parts: Sequence[Tensor], sum_over_ranks: SumOverRanks = list) -> tuple[float, float, float]:
    count, total = sum_over_ranks(
        [float(sum(len(part) for part in parts)), sum(float(part.double().sum()) for part in parts)]
    )
    mean = total / max(count, 1.0)
    (squares,) = sum_over_ranks([sum(float((part.double() - mean).square().sum()) for part in parts)])
    return count, mean, squares / max(count - 1.0, 1.0)


def value_figures(targets: Sequence[ValueTargets], sum_over_ranks: SumOverRanks = list) -> dict[str, float]:
    """Return how well the critic predicted the batch before it learned from it.

    ``explained_variance`` is 1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 one that
    predicts the mean alone, below 0 one that is worse than that; 0 where all returns are equal.
    """
    count, mean_return, spread = moments([target.returns for target in targets], sum_over_ranks)
    _, mean_error, unexplained = moments([target.returns - target.values for target in targets], sum_over_ranks)
    if count < 1.0:
        return {}
    is_flat = spread <= _FLAT * mean_return * mean_return
    return {
        "value_mean": mean_return - mean_error,
        "return_mean": mean_return,
        "explained_variance": 0.0 if is_flat else 1.0 - unexplained / spread,
    }
