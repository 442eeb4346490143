"""The groups of a record, filtered and paged; and in which settings runs differ."""

from __future__ import annotations

import pytest
from tests.groups import make_generated, make_group, make_scored

from penstock.console.web.reading.documents import differences
from penstock.console.web.reading.recorded_groups import (
    Entry,
    GroupQuery,
    QueryRefused,
    TrajectoryQuery,
    group_row,
    parse_cursor,
)


def entry(*rewards: float, step: int | None = 5) -> Entry:
    generated = make_generated("r", [make_group("e0.p0.a0", size=len(rewards))])
    scored = make_scored(generated, [rewards]).groups[0]
    return Entry(
        "e0.p0.a0", "trained", 1, "train", 10, step=step, trained_version=4, made_version=5, scored=scored, staleness=4
    )


@pytest.mark.parametrize(
    ("query", "is_accepted", "has_dropped"),
    [
        (GroupQuery(), True, True),
        (GroupQuery(step_from=5, step_to=5), True, False),
        (GroupQuery(step_from=0), True, False),
        (GroupQuery(step_from=6), False, False),
        (GroupQuery(step_to=4), False, False),
        (GroupQuery(reward_min=0.5), True, False),  # the mean
        (GroupQuery(reward_min=0.6), False, False),
        (GroupQuery(reward_max=0.4), False, False),
        (GroupQuery(reward_min=-1e9), True, False),
        (TrajectoryQuery(reward_min=0.9), True, False),  # one of them
        (TrajectoryQuery(reward_min=1.5), False, False),
        (GroupQuery(status="dropped"), False, True),
    ],
)
def test_a_query_accepts_a_group_by_step_reward_and_status(
    query: GroupQuery, is_accepted: bool, has_dropped: bool
) -> None:
    """A group without a step or a reward is not in a list that is limited by them."""
    dropped = Entry("e0.p1.a0", "dropped", 1, "train", 0, reason="stale")
    assert (query.accepts(entry(0.0, 1.0)), query.accepts(dropped)) == (is_accepted, has_dropped)


@pytest.mark.parametrize(
    ("first", "last", "may_be"), [(1, 4, False), (1, 5, True), (8, 9, True), (10, 12, False), (None, None, False)]
)
def test_a_chapter_whose_steps_are_all_outside_is_not_read_again(
    first: int | None, last: int | None, may_be: bool
) -> None:
    assert GroupQuery(step_from=5, step_to=9).may_be_in(first, last) is may_be


def test_a_row_shows_the_spread_of_the_rewards_and_whether_the_group_teaches_anything() -> None:
    row = group_row(entry(0.0, 1.0))
    assert (row["reward_mean"], row["reward_min"], row["reward_max"], row["is_degenerate"]) == (0.5, 0.0, 1.0, False)
    assert row["staleness"] == 4
    assert group_row(entry(1.0, 1.0))["is_degenerate"]


@pytest.mark.parametrize("cursor", ["", "1", "a.b", "-1.0", "1.2.3", "1.1e9", "9" * 30 + ".1", "1.2\n"])
def test_a_cursor_that_no_list_returned_is_refused(cursor: str) -> None:
    with pytest.raises(QueryRefused, match="begin again without it"):
        parse_cursor(cursor)


def test_only_settings_that_differ_are_listed_with_the_value_of_each_run() -> None:
    a, b = {"trainer": {"lr": 1e-5, "steps": 3}}, {"trainer": {"lr": 2e-5, "steps": 3}, "x": {"y": [1]}}
    found = differences({"a": {"settings": a}, "b": {"settings": b}})
    assert found["runs"] == ["a", "b"]
    assert found["differing"] == [
        {"key": "trainer.lr", "values": ["1e-05", "2e-05"]},
        {"key": "x.y", "values": ["(not set)", "[1]"]},
    ]
    assert found["num_equal"] == 1
