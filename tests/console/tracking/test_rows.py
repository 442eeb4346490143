"""Events become rows: figures by name, each step once."""

from __future__ import annotations

from tests.console.tracking.recorded_events import evaluation, finished, step

from penstock.console.tracking.consumer import METRICS, RowFold, figures
from penstock.protocol.facts import RunEvent


def test_a_row_has_the_finite_numbers_of_nested_tables_by_path() -> None:
    """Texts, nulls, NaN and histograms by age are left out; the number of the event is there."""
    row = RowFold().row(7, step(3, loss=float("nan")))
    assert row is not None
    assert (row.event, row.step, row.at) == (7, 3, 1003.0)
    assert dict(row.values) == {
        "train/version": 3.0, "train/reward_mean": 0.03, "train/groups/issued": 24.0, "train/groups/dropped/stale": 1.0,
        "penstock/event": 7.0,
    }  # fmt: skip


def test_a_step_that_a_resumed_trainer_repeats_is_left_out_and_counted() -> None:
    """Trackers cannot take back what they show: the first row of a step stays."""
    fold = RowFold({"train": 2})
    assert [fold.row(n, step(number)) is not None for n, number in enumerate((1, 2, 3, 2, 3, 4))] == [
        False, False, True, False, False, True,
    ]  # fmt: skip
    assert (fold.num_repeated, fold.steps) == (4, {"train": 4})


def test_an_evaluation_may_come_after_later_steps() -> None:
    fold = RowFold()
    assert fold.row(1, step(9)) is not None
    assert fold.row(2, evaluation(5, 0.5)) is not None
    named = evaluation(5, 0.7).model_copy(update={"data": {"name": "gsm8k", "step": 5, "accuracy": 0.7}})
    row = fold.row(3, named)
    assert row is not None
    assert row.values["eval/gsm8k/accuracy"] == 0.7


def test_figures_of_another_trainer_keep_their_names_and_may_repeat_a_step() -> None:
    fold = RowFold()
    for number in (1, 2):
        event = RunEvent(run_id="r", source="log", kind=METRICS, at=1.0, data={"step": 4, "values": {"loss": 0.25}})
        row = fold.row(number, event)
        assert row is not None
        assert (row.step, row.values["loss"]) == (4, 0.25)


def test_what_anybody_may_send_makes_no_row() -> None:
    """Events without step or figures, of other kinds, or with data of another shape are passed over."""
    fold = RowFold()
    values = {"a": 1}
    wrong = (
        {},
        {"step": "3"},
        {"step": True, "values": values},
        {"step": 2**70, "values": values},
        {"step": 1, "values": "5"},
    )
    for data in wrong:
        for kind in ("step", "eval", METRICS):
            assert fold.row(1, RunEvent(run_id="r", source="x", kind=kind, at=1.0, data=data)) is None, (kind, data)
    assert fold.row(1, finished()) is None


def test_an_event_of_very_many_figures_is_cut() -> None:
    assert len(dict(figures({str(n): n for n in range(5000)}))) == 1000
