"""What stale and mismatched data need: importance weights, rejections, trust regions; pure.

How far data are from the policy in training is measured in `trainer/algorithm/mismatch.py`.

Everything here is detached. A weight multiplies a token's loss **before** aggregation, and a rejected
token weighs 0: the denominators keep counting it, so that a batch half of which is rejected moves the
weights half as far.

Ratios come at four levels. With a per-token log-ratio of spread sigma and T tokens:

| level       | log-weight of a sequence | its spread      |                                               |
|-------------|--------------------------|-----------------|-----------------------------------------------|
| `token`     | each token's own         | sigma           |                                               |
| `sequence`  | sum                      | sigma sqrt(T)   | unbiased; collapses with length               |
| `geometric` | mean                     | sigma / sqrt(T) | blind to staleness when T is large            |
| `root`      | sum / sqrt(T)            | sigma           | the same meaning at every length (our choice) |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from penstock.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, Sequences

Level = Literal["token", "sequence", "geometric", "root"]
Bound = Literal["truncate", "clip", "mask"]
Statistic = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip


def log_weights(log_ratio: Tensor, sequences: Sequences, level: Level) -> Tensor:
    """Return the log-weight at one level for every token, [N], limited to ±20.

    Args:
        log_ratio: [N] log of the newer over the older policy.
        sequences: Which token belongs where.
        level: See the table above.
    """
    log_ratio = log_ratio.detach()
    if level == "token":
        combined = log_ratio
    elif level == "geometric":
        combined = sequences.spread(sequences.mean(log_ratio))
    else:
        total = sequences.sum(log_ratio)
        if level == "root":
            total = total / sequences.lengths(log_ratio).clamp(min=1.0).sqrt()
        combined = sequences.spread(total)
    return combined.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_weights(
    log_ratio: Tensor,
    sequences: Sequences,
    *,
    level: Level,
    bound: Bound,
    high: float,
    low: float = 0.0,
    normalise: bool = False,
) -> Tensor:
    """Return bounded importance weights, one per token, [N].

    `truncate`: min(w, high), truncated importance sampling (TIS). `clip`: also at least ``low``.
    `mask`: w inside [low, high] and 0 outside: IcePop (arXiv 2510.18855) at token level, masked
    importance sampling at sequence level.

    Args:
        log_ratio: [N] proximal or current minus behaviour log-probabilities.
        sequences: Which token belongs where.
        level: See the module.
        bound: What happens outside the band.
        high: Upper end of the band.
        low: Lower end.
        normalise: Divide by the mean weight of the tokens given (of the sequences, above token level).
    """
    weights = log_weights(log_ratio, sequences, level).exp()
    if bound == "mask":
        weights = weights * ((weights >= low) & (weights <= high))
    else:
        weights = weights.clamp(low if bound == "clip" else 0.0, high)
    if not normalise or not len(weights):
        return weights
    if level == "token":
        mean = weights.mean()
    else:
        present = sequences.lengths(weights) > 0
        mean = sequences.mean(weights)[present].mean()
    return weights / mean if mean > 1e-8 else weights


def divergence(log_ratio: Tensor, form: Literal["k1", "k2", "k3"]) -> Tensor:
    """Return -x, x^2 / 2 or exp(x) - 1 - x of a log-ratio x = log(newer / older), [N]."""
    log_ratio = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match form:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            return log_ratio.expm1() - log_ratio


def inside(
    log_ratio: Tensor, sequences: Sequences, statistic: Statistic, *, high: float, low: float | None = None
) -> Tensor:
    """Return which tokens survive a rejection by divergence, [N] bool (names as in verl).

    The k1 statistics are ``-log r``, so their band, given as ratios, bounds 1 / r; the others must not be
    above ``high``.

    Args:
        log_ratio: [N] proximal minus behaviour log-probabilities.
        sequences: Which token belongs where.
        statistic: Divergence, per token or combined over the sequence.
        high: Upper bound; a ratio for k1.
        low: Lower bound of k1, a ratio; None: 1 / high.
    """
    scope, form = statistic.rsplit("_", 1)
    values = divergence(log_ratio, form)  # type: ignore[arg-type]  the three forms
    match scope:
        case "seq_sum":
            values = sequences.spread(sequences.sum(values))
        case "seq_mean":
            values = sequences.spread(sequences.mean(values))
        case "seq_max":
            values = sequences.spread(sequences.maximum(values))
    if form == "k1":
        return (values >= math.log(1.0 / high if low is None else low)) & (values <= math.log(high))
    return values <= high


def bernoulli_kl(proximal: Tensor, behaviour: Tensor) -> Tensor:
    """Return KL(behaviour || proximal) of "this token or another", [N]."""
    mine, theirs = proximal.detach().exp().clamp(1e-8, 1 - 1e-8), behaviour.exp().clamp(1e-8, 1 - 1e-8)
    return theirs * (theirs / mine).log() + (1.0 - theirs) * ((1.0 - theirs) / (1.0 - mine)).log()


def total_variation(proximal: Tensor, behaviour: Tensor) -> Tensor:
    """Return |p - p_behaviour| of the sampled token, [N]."""
    return (proximal.detach().exp() - behaviour.exp()).abs()


def not_vetoed(log_ratio: Tensor, sequences: Sequences, threshold: float) -> Tensor:
    """Return False for every token of a sequence in which any token's ratio is below ``threshold``, [N]."""
    catastrophic = (log_ratio.detach() < math.log(threshold)).to(log_ratio.dtype)
    return sequences.spread(sequences.sum(catastrophic)) == 0


