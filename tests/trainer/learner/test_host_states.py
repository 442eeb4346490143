"""States that are moved to host memory between two steps, while an engine has the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.trainer.learner.forks import Fork
from tests.trainer.learner.host_states_check import cases_of


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_was_moved_out_and_back_trains_on_bit_for_bit(tmp_path: Path, num_ranks: int) -> None:
    """At every ZeRO stage the device is free of it meanwhile, and a checkpoint is captured from the copies."""
    process = Fork(tmp_path, "tests.trainer.learner.host_states_check", num_ranks=num_ranks)
    try:
        results = json.loads(process.wait(deadline_s=800.0).splitlines()[-1])
    finally:
        process.kill()
    assert results.keys() == cases_of(num_ranks).keys()
    for name, both in results.items():
        moved, stayed = both["moved"], both["stayed"]
        assert (moved["norms"], moved["values"]) == (stayed["norms"], stayed["values"]), name
        assert moved["captured_while_out"], name
        assert moved["moved"] > 0, (name, moved)
        assert moved["left"] < 0.1 * moved["resident"], (name, moved)
