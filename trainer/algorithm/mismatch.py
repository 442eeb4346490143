"""How far the policy in training is from the one that sampled its batch: sums of a micro-batch, figures of a step.

The sums add up over micro-batches and ranks and the maxima are maximised, so that a figure is about the
whole batch however it was split. With x = log current / behaviour of a sampled token, before the update:

| figure                 | means                                                                       |
|------------------------|-----------------------------------------------------------------------------|
| `kl_behaviour`, `_k1`  | KL(behaviour || current) per token: mean of exp(x) - 1 - x, and of -x       |
| `logprob_gap`, `_max`  | mean and largest |x|                                                        |
| `chi2_token`           | mean of exp(2x), minus 1                                                    |
| `chi2_sequence`        | the same of the product over a sequence                                     |
| `ess_share_sequence`   | effective sample size of the products, as a share of the sequences          |
| `perplexity`, `log_…`  | mean over sequences of exp of, and of, minus the mean log-probability;      |
|                        | `…_behaviour` of the sampler's                                              |
| `perplexity_ratio`     | mean over sequences of exp(mean of -x)                                      |
| `perplexity_gap`       | mean over sequences of the mean of -x; `_abs`, `_max`, `_min` of the same   |
| `ratio_percentiles`    | of exp(x), read from a histogram: exact to the width of its bins            |
| `kl_by_age`            | `kl_behaviour` of tokens so many versions old                               |
| `mismatch`             | of tokens that the version in training sampled: `compare_fresh_tokens`      |

`EngineCheck` stops a run in which the trainer's log-probabilities differ from the engine's for one version.
Tokens that the version in training sampled are scored twice by the same weights: by the engine when it sampled them,
by the trainer just before its update. The difference between the two is due to kernels and precision (float32 on both
sides: below 1e-5 nats; bfloat16: about 0.02), or to a mistake that ruins a run without any error: another temperature,
another tokenizer, other weights under the same number. A violation at the first comparison stops the run before an
update is published; a later one only when several follow one another.

`CollapseCheck` stops a run whose policy samples with too little entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.trainer.algorithm.corrections.ratios import divergence
from penstock.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, Sequences

_STEPS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
_EDGES = (-MAX_LOG_RATIO, *(-step for step in reversed(_STEPS)), 0.0, *_STEPS, MAX_LOG_RATIO)  # of the histogram of x
_AGES = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9-16": (9, 16), "17+": (17, 1 << 62)}
_MAX_LOG_PERPLEXITY = 80.0
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
# What `compare_fresh_tokens` reads: it compares two policies only while the weights are those that sampled.
FRESH_SUMS = ("fresh_tokens", "fresh_k1", "fresh_k3", "fresh_abs")
FRESH_MAXIMA = ("fresh_abs",)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Trainer minus engine on tokens scored by the same weights: 0 except for kernels, precision and bugs."""

    num_tokens: int
    mean_abs: float  # nats, of log current / behaviour
    max_abs: float  # nats
    kl_k1: float  # nats per token, KL(behaviour || current)
    kl_k3: float


Figures = dict[str, Tensor | float]


def mismatch_figures(current: Tensor, behaviour: Tensor, ages: Tensor, sequences: Sequences) -> tuple[Figures, Figures]:
    """Return the sums and the maxima that figures are computed from, by name; all tensors [N], ``ages`` in versions.

    What a sum leaves out counts 0 in it: to select the rest, the host would have to wait for its number.
    """
    current, behaviour = current.detach().double(), behaviour.double()
    gap = current - behaviour
    distance, k3, bounded = gap.abs(), divergence(gap, "k3"), gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    lengths = sequences.lengths(gap)
    fresh, present, divisors = ages <= 0, lengths > 0, lengths.clamp(min=1.0)
    mine, theirs = -sequences.sum(current) / divisors, -sequences.sum(behaviour) / divisors  # 0 without tokens
    whole = sequences.sum(gap)
    product = whole.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def of_fresh(values: Tensor) -> Tensor:
        return torch.where(fresh, values, 0.0).sum()

    def of_present(values: Tensor) -> Tensor:
        return torch.where(present, values, 0.0).sum()

    sums: Figures = {
        "gap_k1": -gap.sum(), "gap_k3": k3.sum(), "gap_abs": distance.sum(), "gap_square": (2.0 * bounded).exp().sum(),
        "fresh_tokens": fresh.sum(), "fresh_k1": -of_fresh(gap), "fresh_k3": of_fresh(k3), "fresh_abs": of_fresh(distance),
        "sequences": present.sum(), "sequence_mine": mine.sum(), "sequence_theirs": theirs.sum(),
        "sequence_mine_exp": of_present(_exp(mine)), "sequence_theirs_exp": of_present(_exp(theirs)),
        "sequence_gap": (mine - theirs).sum(), "sequence_gap_abs": (mine - theirs).abs().sum(),
        "sequence_gap_exp": of_present(_exp(mine - theirs)),
        "product": of_present(product.exp()), "product_square": of_present((2.0 * product).exp()),
    }  # fmt: skip
    edges, last_ages = _limits(gap.device)
    by_age = torch.bucketize(ages.double(), last_ages)
    counts, divergences, bins = (
        values.new_zeros(len(limits) + 1).index_add(0, where, values).unbind()
        for values, where, limits in (
            (torch.ones_like(gap), by_age, last_ages),
            (k3, by_age, last_ages),
            (torch.ones_like(gap), torch.bucketize(bounded, edges), edges),
        )
    )
    for name, count, of_age in zip(_AGES, counts[1:], divergences[1:], strict=True):
        sums |= {f"age_{name}": count, f"age_{name}_k3": of_age}
    return sums | dict(zip(_bins(), bins, strict=True)), _maxima(distance, fresh, -whole / divisors, present)


