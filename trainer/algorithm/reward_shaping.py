"""Shaping of rewards before, and of advantages after, the estimator; pure.

The order is fixed, and each step is off unless it is set:

1. `overlong_penalty`, `efficiency`, then `clip_symmetric` of the reward. 2. `RunningMoments`: divide by the running
standard deviation, after subtracting the running mean where that is set. 3. `normalise`: by batch, group, kind of task
or running moments; mean only (shift) or deviation only (scale) where set; `asym_clip` of the result. 4. `kl_in_reward`.
5. `whiten` of the token rewards, before GAE. 6. The estimator (`trainer/algorithm/estimators/`). 7. `whiten` of the
advantages. 8. `clip_symmetric` of the advantages. Then `sample_weights` by difficulty and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.losses.tokens import Sequences

_EPSILON = 1e-6
_WHITEN_EPSILON = 1e-8
_FLAT = 1e-12  # a variance below this, relative to the mean square, is rounding


def clip_symmetric(values: Tensor, limit: float | None) -> Tensor:
    return values if limit is None else values.clamp(-limit, limit)


@dataclass(slots=True)
class RunningMoments:
    count: float = 0.0
    mean: float = 0.0
    sum_squares: float = 0.0  # of deviations from the mean

    def update(self, values: Tensor) -> None:
        if not len(values):
            return
        batch_mean, num = float(values.mean()), float(len(values))
        batch_squares = float((values - values.mean()).square().sum())
        gap, total = batch_mean - self.mean, self.count + num
        self.sum_squares += batch_squares + gap * gap * self.count * num / total
        self.mean += gap * num / total
        self.count = total

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 while fewer than two values were seen or all are equal."""
        variance = self.sum_squares / (self.count - 1.0) if self.count > 1.0 else 0.0
        return variance**0.5 if variance > _FLAT * max(self.mean**2, _EPSILON) else 1.0

    def normalise(self, values: Tensor, *, shift: bool = True, scale: bool = True) -> Tensor:
        shifted = values - self.mean if shift else values
        return shifted / self.std if scale else shifted


def normalise(rewards: Tensor, groups: Tensor | None = None, *, shift: bool = True, scale: bool = True) -> Tensor:
    """Subtract the mean and divide by the unbiased standard deviation, over groups or (None) the batch, [B]."""
    index = torch.zeros_like(rewards, dtype=torch.int64)
    count = 1
    if groups is not None:
        names, index = torch.unique(groups, return_inverse=True)
        count = len(names)
    sizes = rewards.new_zeros(count).index_add(0, index, torch.ones_like(rewards))
    means = rewards.new_zeros(count).index_add(0, index, rewards) / sizes.clamp(min=1.0)
    centred = rewards - means[index]
    variance = rewards.new_zeros(count).index_add(0, index, centred.square()) / (sizes - 1.0).clamp(min=1.0)
    flat = variance <= _FLAT * means.square()
    divisor = torch.where(flat, torch.ones_like(variance), variance.sqrt() + _EPSILON)
    shifted = torch.where(flat[index], torch.zeros_like(centred), centred) if shift else rewards
    return shifted / divisor[index] if scale else shifted


def asym_clip(normalised: Tensor) -> Tensor:
    """Limit normalised rewards to [-1, 3], [B] (ROLL's agentic `asym_clip`): a rare success keeps a large reward."""
    return normalised.clamp(-1.0, 3.0)


def whiten(values: Tensor, *, weights: Tensor | None = None, shift: bool = True) -> Tensor:
    """Whiten to variance 1 with ``(x - mean) / sqrt(variance + 1e-8)``, the variance unbiased.

    Args:
        values: [n]; with ``weights`` [n] each value counts that often (a trajectory's advantage once per token).
        weights: How often each value counts; None: once.
        shift: Subtract the mean; False adds it back after the division.

    Returns:
        [n]; all 0 (with shift) where fewer than two values count or all are equal.
    """
    counts = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    total = counts.sum()
    if float(total) < 1.0:
        return values.clone()
    mean = (values * counts).sum() / total
    variance = ((values - mean).square() * counts).sum() / (total - 1.0).clamp(min=1.0)
    if float(variance) <= _FLAT * float(mean.square()):
        whitened = torch.zeros_like(values)
    else:
        whitened = (values - mean) / (variance + _WHITEN_EPSILON).sqrt()
    return whitened if shift else whitened + mean


