"""The figures of a run's steps as columns and buckets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.console.record import recorded_run as recorded

from penstock.console.web.reading.page_view import MAX_NAMES, PageView, StepSeries, bucket_size, histogram, step_metrics


def series(*values: float, first: int = 1) -> StepSeries:
    found = StepSeries()
    for step, value in enumerate(values, start=first):
        found.add(step, float(step), {"reward_mean": value})
    return found


def test_each_bucket_has_the_mean_the_least_and_the_greatest_value_of_its_steps() -> None:
    found = series(0.0, 1.0, 2.0, 4.0, -1.0, 3.0, first=0).sampled(points=4)
    assert (found["bucket"], found["steps"], found["num_steps"]) == (2, [1, 3, 5], 6)
    assert found["figures"]["reward_mean"] == {"mean": [0.5, 3.0, 1.0], "min": [0.0, 2.0, -1.0], "max": [1.0, 4.0, 3.0]}


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.none(), min_size=1, max_size=400),
    points=st.integers(2, 100),
    first=st.integers(0, 50),
)
def test_buckets_hold_every_step_once_and_are_never_more_than_asked_for(
    values: list[float | None], points: int, first: int
) -> None:
    """Whatever is missing, the least, greatest and number of buckets agree with the plain values."""
    found = StepSeries()
    for step, value in enumerate(values):
        found.add(step, 0.0, {} if value is None else {"x": value, "y": 1.0})
    sampled = found.sampled(first=first, points=points)
    assert len(sampled["steps"]) <= points
    known = [value for value in values[first:] if value is not None]
    if not known:
        return
    column = sampled["figures"]["x"]
    assert min(v for v in column["min"] if v is not None) == pytest.approx(min(known), rel=1e-5)
    assert max(v for v in column["max"] if v is not None) == pytest.approx(max(known), rel=1e-5)
    assert sampled["steps"][-1] == len(values) - 1


def test_a_further_step_changes_only_the_last_bucket() -> None:
    before = series(*[float(n % 7) for n in range(101)]).sampled(points=60)
    after = series(*[float(n % 7) for n in range(102)]).sampled(points=60)
    assert before["bucket"] == after["bucket"]
    assert (
        before["figures"]["reward_mean"]["mean"][:-1]
        == after["figures"]["reward_mean"]["mean"][: len(before["steps"]) - 1]
    )


def test_a_step_taken_again_after_a_resume_removes_those_after_it() -> None:
    """Steps 3 and 4 belong to weights that were rolled back."""
    found = series(1.0, 2.0, 3.0, 4.0)
    found.add(3, 3.0, {"reward_mean": 9.0})
    assert found.sampled()["figures"]["reward_mean"]["mean"] == [1.0, 2.0, 9.0]


def test_steps_of_the_file_fill_only_those_that_are_missing_in_the_stream() -> None:
    view = PageView(recorded.RUN)
    for number in (3, 4):
        view.fold_event(recorded.step(number, recorded.START + number, reward_mean=1.0))
    rows = [{"kind": "step", "at": 1.0, "step": n, "reward_mean": 0.0} for n in (1, 2, 3)]
    view.add_recorded(rows)
    assert view.series.sampled(["reward_mean"])["figures"]["reward_mean"]["mean"] == [0.0, 0.0, 1.0, 1.0]


def test_a_trainer_that_logs_any_number_of_figures_keeps_the_first_ones_only() -> None:
    """The memory of the page is bounded; what is left out is counted."""
    found = StepSeries()
    found.add(1, 0.0, {f"figure {n}": 1.0 for n in range(MAX_NAMES + 5)})
    assert len(found.names) == MAX_NAMES


def test_what_is_no_finite_number_is_no_figure() -> None:
    """NaN, texts, truth values that are counts of nothing, and nested fields without a name are left out."""
    found = step_metrics(
        {"step": 3, "loss": math.nan, "text": "<b>", "x": 2, "mismatch": {"mean_abs": 0.5}, "y": 1e400}
    )
    assert found == {"x": 2.0, "engine_gap": 0.5, "loss_not_finite": 1.0}


def test_ten_thousand_steps_fit_into_the_points_of_a_chart() -> None:
    assert [bucket_size(n, 600) for n in (10, 600, 601, 1200, 10_000)] == [1, 1, 2, 5, 20]


def test_a_histogram_of_few_values_counts_each() -> None:
    """Rewards are often 0 or 1; values that no interval can hold do not fail."""
    assert histogram([0.0, 1.0, 1.0]) == {"edges": [0.0, 1.0], "counts": [1, 2]}
    assert sum(histogram([n / 10 for n in range(100)])["counts"]) == 100
    assert histogram([-1.7e308, *[float(n) for n in range(9)], 1.7e308])["counts"]


@given(
    steps=st.lists(st.integers(0, 40), min_size=1, max_size=50),
    points=st.lists(st.integers(2, 40), min_size=1, max_size=3),
)
def test_what_is_kept_of_full_buckets_is_what_a_first_request_gets(steps: list[int], points: list[int]) -> None:
    """Whatever steps follow, are taken again or filled in, and however many points are asked for."""
    asked, late = StepSeries(), StepSeries()
    filled = series(*[0.5] * 10, first=20)
    for place, step in enumerate(steps):
        for found in (asked, late):
            found.add(step, 0.0, {"x": float(place)} if place % 3 else {"x": float(place), "y": 1.0})
            if place == len(steps) // 2:
                found.fill(filled)
        for number in points:
            asked.sampled(points=number, last=None if place % 2 else 30)
    for number in points:
        fresh = StepSeries()
        fresh.fill(late)
        found, expected = asked.sampled(points=number), fresh.sampled(points=number)
        assert found | {"figures": {}} == expected | {"figures": {}}
        assert {name: found["figures"][name] for name in expected["figures"]} == expected["figures"]
