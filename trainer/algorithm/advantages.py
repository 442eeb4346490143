"""From rewards to advantages: what each trajectory, or each of its tokens, is credited with; pure.

The estimators of the first part give one advantage per trajectory, which the loss spreads over its
sampled tokens; they see the whole batch as `Outcomes`. Those of the second part need a reward or a
value per token. Another estimator is another function, named in `trainer/algorithm/presets.py`.

Groups of one, groups of equal rewards and trajectories without tokens give 0 or a plain reward, as each
function says; never NaN, and never rounding noise blown up by a division.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.trainer.algorithm.losses.tokens import Sequences
from penstock.trainer.algorithm.reward_shaping import whiten

GRPO_EPSILON = 1e-6  # verl's; TRL uses 1e-4
_FLAT = 1e-9  # rewards closer together than this, relative to their size, are one and the same reward


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """One reward per trajectory, for a batch of B of them."""

    rewards: Tensor  # [B] float64, finite
    groups: Tensor  # [B] int64, equal for the completions of one prompt
    lengths: Tensor  # [B] sampled tokens of each
    baselines: Tensor | None = None  # [B] reward of the prompt's greedy completion, for ReMax

    @property
    def group_index(self) -> tuple[Tensor, int]:
        """Groups renumbered 0..G-1 [B], and G."""
        names, index = torch.unique(self.groups, return_inverse=True)
        return index, len(names)


AdvantageEstimator = Callable[..., Tensor]


def _by_group(outcomes: Outcomes, values: Tensor) -> Tensor:
    """Mean of values by group, given back to every member, [B]."""
    index, count = outcomes.group_index
    return _spread_mean(values, index, count)


def _spread_mean(values: Tensor, index: Tensor, count: int) -> Tensor:
    sums = values.new_zeros(count).index_add(0, index, values)
    sizes = values.new_zeros(count).index_add(0, index, torch.ones_like(values))
    return (sums / sizes.clamp(min=1.0))[index]


def _group_sizes(outcomes: Outcomes) -> Tensor:
    index, count = outcomes.group_index
    ones = torch.ones_like(outcomes.rewards)
    return ones.new_zeros(count).index_add(0, index, ones)[index]


def informative(outcomes: Outcomes) -> Tensor:
    """Return which trajectories stand in a group whose rewards differ, [B] bool."""
    index, count = outcomes.group_index
    rewards = outcomes.rewards
    top = rewards.new_full((count,), float("-inf")).scatter_reduce(0, index, rewards, "amax")
    low = rewards.new_full((count,), float("inf")).scatter_reduce(0, index, rewards, "amin")
    size = rewards.new_zeros(count).scatter_reduce(0, index, rewards.abs(), "amax")
    return ((top - low) > _FLAT * size)[index]


def _group_std(outcomes: Outcomes) -> Tensor:
    """Unbiased standard deviation of each member's group, [B]; 0 for a group of one."""
    centred = outcomes.rewards - _by_group(outcomes, outcomes.rewards)
    sizes = _group_sizes(outcomes)
    return (_by_group(outcomes, centred.square()) * sizes / (sizes - 1.0).clamp(min=1.0)).sqrt()


def grpo(outcomes: Outcomes, *, normalise_by_std: bool = True) -> Tensor:
    """Group-relative advantages (arXiv 2402.03300; without the division: Dr. GRPO, arXiv 2503.20783).

    ``A_i = (R_i - mean(R)) / (std(R) + 1e-6)`` over the group, with the unbiased standard deviation.
    A group of one, or one whose rewards are all equal, teaches nothing: its advantages are 0 (verl
    gives a group of one its own reward).

    Returns:
        [B] advantages; they sum to 0 in every group.
    """
    centred = outcomes.rewards - _by_group(outcomes, outcomes.rewards)
    scaled = centred / (_group_std(outcomes) + GRPO_EPSILON) if normalise_by_std else centred
    return torch.where(informative(outcomes), scaled, torch.zeros_like(scaled))