def kl_in_reward(scores: Tensor, kl: Tensor, sequences: Sequences, *, coefficient: float) -> Tensor:
    """Return token rewards [N]: ``-coefficient kl``, plus the trajectory's score, [S], at its last one."""
    rewards = -coefficient * kl.detach()
    lengths = torch.bincount(sequences.index, minlength=sequences.count)
    last = sequences.place() == (lengths - 1)[sequences.index]
    return rewards + torch.where(last, sequences.spread(scores).to(rewards.dtype), torch.zeros_like(rewards))


def overlong_penalty(lengths: Tensor, *, longest: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Return DAPO's soft penalty of long answers (arXiv 2503.14476, eq. 13), [B], in [-factor, 0].

    0 up to ``longest - buffer`` tokens, then linear down to ``-factor`` at ``longest`` and beyond. verl's
    and AReaL's keep falling beyond; TRL's and Penstock's do not.
    """
    if buffer < 1:
        raise ValueError(f"the buffer of the overlong penalty must be at least 1 token, got {buffer}")
    beyond = (lengths.to(torch.float64) - (longest - buffer)) / buffer
    return -factor * beyond.clamp(0.0, 1.0)


def efficiency(
    rewards: Tensor, turns: Tensor, groups: Tensor, *, success: float, spread: float, failure_spread: float
) -> Tensor:
    """Return AgentRL's `efficient_rewarding`: zero-sum ranks by turns among a group's successes, and failures, [B].

    Of n successes the one with the fewest turns gains ``spread / 2`` and the one with the most loses it; those with
    equal turns share their mean rank. Among failures it is the other way round with ``failure_spread``: giving up
    early loses. One that is alone gets 0. AgentRL: both 0.2, a success at 0.5.

    Args:
        rewards: [B].
        turns: [B] int64, answers of each.
        groups: [B] int64.
        success: A reward from which on a trajectory is a success.
        spread: Between the first and the last success.
        failure_spread: Between the last and the first failure.
    """
    adjustments = torch.zeros_like(rewards)
    is_success = rewards >= success
    for group in torch.unique(groups):
        for chosen, sign in ((is_success, -spread), (~is_success, failure_spread)):
            places = torch.nonzero((groups == group) & chosen)[:, 0]
            if len(places) < 2:
                continue
            member_turns = turns[places]
            fewer, equal = (
                (member_turns[None, :] < member_turns[:, None]).sum(1),
                (member_turns[None, :] == member_turns[:, None]).sum(1),
            )
            rank = fewer.to(rewards.dtype) + (equal.to(rewards.dtype) - 1.0) / 2.0
            last = len(places) - 1.0
            adjustments[places] = sign * (rank - last / 2.0) / last
    return adjustments


def difficulty_weights(difficulty: Tensor) -> Tensor:
    """Return ``0.5 + 1.5 d`` for a difficulty d in [0, 1] (ROLL's `difficulty_loss_weight`), [B]."""
    return 0.5 + 1.5 * difficulty.clamp(0.0, 1.0)


def length_weights(lengths: Tensor) -> Tensor:
    """Return ``1.5 - minmax(length)``: short answers weigh 1.5, the longest 0.5 (ROLL's `length_loss_weight`), [B]."""
    lengths = lengths.to(torch.float64)
    span = lengths.max() - lengths.min() if len(lengths) else torch.zeros(())
    return torch.ones_like(lengths) if float(span) == 0.0 else 1.5 - (lengths - lengths.min()) / span


def sample_weights(*factors: Tensor) -> Tensor:
    product = torch.stack(factors).prod(0)
    total = product.sum()
    return product * len(product) / total if float(total) > 0.0 else torch.ones_like(product)


def numbered(names: Sequence[str]) -> Tensor:
    """Number names in order of their first appearance, [B] int64: rewards with equal numbers are compared."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names], dtype=torch.int64)
