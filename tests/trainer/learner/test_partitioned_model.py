"""Models that are divided among the ranks while they are read (ZeRO 3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.learner.forks import Fork
from tests.trainer.learner.partition_check import BROKEN, EXPERTS, TIED, TRACED, UNTIED, models

Results = dict[int, list[dict[str, Any]]]  # by number of ranks, of each rank


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("partitioned")
    models(folder)
    for num in (1, 2, 4):
        fork = Fork(folder, "tests.trainer.learner.partition_check", str(folder), num_ranks=num)
        try:
            fork.wait()
        finally:
            fork.kill()
    return {num: [_read(folder / f"{num}-{rank}.json") for rank in range(num)] for num in (1, 2, 4)}


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [TIED, UNTIED, EXPERTS])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_a_model_read_in_parts_is_the_one_that_is_read_whole(results: Results, num: int, name: str, dtype: str) -> None:
    """Bit for bit, buffers too, from one file or several, in its dtype or another; each rank holds its part of every parameter."""
    for one in results[num]:
        found = one[f"{name} {dtype}"]
        assert found["names"]
        assert found["differing"] == []
        assert found["share"] == pytest.approx(1 / num, rel=0.02)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused_on_every_rank(results: Results, name: str) -> None:
    for one in results[2]:
        assert BROKEN[name] in one[name]
        assert "model.path" in one[name]
        assert name == "not-tied" or "model.layers.1.mlp.up_proj.weight" in one[name]


def test_a_full_device_is_not_a_fault_of_the_model(results: Results) -> None:
    """What is known of the hardware, or of other ranks, is said as such, while all ranks read a model together."""
    assert all(one["memory"] == "OutOfMemoryError" for one in results[2])


def test_a_reference_in_parts_scores_as_a_whole_one(results: Results) -> None:
    assert all(one["reference"] for one in results[2])


@pytest.mark.parametrize("case", TRACED)
def test_parameters_are_fetched_ahead_for_rows_of_any_length(results: Results, case: str) -> None:
    """DeepSpeed does so only while layers are called in the order that it recorded: none is called more often for longer rows."""
    for one in results[2]:
        assert all(one[case])


def test_a_fused_step_is_the_same_after_a_checkpoint(results: Results) -> None:
    assert all(one["resumed"] == [True, True] for one in results[2])


def test_settings_of_communication_change_no_number(results: Results) -> None:
    for one in results[2]:
        plain_2, changed_2, plain_3, *changed_3 = one["communication"]
        assert changed_2 == plain_2
        assert all(changed == plain_3 for changed in changed_3)
