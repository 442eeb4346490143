"""M2PO: the tokens that moved furthest are left out, or ratios are clipped, until a second moment meets a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from penstock.trainer.algorithm.corrections.interface import Drift, Options, correction
from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.losses.tokens import MAX_LOG_RATIO


class M2poOptions(Options):
    m2po_budget: float | None = Field(
        default=None,
        gt=0.0,
        description="Tokens that moved furthest are left out until the mean of their squared log-ratios is below this; "
        "one more forward pass; none: off.",
    )
    m2po_form: Literal["mask", "clip"] = Field(
        default="mask",
        description="How m2po_budget is met: the paper leaves tokens out, the released code clips ratios at what the "
        "batch sets, at least clip_low and clip_high wide.",
    )


@correction(
    options=M2poOptions,
    source="arXiv 2510.01161",
    switch="m2po_budget",
    presets={
        "m2po": {
            "advantage": "grpo", "normalise_by_std": True, "loss": "ppo_clip", "clip_low": 1.0, "clip_high": 1e6,
            "m2po_budget": 0.04, "aggregation": "token-mean",
        },
        "m2po_released": {
            "advantage": "grpo", "normalise_by_std": True, "loss": "ppo_clip", "clip_low": 0.3, "clip_high": 0.5,
            "m2po_budget": 0.04, "m2po_form": "clip", "aggregation": "token-mean",
        },
    },
)  # fmt: skip
def m2po(drift: Drift, *, m2po_budget: float, m2po_form: str) -> Tensor | None:
    """Leave out the tokens that moved furthest, or clip ratios at what the batch sets, until a budget is met.

    ``drift.drift_limit``, found over the whole batch, is what meets the budget. The clip form leaves no token out:
    the objective sets the loss's clip instead.
    """
    if m2po_form == "clip":
        return None
    limit = 0.0 if drift.drift_limit is None else drift.drift_limit
    return ~(moved_along(drift.to_behaviour, drift.advantages) & (drift.to_behaviour.square() > limit))


def m2po_mask(log_ratio: Tensor, *, budget: float, among: Tensor | None = None) -> Tensor:
    """Drop the largest (log r)^2 until their mean is within the budget (algorithm 1).

    Wants the whole batch. The paper looks only at tokens that have moved the way their advantage pushes
    (`moved_along`); AReaL at all.

    Args:
        log_ratio: [N].
        budget: Largest mean of the squares that stay (tau, 0.04 in the paper).
        among: [N] bool, the tokens that count and may be dropped; None: all.

    Returns:
        [N] bool, what stays.
    """
    squares = log_ratio.detach().square()
    among = torch.ones_like(squares, dtype=torch.bool) if among is None else among
    chosen = torch.nonzero(among).flatten()
    keep = torch.ones_like(among)
    if not len(chosen):
        return keep
    order = torch.argsort(squares[chosen], descending=True)
    ordered = squares[chosen][order]
    remaining = ordered.flip(0).cumsum(0).flip(0) / torch.arange(len(ordered), 0, -1, device=ordered.device)
    within = torch.nonzero(remaining < budget).flatten()
    num_dropped = int(within[0]) if len(within) else len(ordered) - 1
    keep[chosen[order[:num_dropped]]] = False
    return keep


def m2po_limit(
    squares: Tensor, budget: float, sum_over_ranks: Callable[[Sequence[float]], list[float]] = list
) -> float:
    """Return the largest (log r)^2 that `m2po_mask` keeps, where every rank holds some of the batch's squares.

    The mean of the squares up to a limit grows with the limit, so bisection finds it, with one sum over
    the ranks for each of some sixty halvings.

    Args:
        squares: [n] of this rank's tokens that count.
        budget: Largest mean of what stays.
        sum_over_ranks: Sums vectors over the ranks; the default is for one rank.
    """
    squares = squares.detach().double()

    def mean_up_to(limit: float) -> float:
        kept = squares[squares <= limit]
        total, count = sum_over_ranks([float(kept.sum()), float(len(kept))])
        return total / count if count else 0.0

    low, high = 0.0, MAX_LOG_RATIO**2
    if mean_up_to(high) < budget:
        return high
    while high - low > 1e-12 * max(high, 1e-6):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if mean_up_to(middle) < budget else (low, middle)
    return low


def m2po_width(
    squares: Tensor, budget: float, sum_over_ranks: Callable[[Sequence[float]], list[float]] = list
) -> float:
    """Return the tau^2 of `m2po_clip` where every rank holds some of the batch's squares; infinite: nothing to clip.

    Arguments as in `m2po_limit`.
    """
    squares = squares.detach().double()

    def mean_at_most(limit: float) -> float:
        total, count = sum_over_ranks([float(squares.clamp(max=limit).sum()), float(len(squares))])
        return total / count if count else 0.0

    low, high = 0.0, MAX_LOG_RATIO**2
    if mean_at_most(high) <= budget:
        return math.inf
    while high - low > 1e-12 * max(high, 1e-6):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if mean_at_most(middle) < budget else (low, middle)
    return low


def m2po_clip_widths(width: float, *, floor_low: float, floor_high: float) -> tuple[float, float]:
    """Return the clip (low, high) that goes with a tau^2, never narrower than the floors."""
    if math.isinf(width):
        return 1.0, 1e5
    tau = math.sqrt(width)
    return max(1.0 - math.exp(-tau), floor_low), max(math.exp(tau) - 1.0, floor_high)


def m2po_clip(
    log_ratio: Tensor, advantages: Tensor, *, budget: float, floor_low: float = 0.3, floor_high: float = 0.5
) -> tuple[float, float]:
    """Return the clip (low, high) that M2PO's released code solves for, over the whole batch.

    tau is the limit at which the mean of ``min((log r)^2, tau^2)`` over the tokens that moved the way their
    advantage pushes equals the budget; the clip is [exp(-tau), exp(tau)], but never narrower than the floors.
    """
    squares = log_ratio.detach().square()[moved_along(log_ratio, advantages)].sort().values
    if not len(squares) or float(squares.mean()) <= budget:
        return 1.0, 1e5
    below = torch.cat([squares.new_zeros(1), squares.cumsum(0)[:-1]])
    left = torch.arange(len(squares), 0, -1, device=squares.device)
    level = (budget * len(squares) - below) / left  # the tau^2 that fits if squares below this one stay whole
    fits = torch.nonzero(level <= squares).flatten()
    return m2po_clip_widths(max(float(level[fits[0]]), 0.0), floor_low=floor_low, floor_high=floor_high)


def moved_along(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