def rloo(outcomes: Outcomes) -> Tensor:
    """Leave-one-out baseline (arXiv 2402.14740), ``R_i - mean of the others``, [B]; a group of one gets 0.

    verl gives a group of one its own reward, which pushes every such sample up or down unseen.
    """
    sizes = _group_sizes(outcomes)
    centred = outcomes.rewards - _by_group(outcomes, outcomes.rewards)
    return centred * sizes / (sizes - 1.0).clamp(min=1.0)


def reinforce(outcomes: Outcomes) -> Tensor:
    """No baseline: the reward itself, [B]."""
    return outcomes.rewards.clone()


def reinforce_pp(outcomes: Outcomes) -> Tensor:
    """REINFORCE++ with one reward per trajectory (arXiv 2501.03262): whitened over all tokens of the batch, [B]."""
    return whiten(outcomes.rewards, weights=outcomes.lengths)


def reinforce_pp_baseline(outcomes: Outcomes) -> Tensor:
    """REINFORCE++-baseline (arXiv 2501.03262): group mean off, then whitened over all tokens of the batch, [B]."""
    centred = outcomes.rewards - torch.where(
        _group_sizes(outcomes) > 1, _by_group(outcomes, outcomes.rewards), torch.zeros_like(outcomes.rewards)
    )
    return whiten(centred, weights=outcomes.lengths)


def remax(outcomes: Outcomes) -> Tensor:
    """ReMax (arXiv 2310.10505): the reward of the prompt's greedy completion is the baseline, [B]."""
    if outcomes.baselines is None:
        raise ValueError("remax needs the reward of a greedy completion for every prompt, and there is none")
    return outcomes.rewards - outcomes.baselines


def opo(outcomes: Outcomes) -> Tensor:
    """OPO (arXiv 2505.23585): the group's baseline is its mean reward weighted by length, [B]; a group of one: 0.

    verl gives a group of one its own reward.
    """
    index, count = outcomes.group_index
    lengths = outcomes.lengths.to(outcomes.rewards.dtype)
    weighted = lengths.new_zeros(count).index_add(0, index, lengths * outcomes.rewards)
    total = lengths.new_zeros(count).index_add(0, index, lengths)
    return outcomes.rewards - (weighted / total.clamp(min=1.0))[index].where(total[index] > 0, outcomes.rewards)


def gpg(outcomes: Outcomes, *, normaliser: float = 1.0) -> Tensor:
    """GPG (arXiv 2504.02546): ``alpha (R_i - mean) / normaliser`` with alpha = trajectories / nonzero rewards, [B]."""
    nonzero = int((outcomes.rewards != 0).sum())
    alpha = len(outcomes.rewards) / max(nonzero, 1)
    return alpha * (outcomes.rewards - _by_group(outcomes, outcomes.rewards)) / normaliser


def pass_at_k(outcomes: Outcomes, *, normalise_by_std: bool = True) -> Tensor:
    """Pass@k training (arXiv 2503.19595): only the best of a group learns, by its lead on the second, [B].

    A group of one gets 0; of several equally good ones the first is the best and leads by 0.
    """
    advantages = torch.zeros_like(outcomes.rewards)
    std, differing = _group_std(outcomes), informative(outcomes)
    for group in torch.unique(outcomes.groups):
        members = torch.nonzero(outcomes.groups == group).flatten()
        if len(members) < 2 or not differing[members[0]]:
            continue
        best = torch.topk(outcomes.rewards[members], 2)
        winner = members[best.indices[0]]
        lead = best.values[0] - best.values[1]
        advantages[winner] = lead / (std[winner] + GRPO_EPSILON) if normalise_by_std else lead
    return advantages


def gdpo(parts: list[Tensor], outcomes: Outcomes, *, weights: list[float]) -> Tensor:
    """GDPO (arXiv 2601.05242): every part of the reward normalised in its group, summed, whitened, [B].

    Args:
        parts: [B] each, the parts of the reward.
        outcomes: Groups and lengths; its rewards are not read.
        weights: One for each part.
    """
    total = torch.zeros_like(outcomes.rewards)
    for part, weight in zip(parts, weights, strict=True):
        total = total + weight * grpo(Outcomes(part.to(total.dtype), outcomes.groups, outcomes.lengths))
    return whiten(total, weights=outcomes.lengths)