def _maxima(distance: Tensor, fresh: Tensor, below: Tensor, present: Tensor) -> Figures:
    none = float("-inf")
    if not len(distance):
        return dict.fromkeys(("gap_abs", "fresh_abs", "sequence_gap", "sequence_below"), none)
    return {
        "gap_abs": distance.max(),
        "fresh_abs": torch.where(fresh, distance, none).max(),
        "sequence_gap": torch.where(present, below, none).max(),
        "sequence_below": torch.where(present, -below, none).max(),
    }


@cache
def _limits(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inner edges of the histogram and the last ages of `_AGES`, on a device once for all micro-batches."""
    limits = _EDGES[1:-1], (-1, *(last for _, last in list(_AGES.values())[:-1]))
    edges, last_ages = (torch.tensor(some, dtype=torch.float64, device=device) for some in limits)
    return edges, last_ages


def mismatch_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, Any]:
    tokens, sequences = max(1.0, sums["tokens"]), max(1.0, sums["sequences"])
    metrics: dict[str, Any] = {
        "kl_behaviour": sums["gap_k3"] / tokens,
        "kl_behaviour_k1": sums["gap_k1"] / tokens,
        "logprob_gap": sums["gap_abs"] / tokens,
        "logprob_gap_max": max(0.0, maxima["gap_abs"]),
        "chi2_token": sums["gap_square"] / tokens - 1.0,
        "chi2_sequence": sums["product_square"] / sequences - 1.0,
        "ess_share_sequence": sums["product"] ** 2 / (sequences * sums["product_square"]) if sums["sequences"] else 1.0,
        "log_perplexity": sums["sequence_mine"] / sequences,
        "log_perplexity_behaviour": sums["sequence_theirs"] / sequences,
        "perplexity": sums["sequence_mine_exp"] / sequences,
        "perplexity_behaviour": sums["sequence_theirs_exp"] / sequences,
        "perplexity_ratio": sums["sequence_gap_exp"] / sequences,
        "perplexity_gap": sums["sequence_gap"] / sequences,
        "perplexity_gap_abs": sums["sequence_gap_abs"] / sequences,
        "perplexity_gap_max": maxima["sequence_gap"] if sums["sequences"] else 0.0,
        "perplexity_gap_min": -maxima["sequence_below"] if sums["sequences"] else 0.0,
        "ratio_percentiles": _percentiles([sums[name] for name in _bins()]),
        "kl_by_age": {
            name: sums[f"age_{name}_k3"] / sums[f"age_{name}"] for name in _AGES if sums[f"age_{name}"] > 0
        },
    }  # fmt: skip
    same = compare_fresh_tokens(sums, maxima)
    if same is not None:
        metrics["mismatch"] = {
            "tokens": same.num_tokens, "mean_abs": same.mean_abs, "max_abs": same.max_abs,
            "kl_k1": same.kl_k1, "kl_k3": same.kl_k3,
        }  # fmt: skip
    return metrics


def compare_fresh_tokens(sums: Mapping[str, float], maxima: Mapping[str, float]) -> Mismatch | None:
    """Return the difference on the tokens that the version in training sampled; None when there are none."""
    count = sums["fresh_tokens"]
    if not count:
        return None
    return Mismatch(
        num_tokens=int(count),
        mean_abs=sums["fresh_abs"] / count,
        max_abs=maxima["fresh_abs"],
        kl_k1=sums["fresh_k1"] / count,
        kl_k3=sums["fresh_k3"] / count,
    )


def _exp(values: Tensor) -> Tensor:
    return values.clamp(max=_MAX_LOG_PERPLEXITY).exp()


def _bins() -> list[str]:
    return [f"gap_bin_{number}" for number in range(len(_EDGES) - 1)]


def _percentiles(counts: list[float]) -> dict[str, float]:
    total = sum(counts)
    if not total:
        return {}
    percentiles = {}
    for percent in PERCENTILES:
        wanted = total * percent / 100.0
        ends = accumulate(counts)
        for count, end, (low, high) in zip(counts, ends, pairwise(_EDGES), strict=True):
            if end >= wanted and count > 0:
                share = (wanted - (end - count)) / count
                percentiles[str(percent)] = float(torch.tensor(low + share * (high - low), dtype=torch.float64).exp())
                break
    return percentiles
