"""Every layout of ranks and memory trains what one process trains: losses, gradient norms, weights."""

from __future__ import annotations

from typing import Any

import pytest
from tests.trainer.learner import forks, layout_check
from tests.trainer.learner.layout_check import (
    EXPERTS,
    EXPERTS_OF_TWO,
    FROM_DIVIDED,
    MEASURED,
    MEASURED_DIVIDED,
    MEASURED_SEQUENCE,
    OFFLOADS,
    ONE_KEY_HEAD,
    PLAIN,
    SEQUENCE,
    TENSOR,
    WITHOUT_EXPERTS,
    mixture,
)

from penstock.deploy.quickstart_task import write_model
from penstock.trainer.learner.step_metrics import KINDS

pytestmark = pytest.mark.slow

LOSS, NORM = 2e-6, 5e-5  # in float32; the norm's is relative


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("layouts")
    write_model(folder / "model", seed=0)
    mixture(folder / "experts")  # here: of several ranks transformers lets the first one write
    arguments = str(folder / "model"), str(folder)
    return forks.results(folder, layout_check.__name__, *arguments, ranks=(1, 2), deadline_s=800.0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [PLAIN, *OFFLOADS, *SEQUENCE, *TENSOR, ONE_KEY_HEAD, *EXPERTS_OF_TWO])
def test_two_ranks_in_every_layout_train_what_one_process_trains(results: dict[int, dict[str, Any]], case: str) -> None:
    """The loss agrees to 2e-6, the norm to 5e-5, figures and published weights too, with entropy in the loss."""
    of_one = case if case == ONE_KEY_HEAD else EXPERTS if case in EXPERTS_OF_TWO else PLAIN
    alone, together = results[1][of_one], results[2][case]
    assert together["loss"] == pytest.approx(alone["loss"], abs=LOSS)
    assert together["norm"] == pytest.approx(alone["norm"], rel=NORM)
    for own, expected in zip(together["sums"], alone["sums"], strict=True):
        assert own == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert together["resumed_equal"]
    assert alone["resumed_equal"]
    for weights in (together["weights"], together["weights_from_plain"]):
        assert weights == pytest.approx(alone["weights"], rel=1e-4, abs=1e-5)


def test_rows_without_experts_are_refused_where_routers_are_replayed(results: dict[int, dict[str, Any]]) -> None:
    """Only a pass that says so, as the comparison of an export, lets the routers choose."""
    refusal, mean = results[1][WITHOUT_EXPERTS]
    assert "rows of this batch do not say which experts computed their tokens" in refusal
    assert -20.0 < mean < 0.0


@pytest.mark.parametrize("case", MEASURED)
def test_norms_and_updates_by_layers_are_those_of_one_process(results: dict[int, dict[str, Any]], case: str) -> None:
    """At every ZeRO stage, with adapters, offloaded: those of plain gradients and of the master weights' change."""
    alone, together = results[1][case], results[2][case]
    is_exact = "bfloat16" not in case
    assert set(alone["layers"]) >= {"attention", "mlp", "block 0", "block 1", "all"}
    for one in (alone, together):
        assert one["layers"]["all"] == pytest.approx(one["norm"][1], rel=1e-9)
        kinds = [value for name, value in one["layers"].items() if name in KINDS]
        assert sum(value**2 for value in kinds) == pytest.approx(one["norm"][1] ** 2, rel=1e-6)
        for name, ratio in one["moved"].items():
            assert one["ratios"][name] == pytest.approx(ratio, rel=1e-3), name
    if is_exact:
        assert together["layers"] == pytest.approx(alone["layers"], rel=NORM)
        assert together["ratios"] == pytest.approx(alone["ratios"], rel=1e-3)
        assert alone["first_layers"] == pytest.approx(alone["by_hand"], rel=NORM)


@pytest.mark.parametrize("case", [MEASURED_SEQUENCE, MEASURED_DIVIDED])
def test_ranks_that_compute_the_same_rows_count_once(results: dict[int, dict[str, Any]], case: str) -> None:
    """Two ranks that share the tokens of a row, or the weights, measure and leave out what one process does."""
    alone, together = results[1]["measured-0"], results[2][case]
    assert together["layers"] == pytest.approx(alone["layers"], rel=NORM)
    assert together["ratios"] == pytest.approx(alone["ratios"], rel=1e-3)
    assert together["work"] == alone["work"]
    assert together["left_out"] == alone["left_out"]


@pytest.mark.parametrize("case", MEASURED)
def test_an_outlier_step_is_left_out(results: dict[int, dict[str, Any]], case: str) -> None:
    """A gradient norm 100 times the median changes neither weights nor moments, on any rank; the norms are restored."""
    for num_ranks in (1, 2):
        found = results[num_ranks][case]
        assert found["left_out"] == [[""], [""], ["outlier_step"], [""]]
        assert found["is_unchanged"]
        assert found["stored"] == found["norm"][:3]
        assert found["restored"] == found["norm"][: 3 if case == "measured-0" else 4]
        assert found["norm"][2] > 20 * found["norm"][1]
        assert found["outlier_layers"]["all"] == pytest.approx(found["norm"][2], rel=1e-9)
        assert set(found["outlier_ratios"]) == {None}


@pytest.mark.timeout(900)
def test_one_process_continues_from_weights_that_ranks_shared(results: dict[int, dict[str, Any]]) -> None:
    alone = results[1]
    assert alone[FROM_DIVIDED] == pytest.approx(alone[PLAIN]["weights"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_bfloat16_are_added_up_in_float32(results: dict[int, dict[str, Any]], stage: int) -> None:
    """Over 16 micro-batches of two ranks; as-trained, the sums are rounded to bfloat16."""
    assert results[2][f"sum-{stage}"] < 1e-6
    assert results[2][f"offloaded-sum-{stage}"] < 1e-6
    assert results[2][f"rounded-sum-{stage}"] > 1e-5


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_gradient_of_the_output_head_is_that_of_float64(results: dict[int, dict[str, Any]], stage: int) -> None:
    """In bfloat16 and in chunks; DeepSpeed's bucket of stage 2 rounds it once to bfloat16."""
    assert results[2][f"head-{stage}"] < (2e-3 if stage == 2 else 1e-4)
