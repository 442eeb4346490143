"""Trainer against engine: figures of a whole batch, however it was split, and of fresh tokens alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.trainer.algorithm.losses.tokens import Sequences
from penstock.trainer.algorithm.mismatch import compare_fresh_tokens, mismatch_figures, mismatch_metrics

About = tuple[Tensor, Tensor, Tensor, Sequences]


def invented(rows: list[int], seed: int, spread: float = 0.3) -> About:
    generator = torch.Generator().manual_seed(seed)
    num = sum(rows)
    behaviour = -torch.rand(num, generator=generator, dtype=torch.float64) * 3
    current = behaviour + spread * torch.randn(num, generator=generator, dtype=torch.float64)
    ages = torch.randint(0, 20, (num,), generator=generator).float()
    return current, behaviour, ages, Sequences.of_lengths(torch.tensor(rows, dtype=torch.int64))


def floats(about: About) -> list[dict[str, float]]:
    return [{name: float(value) for name, value in found.items()} for found in mismatch_figures(*about)]


def figures(*parts: About) -> dict:
    """Of several micro-batches, summed as the policy sums them."""
    every = [floats(about) for about in parts]
    sums = {name: sum(one[name] for one, _ in every) for name in every[0][0]}
    maxima = {name: max(top[name] for _, top in every) for name in every[0][1]}
    return mismatch_metrics({**sums, "tokens": sum(len(about[0]) for about in parts)}, maxima)


def test_equal_policies_have_no_distance() -> None:
    found = figures(invented([4, 0, 3], 1, spread=0.0))
    for name in ("kl_behaviour", "kl_behaviour_k1", "logprob_gap", "logprob_gap_max", "chi2_token", "chi2_sequence"):
        assert found[name] == 0.0
    assert found["perplexity_ratio"] == found["ess_share_sequence"] == 1.0
    assert found["ratio_percentiles"]["50"] == pytest.approx(1.0, abs=1e-4)


def test_percentiles_of_the_ratio_come_from_a_histogram_that_is_fine_enough() -> None:
    """Of 20,000 tokens each is within a tenth of the exact one in the ratio's logarithm."""
    about = invented([20_000], 3)
    found = figures(about)["ratio_percentiles"]
    exact = torch.quantile(about[0] - about[1], torch.tensor([int(p) / 100 for p in found], dtype=torch.float64))
    for ours, theirs in zip(found.values(), exact.tolist(), strict=True):
        assert math.log(ours) == pytest.approx(theirs, abs=0.1 * max(abs(theirs), 0.1))


def test_fresh_tokens_are_compared_apart_from_stale_ones() -> None:
    """An engine that is off by 0.5 on the version in training shows for any stale tokens; without fresh tokens there is no comparison."""
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    current = torch.tensor([-0.5, -1.5, -3.0, -1.0], dtype=torch.float64)
    ages = torch.tensor([0.0, 0.0, 2.0, 3.0])
    about = (current, behaviour, ages, Sequences.of_lengths(torch.tensor([2, 2])))
    same = compare_fresh_tokens(*floats(about))
    assert same is not None
    assert (same.num_tokens, same.mean_abs, same.max_abs, same.kl_k1) == (2, 0.5, 0.5, 0.0)
    assert same.kl_k3 == pytest.approx((math.expm1(0.5) - 0.5 + math.expm1(-0.5) + 0.5) / 2)
    found = figures(about)
    assert found["mismatch"]["mean_abs"] == 0.5
    assert found["kl_by_age"].keys() == {"0", "2", "3-4"}
    assert found["kl_by_age"]["2"] == pytest.approx(math.exp(-2) - 1 + 2)
    stale = (current[2:], behaviour[2:], ages[2:], Sequences.of_lengths(torch.tensor([2])))
    assert compare_fresh_tokens(*floats(stale)) is None
    assert "mismatch" not in figures(stale)