# Per token: rewards [N], in the order of their sequences.


def reward_to_go(rewards: Tensor, sequences: Sequences, *, gamma: float = 1.0) -> Tensor:
    """Discounted sum of this and all later rewards of the sequence, [N]: REINFORCE's return."""
    rows, _ = sequences.to_rows(rewards)
    running = rows.new_zeros(len(rows))
    returns = torch.empty_like(rows)
    for place in range(rows.shape[1] - 1, -1, -1):
        running = rows[:, place] + gamma * running
        returns[:, place] = running
    return sequences.from_rows(returns)


def reinforce_pp_tokens(rewards: Tensor, sequences: Sequences, *, gamma: float = 1.0) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with a reward per token, the KL inside: advantages and returns, [N] each."""
    returns = reward_to_go(rewards, sequences, gamma=gamma)
    return whiten(returns), returns


def remax_tokens(rewards: Tensor, sequences: Sequences, baselines: Tensor) -> tuple[Tensor, Tensor]:
    """ReMax with a reward per token; ``baselines`` [S]. Advantages and returns, [N] each."""
    returns = reward_to_go(rewards, sequences)
    return returns - sequences.spread(baselines), returns


def gae(
    rewards: Tensor, values: Tensor, sequences: Sequences, *, gamma: float, lam: float, whitened: bool = True
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438): advantages and returns, [N] each.

    ``delta_t = R_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lam A_{t+1}``, over the sampled
    tokens: a tool's reply in between is jumped over. Returns are A + V, before whitening.

    Args:
        rewards: [N].
        values: [N] of the critic, without gradient.
        sequences: Which token belongs where.
        gamma: Discount.
        lam: 1: low bias, high variance; 0: the reverse.
        whitened: Whiten the advantages over the batch, as verl does.
    """
    reward_rows, _ = sequences.to_rows(rewards)
    value_rows, _ = sequences.to_rows(values)
    advantages = torch.empty_like(reward_rows)
    running = reward_rows.new_zeros(len(reward_rows))
    following = torch.zeros_like(running)
    for place in range(reward_rows.shape[1] - 1, -1, -1):
        delta = reward_rows[:, place] + gamma * following - value_rows[:, place]
        running = delta + gamma * lam * running
        advantages[:, place] = running
        following = value_rows[:, place]
    flat = sequences.from_rows(advantages)
    return (whiten(flat) if whitened else flat), flat + values


def optimal_token_baseline(
    rewards: Tensor,
    sequences: Sequences,
    groups: Tensor,
    logprobs: Tensor,
    sum_squared_probabilities: Tensor,
    *,
    zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """Baseline of least variance for each place in a group (verl `optimal_token_baseline`): advantages, returns.

    At place t: ``B_t = sum(G_t W_t) / sum(W_t)`` over the group's sequences that reach it, with the return
    G_t and ``W_t = sum over j <= t of (1 - 2 p_j + sum over the vocabulary of p^2)``. A group of one has no
    baseline. Where only the longest sequence is left, ``zero_tail`` sets its baseline to 0.

    Args:
        rewards: [N].
        sequences: Which token belongs where.
        groups: [S] group of each sequence.
        logprobs: [N] of the policy that the weights are about.
        sum_squared_probabilities: [N].
        zero_tail: See above.
    """
    returns = reward_to_go(rewards, sequences)
    rows, mask = sequences.to_rows(returns)
    energy, _ = sequences.to_rows(1.0 - 2.0 * logprobs.exp() + sum_squared_probabilities)
    energy = energy.cumsum(1) * mask
    baselines = torch.zeros_like(rows)
    lengths = mask.sum(1)
    for group in torch.unique(groups):
        members = torch.nonzero((groups == group) & (lengths > 0)).flatten()
        if len(members) < 2:
            continue
        baseline = (rows[members] * energy[members]).sum(0) / (energy[members].sum(0) + 1e-8)
        baselines[members] = baseline
        longest, second = lengths[members].topk(2).values.tolist()
        if zero_tail and longest > second:
            baselines[members[lengths[members].argmax()], second:] = 0.0
    return sequences.from_rows(rows - baselines), returns
