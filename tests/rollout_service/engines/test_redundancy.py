"""Which completions of a group are kept of those that were started: the first to end, or those that end soon after."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.rollout_service.engines.redundancy import Redundancy, RedundantGroup

STARTED_AT = 100.0


def closed_group(redundancy: Redundancy, ends: Sequence[float]) -> tuple[list[int], float]:
    group = RedundantGroup(redundancy, STARTED_AT)
    for seconds, number in sorted((seconds, number) for number, seconds in enumerate(ends)):
        now = STARTED_AT + seconds
        if group.closes_at is not None and group.closes_at < now:
            break
        assert not group.is_closed(now) or now == group.closes_at
        group.end(number, now)
    assert group.closes_at is not None
    is_whole = len(group.ended) == len(ends)
    closed_at = now if is_whole else group.closes_at
    assert group.is_closed(closed_at)
    assert not group.is_closed(closed_at - 0.01) or is_whole
    return group.kept, closed_at - STARTED_AT


@pytest.mark.parametrize(
    ("redundancy", "ends", "kept", "seconds"),
    [
        (Redundancy(3), [4, 1, 9], [0, 1, 2], 9),  # nothing is redundant: all are waited for
        (Redundancy(2, 2), [9, 4, 7, 1], [1, 3], 4),
        (Redundancy(2, 2), [4, 4, 4, 1], [0, 3], 4),  # of those that end together the first by number
        (Redundancy(1, 3), [2, 2, 2, 2], [0], 2),
        (Redundancy(2, 2, wait=0.5), [9, 4, 6, 1], [1, 2, 3], 6),  # 6 s are just in time, 9 are not
        (Redundancy(2, 2, wait=0.4), [9, 4, 6, 1], [1, 3], 5.6),
        (Redundancy(2, 2, wait=1000.0), [9, 4, 6, 1], [0, 1, 2, 3], 9),  # closed as soon as all have ended
    ],
)
def test_a_group_keeps_what_ends_in_time(
    redundancy: Redundancy, ends: list[float], kept: list[int], seconds: float
) -> None:
    """It closes when enough have ended and the rest had its time; kept completions are in the order of their numbers."""
    assert closed_group(redundancy, ends) == (kept, pytest.approx(seconds))
    assert redundancy.enough <= len(kept) <= redundancy.started


def test_nothing_closes_a_group_before_enough_have_ended() -> None:
    group = RedundantGroup(Redundancy(2, 2, wait=1.0), STARTED_AT)
    group.end(3, STARTED_AT + 5.0)
    assert group.closes_at is None
    assert not group.is_closed(STARTED_AT + 1e6)
