"""M2PO: the tokens that moved furthest are left out, or ratios are clipped, until a second moment meets a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field

from penstock.trainer.algorithm.corrections.interface import GRPO, Drift, Options, correction
from penstock.trainer.algorithm.lazy_torch import Tensor
from penstock.trainer.algorithm.losses.tokens import MAX_LOG_RATIO

_MOST = MAX_LOG_RATIO**2  # of a (log r)^2


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
        "m2po": {**GRPO, "loss": "ppo_clip", "clip_low": 1.0, "clip_high": 1e6, "m2po_budget": 0.04},
        "m2po_released": {
            **GRPO, "loss": "ppo_clip", "clip_low": 0.3, "clip_high": 0.5, "m2po_budget": 0.04, "m2po_form": "clip",
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


def m2po_limit(
    squares: Tensor, budget: float, sum_over_ranks: Callable[[Sequence[float]], list[float]] = list
) -> float:
    """Return the largest (log r)^2 that stays, where every rank holds some of the batch's squares (algorithm 1).

    Args:
        squares: [n] of this rank's tokens that count.
        budget: What the mean of the squares that stay is below (tau, 0.04 in the paper).
        sum_over_ranks: Sums vectors over the ranks; the default is for one rank.
    """
    squares = squares.detach().double()

    def mean_up_to(limit: float) -> float:
        kept = squares[squares <= limit]
        total, count = sum_over_ranks([float(kept.sum()), float(len(kept))])
        return total / count if count else 0.0

    return _MOST if mean_up_to(_MOST) < budget else _largest_limit(mean_up_to, budget)


def m2po_width(
    squares: Tensor, budget: float, sum_over_ranks: Callable[[Sequence[float]], list[float]] = list
) -> float:
    """Return the tau^2 at which the mean of min((log r)^2, tau^2) is the budget; infinite: nothing to clip.

    This is what M2PO's released code solves for. Arguments as in `m2po_limit`.
    """
    squares = squares.detach().double()

    def mean_at_most(limit: float) -> float:
        total, count = sum_over_ranks([float(squares.clamp(max=limit).sum()), float(len(squares))])
        return total / count if count else 0.0

    return math.inf if mean_at_most(_MOST) <= budget else _largest_limit(mean_at_most, budget)


def _largest_limit(mean: Callable[[float], float], budget: float) -> float:
    """Return the limit below which a mean that grows with it is within the budget, by some sixty halvings."""
    low, high = 0.0, _MOST
    while high - low > 1e-12 * max(high, 1e-6):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if mean(middle) < budget else (low, middle)
    return low


def m2po_clip_widths(width: float, *, floor_low: float, floor_high: float) -> tuple[float, float]:
    """Return the clip (low, high) that goes with a tau^2, never narrower than the floors."""
    if math.isinf(width):
        return 1.0, 1e5
    tau = math.sqrt(width)
    return max(1.0 - math.exp(-tau), floor_low), max(math.exp(tau) - 1.0, floor_high)


def moved_along(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    return ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
