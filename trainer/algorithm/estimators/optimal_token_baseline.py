"""The baseline of least variance for each place in a group; not registered, since it reads probabilities by token."""

from __future__ import annotations

from penstock.trainer.algorithm.estimators.reinforce import reward_to_go
from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.losses.tokens import Sequences


def optimal_token_baseline(
    rewards: Tensor,
    sequences: Sequences,
    groups: Tensor,
    logprobs: Tensor,
    sum_squared_probabilities: Tensor,
    *,
    zero_tail: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns [N] with the baseline of least variance for each place (verl).

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