def opsm(log_ratio: Tensor, advantages: Tensor, sequences: Sequences, delta: float) -> Tensor:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): which tokens stay, [N] bool.

    A sequence goes where A < 0 and the mean of ``log behaviour - log current`` is above ``delta``. Against
    a proximal policy that was recomputed for the same step it never fires.
    """
    drift = -sequences.mean(log_ratio.detach())
    return ~((advantages < 0) & (sequences.spread(drift) > delta))


def m2po_mask(log_ratio: Tensor, *, budget: float, among: Tensor | None = None) -> Tensor:
    """M2PO's mask (arXiv 2510.01161, algorithm 1): drop the largest (log r)^2 until their mean is within budget.

    Wants the whole batch. The paper looks only at tokens that have moved the way their advantage pushes
    (`moved_along`); AReaL looks at all.

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


def m2po_limit(squares: Tensor, budget: float, add_up: Callable[[Sequence[float]], list[float]] = list) -> float:
    """Return the largest (log r)^2 that `m2po_mask` keeps, where every rank holds some of the batch's squares.

    The mean of the squares up to a limit grows with the limit, so bisection finds it, with one sum over
    the ranks for each of some sixty halvings.

    Args:
        squares: [n] of this rank's tokens that count.
        budget: Largest mean of what stays.
        add_up: Adds vectors over the ranks; alone: leaves them.
    """
    squares = squares.detach().double()

    def mean_up_to(limit: float) -> float:
        kept = squares[squares <= limit]
        total, count = add_up([float(kept.sum()), float(len(kept))])
        return total / count if count else 0.0

    low, high = 0.0, MAX_LOG_RATIO**2
    if mean_up_to(high) < budget:
        return high
    while high - low > 1e-12 * max(high, 1e-6):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if mean_up_to(middle) < budget else (low, middle)
    return low


