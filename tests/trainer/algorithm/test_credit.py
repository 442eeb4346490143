"""Credit of trajectories: the order of the shaping, the state between batches, and finite values for any batch."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.chosen_parts import PRESETS
from penstock.trainer.algorithm.credit import AlgorithmState, Credit, Scored, credit_rule
from penstock.trainer.errors import CheckpointError

PLAIN = {"name": "reinforce"}  # advantages are the shaped rewards themselves


def scored(*rewards: float, source: str = "", kl: tuple[float, ...] = ()) -> Scored:
    return Scored(rewards, [3] * len(rewards), [False] * len(rewards), source, kl)


def test_rewards_are_scaled_by_all_rewards_of_the_run_so_far() -> None:
    """The first batch by its own deviation, the next by that of both; with mean_std the mean is subtracted first."""
    rule = credit_rule(AlgorithmSettings(**PLAIN, reward_scaling="std"), longest=10)
    assert rule([scored(1.0, 3.0)]).advantages == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2)])
    deviation = math.sqrt(20 / 3)  # of 1, 3, 5, 7
    assert rule([scored(5.0, 7.0)]).advantages == pytest.approx([5 / deviation, 7 / deviation])
    centred = credit_rule(AlgorithmSettings(**PLAIN, reward_scaling="mean_std"), longest=10)
    assert centred([scored(1.0, 3.0)]).advantages == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_running_normalisation_includes_earlier_batches() -> None:
    rule = credit_rule(AlgorithmSettings(**PLAIN, reward_norm="running", reward_scale=False), longest=10)
    rule([scored(0.0, 0.0)])
    assert rule([scored(1.0, 1.0)]).advantages == pytest.approx([0.5, 0.5])


def test_a_resumed_rule_continues_bit_for_bit() -> None:
    """What a checkpoint holds, through JSON, gives the same advantages as a rule that was not stopped."""
    section = AlgorithmSettings(**PLAIN, reward_scaling="mean_std", reward_norm="running")
    batches = [[scored(0.1 * n, 0.7, -n / 3.0)] for n in range(8)]
    through = AlgorithmState.fresh(section)
    whole = [credit_rule(section, longest=10, state=through)(batch).advantages for batch in batches]
    first = AlgorithmState.fresh(section)
    halves = [credit_rule(section, longest=10, state=first)(batch).advantages for batch in batches[:4]]
    second = AlgorithmState.resumed(section, json.loads(json.dumps(first.to_document())))
    halves += [credit_rule(section, longest=10, state=second)(batch).advantages for batch in batches[4:]]
    assert halves == whole
    assert second.to_document() == through.to_document()


def test_an_adapted_coefficient_is_resumed_and_a_fixed_one_is_the_run_files() -> None:
    """A checkpoint holds the state of the controller; without a target the run file may change the coefficient."""
    steered = AlgorithmSettings(kl_coefficient=0.1, kl_target=0.01, kl_horizon=10)
    state = AlgorithmState.fresh(steered)
    state.kl.update(1.0, 5)
    assert state.kl.coefficient == pytest.approx(0.1 * 1.1)
    document = state.to_document()
    assert AlgorithmState.resumed(steered, document).kl == state.kl
    assert AlgorithmState.resumed(AlgorithmSettings(kl_coefficient=0.3), document).kl.coefficient == 0.3
    with pytest.raises(CheckpointError, match="algorithm state"):
        AlgorithmState.resumed(steered, {"schema_tag": "something.else"})


def test_rewards_are_compared_within_a_kind_of_task() -> None:
    """Two sources with different scales of reward: each normalised by itself (ROLL's `inductive`)."""
    section = AlgorithmSettings(**PLAIN, reward_norm="source", reward_scale=False)
    found = credit_rule(section, longest=10)(
        [scored(1.0, 0.0, source="a"), scored(10.0, 20.0, source="b"), scored(0.5, 0.5, source="a")]
    )
    assert found.advantages == pytest.approx([0.5, -0.5, -5.0, 5.0, 0.0, 0.0])


def test_the_kl_is_subtracted_after_normalisation_and_before_the_estimator() -> None:
    """The documented order: coefficient x KL is subtracted from a normalised reward, and the group mean of that is the baseline."""
    section = AlgorithmSettings(
        normalise_by_std=False, reward_norm="group", reward_scale=False, reward_kl_coefficient=0.5
    )
    found = credit_rule(section, longest=10)([scored(1.0, 0.0, kl=(0.2, 0.6))])
    shaped = [0.5 - 0.1, -0.5 - 0.3]
    assert found.advantages == pytest.approx([r - sum(shaped) / 2 for r in shaped])
    assert found.rewards == [1.0, 0.0]


rewards = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0])
groups = st.lists(
    st.lists(st.tuples(rewards, st.integers(0, 9), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=5
)
OPTIONS = [
    {},
    {"reward_norm": "group", "asym_clip": True, "whiten_advantages": True, "advantage_clip": 2.0},
    {"reward_scaling": "mean_std", "reward_norm": "running", "length_weight": True, "difficulty_weight": True},
    {"reward_norm": "source", "overlong_buffer": 0.5, "mask_truncated": True, "drop_zero_advantage": True},
    {"reward_kl_coefficient": 0.1, "skip_non_positive_advantage": True},
]


@pytest.mark.parametrize("name", PRESETS)
@examples(6)
@given(batch=groups, options=st.sampled_from(OPTIONS), order=st.randoms(use_true_random=False))
def test_credit_is_finite_and_independent_of_order_for_any_preset(
    name: str, batch: list[list[tuple[float, int, bool]]], options: dict[str, object], order: object
) -> None:
    """Groups of one, equal rewards, empty answers, absurd rewards: finite; permuting groups permutes the credit."""
    if PRESETS[name]["advantage"] == "gae":  # every token has its own advantage, filters by one are refused
        options = {key: value for key, value in options.items() if "advantage" not in key or "whiten" in key}
    if PRESETS[name]["advantage"] in ("return_to_go", "gigpo"):  # a normalised total would not be that of its turns
        options = {key: value for key, value in options.items() if key[:8] not in ("reward_n", "reward_s", "asym_cli")}
    if PRESETS[name]["advantage"] == "zero":  # filters of advantages would leave out everything
        options = {key: value for key, value in options.items() if "advantage" not in key or "whiten" in key}
    section = AlgorithmSettings(name=name, **options)  # type: ignore[arg-type]
    held = [
        Scored(
            *map(list, zip(*g, strict=True)), source="ab"[len(g) % 2], kl=[r % 1.0 for r, _, _ in g],  # type: ignore[arg-type]
            influences=[float(n) for _, n, _ in g],
            baseline=(0.5, 4) if section.needs_baseline else None,
        )
        for g in batch
    ]  # fmt: skip
    found = credit_rule(section, longest=8)(held)
    assert all(map(math.isfinite, [*found.advantages, *found.weights]))
    assert sum(w > 0 for w in found.weights) + found.skipped.total() == sum(map(len, batch))
    shuffled = list(range(len(held)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    again = credit_rule(section, longest=8)([held[place] for place in shuffled])
    largest = max(1.0, *map(abs, found.advantages))
    for values, others in ((found.advantages, again.advantages), (found.weights, again.weights)):
        edges = [0]
        for group in batch:
            edges.append(edges[-1] + len(group))
        expected = [v for place in shuffled for v in values[edges[place] : edges[place + 1]]]
        assert others == pytest.approx(expected, rel=1e-5, abs=1e-7 * largest)


def test_a_rounding_error_of_a_zero_advantage_is_zero_for_filters() -> None:
    """Rewards of 0 beside one of 543289, normalised by source: the error of 1e-11 keeps no trajectory in any order."""
    section = AlgorithmSettings(name="grpo", reward_norm="source", overlong_buffer=0.5, drop_zero_advantage=True)
    groups = [
        Scored(rewards, lengths, [False] * len(rewards), source="ab"[len(rewards) % 2])
        for rewards, lengths in (
            ([1.0], [0]), ([0.0, 0.0, 543289.0], [0, 0, 0]), ([0.0, 0.0, 1.0], [0, 8, 0]), ([0.0] * 5, [0] * 5),
        )
    ]  # fmt: skip
    kept = [
        sorted(
            zip(
                *_by_group(credit_rule(section, longest=8)([groups[place] for place in order]), groups, order),
                strict=True,
            )
        )
        for order in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0))
    ]
    assert kept[0] == kept[1] == kept[2]


def _by_group(credit: Credit, groups: list[Scored], order: tuple[int, ...]) -> tuple[list[int], list[int]]:
    return [p for p in order for _ in groups[p].rewards], [int(weight > 0) for weight in credit.weights]
