"""The built-in gsm8k rule against verl's strict one, on recorded cases."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from reward_service.rewards import gsm8k

VECTORS = json.loads(gzip.decompress((Path(__file__).parent.parent / "data" / "conformance.json.gz").read_bytes()))
CASE = next(case for case in VECTORS["cases"] if case["id"] == "verl/reward/gsm8k-strict")

# Where we read the number that stands there: a currency sign, no space, a trailing dot, 3.0, a fraction.
FORGIVEN = {"#### $18", "#### 3.0", "####42", "#### 42.", "#### 1/2"}


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (text, truth, score)
        for (text, truth), score in zip(CASE["inputs"]["pairs"], CASE["outputs"]["scores"], strict=True)
    ],
)
def test_gsm8k_equals_verls_strict_rule_or_forgives(text: str, truth: str, score: float) -> None:
    """The same verdict, except that a right number in an unusual spelling is right."""
    ours = gsm8k.judge((text,), truth)[0].reward
    assert ours == (1.0 if text in FORGIVEN else float(score == 1.0))
