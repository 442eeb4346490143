"""Presets and aliases mean what they meant when `tests/data/presets.json` was recorded, before losses were files.

Only the protections against stale samples, then part of every preset, belong to `async_grpo` alone since.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.chosen_parts import ALIASES, PRESETS
from penstock.trainer.algorithm.objective import build_objective

UNPROTECTED = {"dual_clip": None, "stale_negative_weight": 1.0, "ess_level": "off"}
RECORDED = json.loads((Path(__file__).parents[2] / "data" / "presets.json").read_text())


@pytest.mark.parametrize("name", RECORDED["presets"])
def test_every_setting_of_a_preset_is_as_it_was_recorded(name: str) -> None:
    """Every key that there was has its value; the loss's options reach the objective under the names of the keys."""
    recorded = RECORDED["presets"][name]
    settings = AlgorithmSettings(name=name)
    found = settings.model_dump(mode="json")
    expected = RECORDED["grpo"] | recorded["changed"] | UNPROTECTED
    assert {key: found[key] for key in expected} == expected
    assert sorted(PRESETS[name]) == [key for key in recorded["from_preset"] if key not in UNPROTECTED]
    rule = build_objective(settings)
    since = {"gspo_token_limit": True} if name == "gspo_token" else {}
    assert (
        rule.options
        == recorded["options"] | {key: None for key in ("dual_clip",) if key in recorded["options"]} | since
    )
    assert rule.loss.__name__ == expected["loss"]  # type: ignore[attr-defined]
    assert (rule.m2po_budget, rule.m2po_form) == (expected["m2po_budget"], expected["m2po_form"])
    on = {"opsm": expected["opsm_delta"], "m2po": expected["m2po_budget"]}
    assert set(rule.corrections) == {name for name, value in on.items() if value is not None}


def test_the_default_is_as_it_was_recorded() -> None:
    found = AlgorithmSettings().model_dump(mode="json")
    assert {key: found[key] for key in RECORDED["grpo"]} == RECORDED["grpo"] | {"name": "async_grpo"}
    assert build_objective(AlgorithmSettings()).options == RECORDED["presets"]["grpo"]["options"]


def test_no_preset_and_no_alias_is_missing() -> None:
    assert set(RECORDED["presets"]) <= set(PRESETS)
    for alias, name in RECORDED["aliases"].items():
        assert AlgorithmSettings(name=alias) == AlgorithmSettings(name=name)
    assert set(RECORDED["aliases"]) <= set(ALIASES)
