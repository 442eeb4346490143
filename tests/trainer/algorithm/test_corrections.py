"""Corrections, advantages, shaping and filters: correct for any input, with the properties that the papers state."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.trainer.algorithm.tokens import drift_of, lengths, sample, seeds
from torch import Tensor

from penstock.trainer.algorithm import reward_shaping as shape
from penstock.trainer.algorithm.aggregation import Denominators, sequence_weight
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.chosen_parts import ESTIMATORS
from penstock.trainer.algorithm.corrections.m2po import m2po_clip_widths, m2po_limit, m2po_width
from penstock.trainer.algorithm.corrections.opsm import opsm
from penstock.trainer.algorithm.corrections.ratios import log_weights
from penstock.trainer.algorithm.corrections.rejection import veto
from penstock.trainer.algorithm.credit import Scored, credit_rule
from penstock.trainer.algorithm.estimators.interface import Outcomes
from penstock.trainer.algorithm.group_filters.equal_rewards import rewards_differ
from penstock.trainer.algorithm.losses.tokens import Sequences

finite = st.floats(-1e3, 1e3, allow_nan=False)


def outcomes(rewards: list[float], groups: list[int], counts: list[int]) -> Outcomes:
    lengths = torch.tensor(counts)
    return Outcomes(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), lengths, influences=lengths.double()
    )


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "opob", "pass_at_k"])
def test_a_group_without_a_signal_gets_no_advantage(name: str) -> None:
    found = ESTIMATORS.find(name).value(outcomes([0.7, 0.3, 0.3, 0.1 + 0.2, 0.3], [0, 1, 1, 2, 2], [3, 3, 5, 2, 2]))
    torch.testing.assert_close(found, torch.zeros(5, dtype=torch.float64), atol=1e-12, rtol=0)


@examples(20)
@given(num=st.integers(8, 400))
def test_the_root_level_spreads_alike_for_every_length(num: int) -> None:
    """The log-weight of a sequence has the spread of one token; the sum grows with the root of the length."""
    generator = torch.Generator().manual_seed(num)
    sequences = Sequences.of_lengths(torch.full((300,), num))
    log_ratio = 0.1 * torch.randn(300 * num, generator=generator, dtype=torch.float64)
    by_root = sequences.mean(log_weights(log_ratio, sequences, "root")).std()
    assert 0.08 < float(by_root) < 0.12


@examples(25)
@given(rows=lengths, seed=seeds, budget=st.sampled_from([0.001, 0.04, 1.0]))
def test_m2po_brings_the_second_moment_within_budget_and_drops_no_more_than_needed(
    rows: list[int], seed: int, budget: float
) -> None:
    """The kept tokens have a mean square within the budget, and would not with the smallest dropped one."""
    data = sample(rows, seed)
    log_ratio = data.current.detach() - data.behaviour
    squares = log_ratio.square()
    keep = squares <= m2po_limit(squares, budget)
    if len(squares[~keep]):
        assert keep.sum() == 0 or squares[keep].mean() < budget
        assert torch.cat([squares[keep], squares[~keep].min()[None]]).mean() >= budget


@pytest.mark.parametrize("budget", [0.001, 0.05, 0.3])
def test_m2pos_released_clip_meets_the_budget(budget: float) -> None:
    """Clipped at the width it solves for, the second moment equals the budget; the floors hold."""
    squares = torch.randn(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64).square()
    width = m2po_width(squares, budget)
    assert squares.clamp(max=width).mean().item() == pytest.approx(budget)
    low, high = m2po_clip_widths(width, floor_low=0.0, floor_high=0.0)
    assert (math.log1p(-low), math.log1p(high)) == pytest.approx((-math.sqrt(width), math.sqrt(width)))
    assert m2po_clip_widths(m2po_width(squares, 0.001), floor_low=0.3, floor_high=0.5) == (0.3, 0.5)
    assert m2po_clip_widths(m2po_width(squares, 100.0), floor_low=0.3, floor_high=0.5) == (1.0, 1e5)


def test_whitening_counts_a_trajectory_once_per_token() -> None:
    values, counts = torch.tensor([1.0, 3.0, -2.0], dtype=torch.float64), torch.tensor([2, 1, 4])
    spread = shape.whiten(values.repeat_interleave(counts))
    torch.testing.assert_close(shape.whiten(values, weights=counts), torch.stack([spread[0], spread[2], spread[3]]))


@examples(25)
@given(
    rewards=st.lists(finite, min_size=1, max_size=9), by_group=st.booleans(), shift=st.booleans(), scale=st.booleans()
)
def test_normalisation_is_finite_and_leaves_equal_rewards_alone(
    rewards: list[float], by_group: bool, shift: bool, scale: bool
) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.arange(len(rewards)) // 2 if by_group else None
    assert torch.isfinite(shape.normalise(values, groups, shift=shift, scale=scale)).all()
    same = shape.normalise(torch.full((4,), 0.3, dtype=torch.float64), shift=shift, scale=scale)
    torch.testing.assert_close(same, torch.zeros(4) if shift else torch.full((4,), 0.3), check_dtype=False)


def test_running_moments_equal_those_of_everything_at_once() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 3 + 7
    moments = shape.RunningMoments()
    for part in values.split([1, 20, 0, 29]):
        moments.update(part)
    assert moments.mean == pytest.approx(float(values.mean()))
    assert moments.std == pytest.approx(float(values.std()))
    torch.testing.assert_close(moments.normalise(values), (values - values.mean()) / values.std())


def test_sample_weights_sum_to_their_number() -> None:
    weights = shape.sample_weights(
        shape.difficulty_weights(torch.tensor([0.0, 0.5, 2.0])), shape.length_weights(torch.tensor([3, 9, 6])).float()
    )
    assert float(weights.sum()) == pytest.approx(3.0)
    assert weights[0] < weights[2]


def test_rewards_of_one_source_are_normalised_together() -> None:
    """Equal names get equal numbers; ROLL's asymmetric clip keeps a rare success large and bounds a rare failure."""
    assert shape.numbered(["x", "x", "y", "x"]).tolist() == [0, 0, 1, 0]
    rare = shape.normalise(torch.tensor([0.0] * 19 + [9.0], dtype=torch.float64))
    assert rare.max() > 3.0
    assert shape.asym_clip(rare).max() == 3.0
    assert shape.asym_clip(-rare).min() == -1.0


