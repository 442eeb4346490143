"""avg@k, pass@k and maj@k agree with enumerations of small cases; intervals with published values."""

from __future__ import annotations

import itertools
import math

import pytest

from penstock.console.evaluation_results import Estimate, estimate, majority, pass_at_k, powers_of_two


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(num_samples: int) -> None:
    for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        subsets = list(itertools.combinations(range(num_samples), k))
        share = sum(any(i < num_correct for i in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_defined_for_k_up_to_the_number_of_samples_only() -> None:
    """More samples than were drawn, none, or more correct ones than samples are refused."""
    for arguments in ((4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)):
        with pytest.raises(ValueError, match="not defined"):
            pass_at_k(*arguments)


def test_the_estimator_is_unbiased() -> None:
    """Its mean over all draws of n samples with chance p is 1 - (1 - p)^k."""
    p, n, k = 0.3, 5, 3
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_the_majority_is_the_most_frequent_answer() -> None:
    """Frequent and right 1, frequent and wrong 0; a sample without an answer has no vote."""
    assert majority(["7", "7", "8"], [True, True, False]) == 1.0
    assert majority(["7", "8", "8"], [True, False, False]) == 0.0
    assert majority(["7", None, None], [True, False, False]) == 1.0
    assert majority([None, None], [False, False]) == 0.0


def test_a_tie_is_the_mean_of_its_answers() -> None:
    """As if it were broken at random; equal answers that were scored differently count with their share."""
    assert majority(["7", "8"], [True, False]) == 0.5
    assert majority(["a", "b", "c"], [False, True, False]) == pytest.approx(1 / 3)
    assert majority(["7", "7", "8"], [True, False, False]) == 0.5


def test_a_share_has_wilsons_interval() -> None:
    """81 of 263 is the example of Newcombe (1998): 0.2553 to 0.3662; none and all touch the bounds."""
    found = estimate([1.0] * 81 + [0.0] * 182, bounded=True)
    assert found.method == "wilson"
    assert (found.low, found.high) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))
    assert estimate([0.0] * 20, bounded=True) == Estimate(0.0, 0.0, pytest.approx(0.1611, abs=5e-5), "wilson", 20)  # pyright: ignore[reportArgumentType]
    assert estimate([1.0], bounded=True).high == 1.0


def test_a_mean_has_the_interval_of_its_prompts() -> None:
    """1.96 standard errors of the prompts' own means, cut off where the value is bounded; one prompt has none."""
    found = estimate([0.0, 0.5, 1.0, 0.5], bounded=True)
    error = math.sqrt((0.25 + 0.25) / 3 / 4)
    assert (found.value, found.method) == (0.5, "normal")
    assert found.low == pytest.approx(0.5 - 1.959964 * error, abs=1e-6)
    assert found.high == pytest.approx(0.5 + 1.959964 * error, abs=1e-6)
    assert estimate([0.75, 1.0], bounded=True).high == 1.0
    assert estimate([0.75, 1.0], bounded=False).high == pytest.approx(0.875 + 1.959964 * 0.125, abs=1e-6)
    assert estimate([0.25], bounded=True) == Estimate(0.25, None, None, "none", 1)
    with pytest.raises(ValueError, match="at least one"):
        estimate([], bounded=True)


def test_samples_of_a_prompt_narrow_no_interval() -> None:
    once = estimate([0.0, 1.0, 1.0, 0.0], bounded=True)
    tenfold = estimate([sum([value] * 10) / 10 for value in (0.0, 1.0, 1.0, 0.0)], bounded=True)
    assert once == tenfold


def test_pass_at_k_is_reported_for_powers_of_two_and_all_samples() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(8) == [1, 2, 4, 8]
    assert powers_of_two(6) == [1, 2, 4, 6]
