"""The line that says which algorithm a run trains with."""

from __future__ import annotations

import pytest

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.chosen_parts import PRESETS
from penstock.trainer.algorithm.summary_line import summary_line


def line(*, max_staleness: int = 2, **given: object) -> str:
    return summary_line(AlgorithmSettings.model_validate(given), max_staleness=max_staleness)


def test_it_names_the_parts_and_what_is_not_at_its_default() -> None:
    """By the keys of the run file, so that each can be looked up and changed."""
    assert line() == (
        "async_grpo: grpo advantages, ppo_clip (clip_low 0.2, clip_high 0.2, dual_clip 1.2), token-mean; "
        "stale_negative_weight 0.5, ess_level token"
    )
    assert line(name="grpo") == "grpo: grpo advantages, ppo_clip (clip_low 0.2, clip_high 0.2), token-mean"
    assert line(name="dapo", kl_coefficient=0.01) == (
        "dapo: grpo advantages, ppo_clip (clip_low 0.2, clip_high 0.28), token-mean; "
        "overlong_buffer 0.2, kl_coefficient 0.01, dynamic_sampling on"
    )


@pytest.mark.parametrize("name", PRESETS)
def test_the_unprotected_clip_on_old_samples_is_pointed_out(name: str) -> None:
    """From three versions of age on, for PPO's clip alone; any protection silences it."""
    assert "nothing protects" not in line(name=name, max_staleness=2)
    is_plain_clip = AlgorithmSettings(name=name).loss == "ppo_clip"
    guarded = name in ("async_grpo", "a3po", "m2po", "m2po_released", "opsm")
    assert ("nothing protects it from samples up to 3 versions old" in line(name=name, max_staleness=3)) == (
        is_plain_clip and not guarded
    )
    assert "nothing protects" not in line(name=name, max_staleness=3, ess_level="token")
