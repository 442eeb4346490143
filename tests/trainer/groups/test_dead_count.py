"""Dead letters end a run only when nothing arrives and nothing is on its way."""

from __future__ import annotations

from penstock.trainer.groups.dead_count import DeadCount


def test_letters_stop_the_issue_and_empty_queues_end_the_run() -> None:
    """More dead groups than arrived ones stop the issue; with queues that are empty it is known whether all were true."""
    count = DeadCount(4)
    count.add(4, "500")
    assert not count.stops_issue
    count.add(1, "501")
    assert count.stops_issue
    assert count.settle()
    assert (count.in_a_row, count.last_reason) == (5, "501")


def test_a_group_that_arrives_keeps_the_run() -> None:
    """Each that arrives admits one more; where queues are empty all the same, issue goes on without an end."""
    count = DeadCount(4)
    count.add(10, "500")
    count.arrive(5)
    assert count.stops_issue
    count.arrive(1)
    assert not count.stops_issue
    count.add(3, "500")
    assert count.stops_issue
    assert not count.settle()
    assert not count.stops_issue
    count.arrive(50)
    count.add(4, "500")
    assert not count.stops_issue
