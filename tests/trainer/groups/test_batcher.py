"""Which groups make a batch, and which are dropped and why; the ledger that makes their effect exactly-once."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.trainer.groups.stored_groups import invent_group

from penstock.protocol.facts import BlobRef, ScoredGroup
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.trainer.groups.batcher import Batcher, staleness_tokens
from penstock.trainer.groups.drops import DropReason
from penstock.trainer.groups.ledger import Ledger
from penstock.trainer.learner.step_plan import ReadyGroup

PACK = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)


def ready(number: int, version: int, *, size: int = 2) -> ReadyGroup:
    group = invent_group(f"e0.p{number}.a0", version=version, size=size, seed=number)
    scored = ScoredGroup(generated=group.summary(0), rewards=(1.0,) * size, scorer="test")
    return ReadyGroup(scored, PACK, group)


def batcher(*, groups_per_step: int = 2, max_staleness: int = 2, ledger: Ledger | None = None) -> Batcher:
    return Batcher(groups_per_step=groups_per_step, max_staleness=max_staleness, ledger=ledger or Ledger())


def test_the_oldest_samples_go_first() -> None:
    """A batch takes the groups that become stale first, sorted by id."""
    box = batcher()
    for number, version in ((1, 5), (2, 4), (3, 3)):
        box.offer(ready(number, version))
    batch, drops = box.take(PolicyVersion(5))
    assert [g.group_id for g in batch] == ["e0.p2.a0", "e0.p3.a0"]
    assert not drops
    assert box.num_ready == 1
    assert box.holds("e0.p3.a0")
    box.settle()
    assert not box.holds("e0.p3.a0")


def test_staleness_is_measured_at_the_time_of_use() -> None:
    """A group that was fresh on arrival is dropped as stale at a later version, with its tokens."""
    box = batcher(groups_per_step=1)
    box.offer(ready(1, 0))
    box.offer(ready(2, 3))
    batch, drops = box.take(PolicyVersion(3))
    assert [g.group_id for g in batch] == ["e0.p2.a0"]
    assert [(d.group_id, d.reason) for d in drops] == [("e0.p1.a0", DropReason.STALE)]
    assert drops[0].num_tokens == ready(1, 0).num_tokens > 0
    assert drops[0].pack == ready(1, 0).pack


def test_samples_of_a_version_not_reached_are_dropped() -> None:
    """A group from a session that was rolled back is not trained on."""
    box = batcher(groups_per_step=1)
    box.offer(ready(1, 9))
    batch, drops = box.take(PolicyVersion(3))
    assert not batch
    assert drops[0].reason is DropReason.FUTURE


def begun_at(version: int, run: VersionRun) -> tuple[VersionRun, ...]:
    """The same tokens, of which the first was sampled by an older version."""
    first = VersionRun(PolicyVersion(version), run.start, run.start + 1)
    return (first, run._replace(start=run.start + 1)) if run.end > first.end else (first,)


def test_samples_of_versions_that_a_crash_rolled_back_are_dropped() -> None:
    """Version 9 has the weights of version 4 again: 5 to 8 are of no ancestor, though their numbers look fresh at 9."""
    box = batcher(groups_per_step=4, max_staleness=5)
    box.abandon(PolicyVersion(1), PolicyVersion(3))  # an earlier crash
    box.abandon(PolicyVersion(4), PolicyVersion(9))
    for number, version in enumerate((4, 5, 8, 9)):
        box.offer(ready(number, version))
    box.offer(ready(4, 10))
    mixed = ready(5, 9)
    rows = tuple(
        dataclasses.replace(row, version_runs=begun_at(8, row.version_runs[0])) for row in mixed.group.trajectories
    )
    summary = mixed.scored.generated.model_copy(update={"oldest_version": 8})
    scored = mixed.scored.model_copy(update={"generated": summary})
    box.offer(ReadyGroup(scored, PACK, dataclasses.replace(mixed.group, trajectories=rows)))
    _, drops = box.take(PolicyVersion(9))
    assert {drop.group_id: drop.reason for drop in drops} == {
        f"e0.p{number}.a0": DropReason.FUTURE for number in (1, 2, 4, 5)
    }
    assert box.num_ready == 2


def test_less_than_a_batch_waits() -> None:
    """Too few fresh groups give no batch, and remain ready."""
    box = batcher()
    box.offer(ready(1, 0))
    assert box.take(PolicyVersion(0)) == ([], [])
    assert box.num_ready == 1


def test_a_trained_group_is_in_the_ledger_within_the_window_and_removed_after_it() -> None:
    """The ledger holds trained groups as long as they could still be fresh, and no longer."""
    ledger = Ledger()
    for version in range(100):
        ledger.record(PolicyVersion(version), [f"e0.p{version}.a0"], max_staleness=2)
    assert "e0.p99.a0" in ledger
    assert "e0.p97.a0" in ledger
    assert "e0.p96.a0" not in ledger
    assert len(ledger) == 3
    again = Ledger(ledger.rows())
    assert "e0.p98.a0" in again
    assert batcher(ledger=again).is_spent("e0.p98.a0")


def test_tokens_are_counted_by_age() -> None:
    """The histogram has every sampled token of the batch under its age in versions."""
    first, second = ready(1, 3), ready(2, 5)
    assert staleness_tokens([first, second], PolicyVersion(5)) == {0: second.num_tokens, 2: first.num_tokens}


@examples(60)
@given(arrivals=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30), max_staleness=st.integers(0, 3))
def test_every_group_is_trained_or_dropped_or_waiting(arrivals: list[tuple[int, int]], max_staleness: int) -> None:
    """However groups arrive while the version grows, each has one outcome, and no batch holds a stale one."""
    box = batcher(max_staleness=max_staleness)
    trained, dropped = [], []
    version = 0
    for number, (age, growth) in enumerate(arrivals):
        box.offer(ready(number, max(0, version - age), size=1))
        batch, drops = box.take(PolicyVersion(version))
        assert all(version - g.scored.generated.oldest_version <= max_staleness for g in batch)
        trained += [g.group_id for g in batch]
        dropped += [d.group_id for d in drops]
        box.settle()
        version += growth
    ended = [*trained, *dropped]
    assert len(ended) == len(set(ended))
    assert len(ended) + box.num_ready == len(arrivals)