def test_prompt_mean_gives_every_prompt_the_same_weight() -> None:
    """Two prompts, one with twice the tokens: their tokens weigh half as much each."""
    batch = Denominators(num_tokens=9, num_sequences=4, max_completion_tokens=8, num_prompts=2)
    assert sequence_weight("prompt-mean", 2, batch, prompt_tokens=6) * 6 == pytest.approx(0.5)
    assert sequence_weight("prompt-mean", 3, batch, prompt_tokens=3) * 3 == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("filters", "rewards", "skipped"),
    [
        (("mask_truncated", "drop_zero_advantage"), (1.0, 0.5, 0.0, 0.5), {"truncated": 1, "zero_advantage": 1}),
        (("skip_non_positive_advantage", "drop_zero_advantage"), (1.0, 0.5, 0.0), {"non_positive_advantage": 2}),
    ],
)
def test_of_several_filters_the_first_one_is_counted(
    filters: tuple[str, ...], rewards: tuple[float, ...], skipped: dict[str, int]
) -> None:
    """Each trajectory left out counts once; the last of four is cut, and has the advantage 0 as the second has."""
    settings = AlgorithmSettings(name="grpo", **dict.fromkeys(filters, True))
    group = Scored(rewards, [1] * len(rewards), [place == 3 for place in range(len(rewards))])
    assert credit_rule(settings, longest=9)([group]).skipped == skipped


def test_a_group_has_a_signal_when_its_rewards_differ() -> None:
    assert rewards_differ([0.0, 1.0])
    assert not rewards_differ([1.0])
    assert not rewards_differ([0.1 + 0.2, 0.3])


def _veto(log_ratio: Tensor) -> Tensor:
    return veto(drift_of(log_ratio, Sequences.of_lengths(torch.tensor([2, 2]))), veto=1e-4)


def test_one_improbable_token_vetoes_its_whole_sequence_and_no_other() -> None:
    """A ratio below 1e-4 anywhere drops the sequence."""
    assert _veto(torch.tensor([0.0, -12.0, 0.1, 0.2])).tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("advantages", "moved", "kept"),
    [
        ([-0.5, 0.25, -0.25], -1.0, [False] * 3),  # failed, though one token's advantage is above 0
        ([0.5, -0.25, 0.25], -1.0, [True] * 3),  # a success, though one token's is below
        ([-0.5, 0.5, 0.0], -1.0, [True] * 3),
        ([0.0] * 3, -1.0, [True] * 3),
        ([-1.0] * 3, -1.0, [False] * 3),
        ([-1.0] * 3, 1.0, [True] * 3),
        ([-1.0], -1.0, [False]),
        ([], -1.0, []),
    ],
)
def test_opsm_leaves_out_whole_sequences(advantages: list[float], moved: float, kept: list[bool]) -> None:
    """Beside a success, which stays; as a record without the key has it, only the tokens of negative advantage."""
    both = torch.tensor([*advantages, 1.0])
    sequences = Sequences(torch.tensor([0] * len(advantages) + [1]), 2)
    drift = drift_of(torch.full_like(both, moved), sequences, both)
    assert opsm(drift, opsm_delta=0.5).tolist() == [*kept, True]
    by_token = [not (advantage < 0 and moved < 0) for advantage in advantages]
    assert opsm(drift, opsm_delta=0.5, opsm_level="token").tolist() == [*by_token, True]
