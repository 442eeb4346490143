"""Groups that are trained more than once by design: how often, how far apart, never stale, never more after a crash."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.trainer.groups.test_batcher import Box, ready

from penstock.protocol.versions import PolicyVersion
from penstock.trainer.groups.batcher import Reuse


def box(reuse: Reuse, *, max_staleness: int = 3, size: int = 2, **more: Any) -> Box:
    return Box(reuse=reuse, max_staleness=max_staleness, groups_per_step=size, **more)


def test_a_kept_group_fills_a_batch_that_would_wait() -> None:
    """New groups go first; the least used and oldest kept groups fill the rest."""
    trained = box(Reuse(2))
    for number in (1, 2):
        trained.offer(ready(number, 0))
    assert trained.train(0) == ["e0.p1.a0", "e0.p2.a0"]
    trained.offer(ready(3, 0))
    assert trained.train(1) == ["e0.p1.a0", "e0.p3.a0"]
    assert trained.train(2) == ["e0.p2.a0", "e0.p3.a0"]
    assert trained.train(3) == []  # all were used twice
    assert not trained.holds("e0.p1.a0")


def test_new_groups_are_never_held_up_by_kept_ones() -> None:
    """A full batch of new groups is trained although kept ones are available."""
    trained = box(Reuse(9))
    for number in range(4):
        trained.offer(ready(number, 0))
    assert trained.train(0) == ["e0.p0.a0", "e0.p1.a0"]
    assert trained.train(1) == ["e0.p2.a0", "e0.p3.a0"]


def test_a_group_that_is_too_old_is_retired_not_dropped() -> None:
    """Its message can be acknowledged; it is returned once, and no drop is counted."""
    trained = box(Reuse(9), max_staleness=1, size=1)
    trained.offer(ready(1, 0))
    trained.train(0)
    assert trained.train(1) == ["e0.p1.a0"]
    batch, drops = trained.take(PolicyVersion(2))
    assert (batch, drops) == ([], [])
    assert trained.groups.settled() == [1]
    assert not trained.groups.totals.dropped_groups


def test_after_a_resume_a_kept_group_is_taken_in_once() -> None:
    """Trained groups with uses left in the checkpoint's ledger are accepted; any other counts as trained."""
    before = box(Reuse(2), size=1)
    before.offer(ready(1, 0))
    before.offer(ready(2, 0))
    assert before.train(0) + before.train(1) + before.train(2) == ["e0.p1.a0", "e0.p2.a0", "e0.p1.a0"]
    after = box(Reuse(2), size=1, ledger=before.groups.rows())
    assert not after.groups.is_returning("e0.p1.a0")
    assert after.is_spent("e0.p1.a0")
    assert after.groups.is_returning("e0.p2.a0")
    after.offer(ready(2, 0))
    assert not after.groups.is_returning("e0.p2.a0")
    assert after.is_spent("e0.p2.a0")
    assert after.train(3) == ["e0.p2.a0"]
    assert after.train(4) == []


@examples(40)
@given(
    count=st.integers(1, 4), interval=st.integers(1, 3), staleness=st.integers(0, 5),
    arrivals=st.lists(st.integers(0, 4), min_size=4, max_size=12), crash=st.integers(0, 12),
)  # fmt: skip
def test_for_any_arrivals_and_crash_no_group_is_used_too_often_too_soon_or_too_old(
    count: int, interval: int, staleness: int, arrivals: list[int], crash: int
) -> None:
    """Uses, intervals and ages are within the settings, and used-up groups are not held."""
    reuse = Reuse(count, interval if count > 1 else 1)
    trained = box(reuse, max_staleness=staleness)
    uses: dict[str, list[int]] = {}
    made: dict[str, int] = {}
    for version, num in enumerate(arrivals):
        if version == crash:  # all messages of groups that are not retired are delivered again
            held = [group_id for group_id in made if trained.holds(group_id)]
            trained = box(reuse, max_staleness=staleness, ledger=trained.groups.rows())
            for group_id in held:
                if not trained.is_spent(group_id):
                    trained.offer(ready(int(group_id.split(".")[1][1:]), made[group_id]))
        for _ in range(num):
            group = ready(len(made), version)
            made[group.group_id] = version
            trained.offer(group)
        for group_id in trained.train(version):
            uses.setdefault(group_id, []).append(version)
    for group_id, versions in uses.items():
        assert len(versions) <= count
        assert all(later - earlier >= interval for earlier, later in pairwise(versions))
        assert versions[-1] - made[group_id] <= staleness
    used_up = {group_id for group_id, versions in uses.items() if len(versions) == count}
    assert not any(trained.holds(group_id) for group_id in used_up)
