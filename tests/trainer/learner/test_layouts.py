"""Every layout of ranks and memory trains what one process trains: losses, gradient norms, weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.trainer.learner.forks import Fork
from tests.trainer.learner.layout_check import OFFLOADS, ONE_KEY_HEAD, PLAIN, SEQUENCE

from penstock.deploy.quickstart_task import write_model

LOSS, NORM = 2e-6, 5e-5  # in float32; the norm's is relative


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("layouts")
    write_model(folder / "model", seed=0)
    started = {
        num: Fork(folder, "tests.trainer.learner.layout_check", str(folder / "model"), str(folder), num_ranks=num)
        for num in (1, 2)
    }
    try:
        return {num: json.loads(one.wait(deadline_s=300.0).splitlines()[-1]) for num, one in started.items()}
    finally:
        for one in started.values():
            one.kill()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", [PLAIN, *OFFLOADS, *SEQUENCE, ONE_KEY_HEAD])
def test_two_ranks_in_every_layout_train_what_one_process_trains(results: dict[int, dict[str, Any]], case: str) -> None:
    """The loss agrees to 2e-6, the norm to 5e-5, figures and published weights too, with entropy in the loss."""
    alone, together = results[1][case if case == ONE_KEY_HEAD else PLAIN], results[2][case]
    assert together["loss"] == pytest.approx(alone["loss"], abs=LOSS)
    assert together["norm"] == pytest.approx(alone["norm"], rel=NORM)
    for own, expected in zip(together["sums"], alone["sums"], strict=True):
        assert own == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert together["resumed_equal"]
    assert alone["resumed_equal"]
    for weights in (together["weights"], together["weights_from_plain"]):
        assert weights == pytest.approx(alone["weights"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_bfloat16_are_added_up_in_float32(results: dict[int, dict[str, Any]], stage: int) -> None:
    """Over 16 micro-batches of two ranks; as-trained, the sums are rounded to bfloat16."""
    assert results[2][f"sum-{stage}"] < 1e-6
    assert results[2][f"offloaded-sum-{stage}"] < 1e-6
    assert results[2][f"rounded-sum-{stage}"] > 1e-5
