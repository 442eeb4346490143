"""From the rewards of a batch to what each trajectory counts: shaping, advantages, filters, weights; pure.

The order is that of `trainer/reward_shaping.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer import advantages, reward_shaping
from trainer.advantages import AdvantageEstimator, Outcomes
from trainer.algorithm_settings import AlgorithmSettings
from trainer.filters import Skipped, TrajectoryFilter

ESTIMATORS: dict[str, AdvantageEstimator] = {
    "grpo": advantages.grpo,
    "rloo": advantages.rloo,
    "reinforce": advantages.reinforce,
    "reinforce_pp": advantages.reinforce_pp,
    "reinforce_pp_baseline": advantages.reinforce_pp_baseline,
    "opo": advantages.opo,
    "pass_at_k": advantages.pass_at_k,
    "gpg": advantages.gpg,
}


@dataclass(frozen=True, slots=True)
class Scored:
    """One group as credit sees it."""

    rewards: Sequence[float]
    lengths: Sequence[int]  # sampled tokens of each trajectory
    truncated: Sequence[bool]


@dataclass(frozen=True, slots=True)
class Credit:
    """What every trajectory of a batch counts, in the order of its groups."""

    advantages: list[float]
    weights: list[float]  # factor on its tokens' weights; 0: left out, and out of the denominators
    rewards: list[float]  # as shaped
    skipped: Counter[Skipped]


CreditRule = Callable[[Sequence[Scored]], Credit]


def credit_rule(settings: AlgorithmSettings, *, longest: int) -> CreditRule:
    """Return the rule of an algorithm; ``longest`` is rollout.max_new_tokens."""
    estimate = ESTIMATORS[settings.advantage]
    options = {"normalise_by_std": settings.normalise_by_std} if settings.advantage in ("grpo", "pass_at_k") else {}
    buffer = max(1, round(settings.overlong_buffer * longest)) if settings.overlong_buffer else 0
    keeps = TrajectoryFilter(
        drop_zero_advantage=settings.drop_zero_advantage,
        skip_non_positive_advantage=settings.skip_non_positive_advantage,
        minimal_advantage=settings.minimal_advantage,
        mask_truncated=settings.mask_truncated,
    )

    def rule(groups: Sequence[Scored]) -> Credit:
        rewards = torch.tensor([r for g in groups for r in g.rewards], dtype=torch.float64)
        lengths = torch.tensor([n for g in groups for n in g.lengths], dtype=torch.int64)
        index = torch.tensor([number for number, g in enumerate(groups) for _ in g.rewards], dtype=torch.int64)
        if buffer:
            rewards = rewards + reward_shaping.overlong_penalty(
                lengths, longest=longest, buffer=buffer, factor=settings.overlong_factor
            )
        rewards = reward_shaping.clip_symmetric(rewards, settings.reward_clip)
        shaped = rewards
        if settings.reward_norm != "none":
            rewards = reward_shaping.normalise(
                rewards, index if settings.reward_norm == "group" else None,
                shift=settings.reward_shift, scale=settings.reward_scale,
            )  # fmt: skip
        found = estimate(Outcomes(rewards, index, lengths), **options)
        if settings.whiten_advantages:
            found = reward_shaping.whiten(found, weights=lengths)
        found = reward_shaping.clip_symmetric(found, settings.advantage_clip)
        kept = keeps.keep(found.tolist(), [t for g in groups for t in g.truncated])
        weights = torch.zeros_like(found)
        # a batch of which nothing is left keeps everything: its advantages teach nothing, its figures count
        weights[list(kept.places) or slice(None)] = 1.0
        weights = weights * _sample_weights(settings, shaped, index, lengths)
        skipped = kept.skipped if kept.places else Counter[Skipped]()
        return Credit(found.tolist(), weights.tolist(), shaped.tolist(), skipped)

    return rule


def _sample_weights(settings: AlgorithmSettings, rewards: Tensor, index: Tensor, lengths: Tensor) -> Tensor:
    factors = [torch.ones_like(rewards)]
    if settings.difficulty_weight:
        count = int(index.max()) + 1
        sums = rewards.new_zeros(count).index_add(0, index, rewards)
        sizes = rewards.new_zeros(count).index_add(0, index, torch.ones_like(rewards))
        factors.append(reward_shaping.difficulty_weights(1.0 - (sums / sizes)[index]))
    if settings.length_weight:
        factors.append(reward_shaping.length_weights(lengths))
    return reward_shaping.sample_weights(*factors)
