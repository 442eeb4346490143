"""avg@k, pass@k and maj@k of scored samples, with confidence intervals; pure.

Prompts are drawn at random, samples of one prompt are not independent: every interval is over prompts, each with the mean
of its own samples (a cluster), as in "Adding Error Bars to Evals", arXiv 2411.00640. A value that is 0 or 1 for every
prompt is a share, with Wilson's interval (E. B. Wilson, 1927); any other has the normal interval of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

Z95 = 1.959963984540054  # two-sided, 95 %
Method = Literal["wilson", "normal", "none"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its 95 % confidence interval."""

    value: float
    low: float | None  # None with `method` none: a single prompt has no interval
    high: float | None
    method: Method
    num_prompts: int


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of ``k`` samples, drawn without replacement, is correct.

    1 - C(n-c, k) / C(n, k), unbiased (arXiv 2107.03374). Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} samples is not defined")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority(answers: Sequence[Hashable | None], correct: Sequence[bool]) -> float:
    """Return the chance that the most frequent answer is correct; ties are broken at random.

    A sample without an answer (None) does not vote; without any vote the result is 0. Where equal answers were scored
    differently, the share of correct ones counts.
    """
    votes: dict[Hashable, list[bool]] = {}
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(is_correct)
    most = max(map(len, votes.values()), default=0)
    elected = [sum(vote) / len(vote) for vote in votes.values() if len(vote) == most]
    return sum(elected) / len(elected) if elected else 0.0


def powers_of_two(num_samples: int) -> list[int]:
    """Return the k for which pass@k is reported: 1, 2, 4, … and the number of samples itself."""
    ks = [2**i for i in range(num_samples.bit_length())]
    return ks if ks[-1] == num_samples else [*ks, num_samples]


def estimate(values: Sequence[float], *, bounded: bool) -> Estimate:
    """Return the mean of one value for each prompt; ``bounded`` values are between 0 and 1. Raises ValueError for none."""
    if not values:
        raise ValueError("an estimate needs at least one prompt")
    if bounded and all(value in {0.0, 1.0} for value in values):
        return _share(round(sum(values)), len(values))
    return _mean(values, bounded=bounded)


def _share(successes: int, count: int) -> Estimate:
    share, z2 = successes / count, Z95 * Z95
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == count else centre + half
    return Estimate(share, low, high, "wilson", count)


def _mean(values: Sequence[float], *, bounded: bool) -> Estimate:
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, None, "none", 1)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    low, high = mean - Z95 * error, mean + Z95 * error
    return Estimate(mean, max(0.0, low) if bounded else low, min(1.0, high) if bounded else high, "normal", count)
