"""Rewards made of parts: the rule of weights and gates, and its settings in the run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.config.connection import Section
from penstock.protocol.config.reward_settings import RewardDefinition, RewardSettings
from penstock.protocol.config.run_file import config_document, format_config, load
from penstock.protocol.errors import ConfigError

RUN_FILE = """
[reward]
name = "mine"

[reward.define.mine.parts.correct]
reward = "numeric"
parameters.relative = 0.01

[reward.define.mine.parts.form]
reward = "tags"
weight = 0.2
needs = 1.0
otherwise = -0.5
parameters.tags = ["think", "answer"]
"""


class Settings(Section):
    reward: RewardSettings = RewardSettings()


def definition(**parts: dict[str, Any]) -> RewardDefinition:
    """A definition as a run file would hold it; what scores a part does not matter to the rule."""
    return RewardDefinition.model_validate({"parts": {name: {"reward": "x", **part} for name, part in parts.items()}})


def test_a_reward_is_the_weighted_sum_of_its_parts() -> None:
    """Weights multiply, scores add up, other stored parts are not looked at."""
    mine = definition(correct={}, form={"weight": 0.2}, watched={"weight": 0.0})
    assert mine.total({"correct": 1.0, "form": 0.5, "watched": 99.0}) == 1.1
    assert mine.totals({"correct": (1.0, 0.0), "form": (0.0, 1.0), "watched": (5.0, 5.0), "form.x": (7.0,)}) == (
        1.0,
        0.2,
    )


def test_the_first_closed_gate_decides_alone() -> None:
    """Below the threshold of a gate the reward is `otherwise`; at it and above, the sum."""
    mine = definition(
        correct={},
        form={"weight": 0.2, "needs": 1.0, "otherwise": -0.5},
        short={"weight": 0.0, "needs": 0.0, "otherwise": -2.0},
    )
    assert mine.total({"correct": 1.0, "form": 1.0, "short": 0.0}) == 1.2
    assert mine.total({"correct": 1.0, "form": 0.9, "short": -1.0}) == -0.5
    assert mine.total({"correct": 1.0, "form": 1.0, "short": -0.1}) == -2.0


def test_a_missing_part_is_an_error_and_never_a_zero() -> None:
    mine = definition(correct={}, form={})
    with pytest.raises(ConfigError, match=r"no score of the part form; there are correct"):
        mine.total({"correct": 1.0})
    with pytest.raises(ConfigError, match="no scores of the part form"):
        mine.totals({"correct": (1.0,)})
    with pytest.raises(ConfigError, match="correct 2, form 1"):
        mine.totals({"correct": (1.0, 0.0), "form": (1.0,)})


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=8), st.floats(-3, 3))
def test_other_weights_give_what_such_a_definition_gives(scores: list[tuple[float, float]], weight: float) -> None:
    """Re-weighting stored parts equals defining the reward that way; gates are kept."""
    columns = {"a": tuple(a for a, _ in scores), "b": tuple(b for _, b in scores)}
    gated = definition(a={"needs": 0.0}, b={"weight": 0.1})
    expected = definition(a={"needs": 0.0}, b={"weight": weight})
    assert gated.reweighted({"b": weight}).totals(columns) == expected.totals(columns)
    assert gated.reweighted({"b": weight}).digest == expected.digest


def test_other_weights_are_only_for_parts_there_are() -> None:
    with pytest.raises(ConfigError, match="no part c; its parts are a, b"):
        definition(a={}, b={}).reweighted({"c": 1.0})
    with pytest.raises(ValueError, match="finite"):
        definition(a={}).reweighted({"a": float("nan")})


def test_the_digest_differs_for_different_definitions() -> None:
    plain = definition(a={}, b={})
    others = [definition(b={}, a={}), definition(a={"weight": 0.5}, b={}), definition(a={"parameters": {"n": 1}}, b={})]
    assert len({plain.digest, *(other.digest for other in others)}) == 4
    assert plain.digest == definition(a={}, b={}).digest


def test_the_run_file_defines_rewards_and_shows_them_again(tmp_path: Path) -> None:
    """Tables become a definition; overrides change its values; printed settings load to the same settings."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    loaded = load(Settings, files=[tmp_path / "run.toml"], overrides=["reward.define.mine.parts.form.weight=0.3"])
    mine = loaded.settings.reward.define["mine"]
    assert (mine.parts["correct"].parameters, mine.parts["form"].weight) == ({"relative": 0.01}, 0.3)
    assert mine.parts["form"].parameters == {"tags": ["think", "answer"]}
    assert loaded.origins["reward.define.mine.parts.form.weight"] == "override"
    (tmp_path / "shown.toml").write_text(format_config(loaded))
    assert load(Settings, files=[tmp_path / "shown.toml"]).settings == loaded.settings
    assert (
        json.loads(json.dumps(config_document(loaded)))["settings"]["reward"]["define"]["mine"]["parts"]["form"][
            "needs"
        ]
        == 1.0
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("reward.define.mine.parts.correct.wieght=1.0", r"unknown key reward.define.mine.parts.correct.wieght"),
        ("reward.define.mine.parts.correct.weight=much", "valid number"),
        ("reward.define.mine.parts.correct.otherwise=-1.0", "has no effect without `needs`"),
        ("reward.define.mine.parts.a b.reward=gsm8k", "pattern"),
        ("reward.define.other.parts.a.reward=mine", r"reward.define.other.parts.a.reward is itself made of parts"),
    ],
)
def test_definitions_that_cannot_be_meant_are_refused(tmp_path: Path, line: str, text: str) -> None:
    """Unknown keys, wrong values, switches without effect and nested definitions are reported."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    with pytest.raises(ConfigError, match=text):
        load(Settings, files=[tmp_path / "run.toml"], overrides=[line])


SUCCESS = """
[reward.success]
my_reward = 0.5
mine = { correct = 1.0 }
"""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"my_reward": 0.5, "mine": {"correct": 1.0}}),
        (("reward.success.my_reward.form=0.2",), {"my_reward": {"form": 0.2}, "mine": {"correct": 1.0}}),
        (("reward.success.mine=0.9",), {"my_reward": 0.5, "mine": 0.9}),
        (("reward.success.mine.form=0",), {"my_reward": 0.5, "mine": {"correct": 1.0, "form": 0.0}}),
    ],
)
def test_success_is_a_number_or_a_table_of_parts(
    tmp_path: Path, overrides: tuple[str, ...], expected: dict[str, Any]
) -> None:
    """Both forms of docs/graders.md are read; an override of one form takes the place of the other."""
    path = tmp_path / "run.toml"
    path.write_text(SUCCESS)
    loaded = load(Settings, files=[path], overrides=overrides)
    assert loaded.settings.reward.success == expected
    (tmp_path / "shown.toml").write_text(format_config(loaded))
    assert load(Settings, files=[tmp_path / "shown.toml"]).settings == loaded.settings
