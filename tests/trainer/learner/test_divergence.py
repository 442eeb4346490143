"""A gradient that is not finite ends the training; DeepSpeed writes it into the weights, or leaves the step out without a word."""

from __future__ import annotations

import json
from pathlib import Path

from tests.trainer.learner.divergence_check import CASES, FACTORS
from tests.trainer.learner.forks import Fork


def test_a_gradient_that_is_not_finite_ends_the_training_and_changes_no_weight(tmp_path: Path) -> None:
    """At every ZeRO stage the error names the optimizer step and the norm, and the weights are those before the step."""
    process = Fork(tmp_path, "tests.trainer.learner.divergence_check")
    try:
        results = json.loads(process.wait(deadline_s=120.0).splitlines()[-1])
    finally:
        process.kill()
    assert results.keys() == {f"{stage}-{dtype}-{name}" for stage, dtype in CASES for name in FACTORS}
    for text, has_learned, is_unchanged in results.values():
        assert text.startswith("optimizer step 2 of this process: the gradient norm is ")
        assert (has_learned, is_unchanged) == (True, True)