def m2po_width(squares: Tensor, budget: float, add_up: Callable[[Sequence[float]], list[float]] = list) -> float:
    """Return the tau^2 of `m2po_clip` where every rank holds some of the batch's squares; infinite: nothing to clip.

    Arguments as in `m2po_limit`.
    """
    squares = squares.detach().double()

    def mean_at_most(limit: float) -> float:
        total, count = add_up([float(squares.clamp(max=limit).sum()), float(len(squares))])
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
    """The clip that M2PO's released code solves for: widths (low, high) of a PPO clip for the whole batch.

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
    """Return which tokens have moved the way their advantage pushes, [N] bool."""
    return ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))


def age_band(
    ratio: Tensor, advantages: Tensor, age: Tensor, *, clip_low: float, clip_high: float, cap: float, decay: float = 0.0
) -> Tensor:
    """A hard band around the clip that narrows with age (AgentRL's `importance_weight_cap_ratio`), [N] bool.

    With d = exp(-decay age): a token stays where A > 0 and r <= 1 + clip_high cap d, where A < 0 and
    r >= 1 - clip_low cap d, and where A = 0.

    Args:
        ratio: [N].
        advantages: [N].
        age: [N] steps since the sample was made, at least 0.
        clip_low: The clip's lower width.
        clip_high: Its upper width; AgentRL's ``epsilon + epsilon_higher``.
        cap: How many clip widths a fresh token may be away.
        decay: How fast the band narrows (`out_of_date_decay`); AgentRL's `strict_in_bound` is cap = 1.
    """
    width = cap * (-decay * age.clamp(min=0)).exp()
    high = (advantages > 0) & (ratio > 1.0 + clip_high * width)
    low = (advantages < 0) & (ratio < 1.0 - clip_low * width)
    return ~(high | low)


def approximate_proximal(
    current: Tensor, behaviour: Tensor, versions: Tensor, trainer_version: int, *, form: Literal["loglinear", "linear"]
) -> Tensor:
    """Guess the proximal log-probabilities without a forward pass (A-3PO, arXiv 2512.06547), [N].

    Between behaviour and current by the share of versions passed when the batch came,
    ``alpha = (trainer_version - 1 - version) / (trainer_version - version)``, of the log-probabilities or
    (`linear`) of the probabilities.

    Args:
        current: [N], detached here.
        behaviour: [N].
        versions: [N] version that sampled each token.
        trainer_version: Version after the step that is being made.
        form: What is interpolated.
    """
    current = current.detach()
    span = (trainer_version - versions).to(current.dtype)
    share = torch.where(span > 0, (span - 1.0) / span.clamp(min=1.0), torch.zeros_like(span)).clamp(0.0, 1.0)
    if form == "loglinear":
        return behaviour + share * (current - behaviour)
    return ((1.0 - share) * behaviour.exp() + share * current.exp()).log()


def weigh_negatives(advantages: Tensor, ages: Tensor, *, fresh: float = 1.0, stale: float = 1.0) -> Tensor:
    """Scale the negative advantages, [N], by one factor for fresh tokens and another for stale ones.

    A success stays a success whoever sampled it; a failure blames tokens that the policy may since have
    learned to prefer, so it teaches less the older it is.

    Args:
        advantages: [N].
        ages: [N] versions between sampling and training.
        fresh: Factor where the age is 0.
        stale: Factor where it is not.
    """
    factor = torch.where(ages > 0, stale, fresh).to(advantages.dtype)
    return torch.where(advantages < 0, advantages * factor, advantages)


def effective_share(log_weight: Tensor) -> Tensor:
    """Effective sample size as a share of the samples: (sum w)^2 / (n sum w^2), scalar in [1/n, 1]; 1 for none."""
    if not len(log_weight):
        return torch.ones((), dtype=log_weight.dtype)
    weights = (log_weight.detach() - log_weight.detach().max()).exp()
    return weights.sum().square() / (len(weights) * weights.square().sum())


def learning_rate_factor(effective: float, *, power: float = 0.5, floor: float = 0.0) -> float:
    """Scale of the learning rate for a batch: effective share to a power (VCPO, arXiv 2602.17616), at least floor."""
    return max(min(effective, 1.0) ** power, floor)
