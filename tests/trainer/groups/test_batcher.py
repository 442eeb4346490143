"""Which groups make a batch, and which are dropped and why; what makes the effect of each exactly-once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.trainer.groups.stored_groups import invent_group

from penstock.protocol.facts import DeadLetter
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.record.lineage import GROUP_DIGITS, group_digest
from penstock.protocol.versions import Branch, PolicyVersion, VersionRun
from penstock.trainer.algorithm.algorithm_settings import RECORDED, AlgorithmSettings
from penstock.trainer.groups.batcher import Batcher, Reuse, staleness_tokens
from penstock.trainer.groups.group_states import GroupStates, State
from penstock.trainer.groups.group_totals import Drop, DropReason
from penstock.trainer.groups.rolled_back import RolledBackSteps
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.rollout_settings import RolloutSettings

PACK = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)


def ready(number: int, version: int, *, size: int = 2) -> ReadyGroup:
    group = invent_group(f"e0.p{number}.a0", version=version, size=size, seed=number)
    scored = ScoredGroup(generated=group.summary(0), rewards=(1.0,) * size, scorer="test")
    return ReadyGroup(scored, PACK, group)


class Box:
    """A batcher and the states of its groups, used as the trainer does; every group that arrives was issued."""

    def __init__(
        self, *, groups_per_step: int = 2, max_staleness: int = 2, reuse: Reuse | None = None, max_dead: int = 100,
        ledger: Iterable[tuple[int, Sequence[str]]] = (), algorithm: AlgorithmSettings | None = None,
    ) -> None:  # fmt: skip
        reuse = reuse or Reuse()
        self.groups = GroupStates(max_staleness=max_staleness, max_trained_count=reuse.max_trained_count, ledger=ledger)
        rollout = RolloutSettings(groups_per_step=groups_per_step, max_staleness=max_staleness)
        algorithm = algorithm or AlgorithmSettings.model_validate(dataclasses.asdict(reuse), context=RECORDED)
        self.batcher = Batcher(self.groups, self, rollout, algorithm, max_dead=max_dead)
        self._drops: list[Drop] = []
        self._messages = itertools.count(1)

    def accept(self, group_id: str, *, is_preferred: bool = False) -> None:
        return None

    def drop(self, drop: Drop) -> None:
        self.groups.drop(drop)
        self._drops.append(drop)

    @property
    def num_ready(self) -> int:
        return self.batcher.num_ready

    def holds(self, group_id: str) -> bool:
        return self.groups.has_arrived(group_id)

    def is_spent(self, group_id: str) -> bool:
        """Return True for a group that is held or was trained, and is not wanted again."""
        return self.batcher._refusal(group_id) is DropReason.DUPLICATE

    def offer(self, group: ReadyGroup) -> Drop | None:
        if self.groups.state(group.group_id) is None:
            self.groups.issue([group.group_id])
        num_drops, wanted = len(self._drops), self.batcher.receive(next(self._messages), [group.scored])
        self.batcher.offer([group] if wanted else [])
        return self._drops[-1] if len(self._drops) > num_drops else None

    def take(self, version: PolicyVersion) -> tuple[list[ReadyGroup], list[Drop]]:
        num_drops, batch = len(self._drops), self.batcher.take(version)
        return batch, self._drops[num_drops:]

    def train(self, version: int) -> list[str]:
        batch, _ = self.take(PolicyVersion(version))
        self.groups.train(PolicyVersion(version), batch, {})
        return [group.group_id for group in batch]


def test_staleness_is_measured_at_the_time_of_use() -> None:
    """A group that was fresh on arrival is dropped as stale at a later version, with its tokens."""
    box = Box(groups_per_step=1)
    box.offer(ready(1, 0))
    box.offer(ready(2, 3))
    batch, drops = box.take(PolicyVersion(3))
    assert [g.group_id for g in batch] == ["e0.p2.a0"]
    assert [(d.group_id, d.reason) for d in drops] == [("e0.p1.a0", DropReason.STALE)]
    assert drops[0].num_tokens == ready(1, 0).num_tokens > 0
    assert drops[0].pack == ready(1, 0).pack


def test_samples_of_a_version_not_reached_are_dropped() -> None:
    """A group from a session that was rolled back is not trained on."""
    box = Box(groups_per_step=1)
    box.offer(ready(1, 9))
    batch, drops = box.take(PolicyVersion(3))
    assert not batch
    assert drops[0].reason is DropReason.FUTURE


def begun_at(version: int, run: VersionRun) -> tuple[VersionRun, ...]:
    """The same tokens, of which the first was sampled by an older version."""
    first = VersionRun(PolicyVersion(version), run.start, run.start + 1)
    return (first, run._replace(start=run.start + 1)) if run.end > first.end else (first,)


def mixed(number: int, first: int, version: int, *, least: int | None = None) -> ReadyGroup:
    """A group of one version, but for the first token of each of its rows; its message says the ``least`` one."""
    group = ready(number, version)
    rows = tuple(
        dataclasses.replace(row, version_runs=begun_at(first, row.version_runs[0])) for row in group.group.trajectories
    )
    versions = {"oldest_version": min(first, version) if least is None else least, "newest_version": version}
    scored = group.scored.model_copy(update={"generated": group.scored.generated.model_copy(update=versions)})
    return ReadyGroup(scored, PACK, dataclasses.replace(group.group, trajectories=rows))


def rolled_back(box: Box, *, steps: int, to: int) -> PolicyVersion:
    """Resume, after so many steps from version 0 on, the checkpoint of a version; return the version of its weights."""
    until = PolicyVersion(steps + 1)
    published = {PolicyVersion(version): version for version in range(steps + 1)}
    box.groups.versions.begin_session({**published, until: to}, Branch(PolicyVersion(to), until))
    return until


def reasons(drops: Iterable[Drop]) -> dict[str, str]:
    return {drop.group_id: str(drop.reason) for drop in drops}


def test_samples_of_rolled_back_versions_are_as_old_as_the_way_through_the_branch_point() -> None:
    """Version 9 has the weights of version 4: 3 is 1 update away, 6 is 2, and 7 is 3, whatever their numbers say."""
    box = Box(groups_per_step=9)
    now = rolled_back(box, steps=8, to=4)
    for number, version in enumerate((1, 2, 3, 4, 5, 6, 7, 8, 9)):
        box.offer(ready(number, version))
    box.offer(mixed(9, 6, 9))
    box.offer(mixed(10, 7, 9))
    box.offer(mixed(11, 1, 9))
    box.offer(mixed(12, 7, 9, least=4))  # another row is of 4
    _, drops = box.take(now)
    assert reasons(drops) == {f"e0.p{number}.a0": "stale" for number in (0, 6, 7, 10, 11, 12)}
    _, drops = box.take(PolicyVersion(now + 1))
    assert reasons(drops) == {f"e0.p{number}.a0": "stale" for number in (1, 5, 9)}


def test_a_group_trained_before_a_crash_is_known_as_long_as_its_samples_are_fresh() -> None:
    """Version 9 has the weights of 4: a second message of a group trained at 3, sampled by 3, is one update old."""
    box = Box(groups_per_step=1, ledger=((3, ("e0.p0.a0",)),))
    now = rolled_back(box, steps=8, to=4)
    for number in (1, 2, 3, 4):
        assert box.is_spent("e0.p0.a0") == (number < 4)
        box.offer(ready(number, now))
        box.train(now)
        now = PolicyVersion(now + 1)


def test_the_bound_0_leaves_the_samples_of_the_branch_point() -> None:
    box = Box(groups_per_step=2, max_staleness=0)
    now = rolled_back(box, steps=8, to=4)
    for number, version in enumerate((3, 4, 5, 9)):
        box.offer(ready(number, version))
    batch, drops = box.take(now)
    assert [group.group_id for group in batch] == ["e0.p1.a0", "e0.p3.a0"]
    assert reasons(drops) == {"e0.p0.a0": "stale", "e0.p2.a0": "stale"}


def test_a_version_of_a_rolled_back_session_that_was_never_announced_is_of_the_future() -> None:
    """So is one that this session has not reached."""
    box = Box(groups_per_step=3)
    now = rolled_back(box, steps=8, to=4)
    del box.groups.versions.steps[PolicyVersion(6)]
    for number, group in enumerate((ready(0, 6), ready(1, 10), mixed(2, 6, 9), ready(3, 5))):
        assert box.offer(group) is None, number
    _, drops = box.take(now)
    assert reasons(drops) == {f"e0.p{number}.a0": "future" for number in (0, 1, 2)}


def test_the_oldest_samples_go_first_by_their_age() -> None:
    """A batch takes the groups that become stale first, sorted by id; the others remain ready."""
    box = Box()
    now = rolled_back(box, steps=8, to=4)
    for number, version in enumerate((4, 9, 6, 3)):
        box.offer(ready(number, version))
    batch, drops = box.take(now)
    assert ([group.group_id for group in batch], drops) == (["e0.p2.a0", "e0.p3.a0"], [])
    assert box.num_ready == 2
    assert box.holds("e0.p3.a0")
    box.groups.train(now, batch, {})
    assert not box.holds("e0.p3.a0")


def digests(groups: Iterable[ReadyGroup]) -> tuple[str, ...]:
    return tuple(group_digest(group.scored, group.pack, 1)[:GROUP_DIGITS] for group in groups)


def test_rolled_back_steps_are_made_again_of_their_groups_and_nothing_is_dropped() -> None:
    """Although they are beyond the bound: the same groups make the same weights, and no sample is older than it was."""
    groups = [ready(number, 4 + number // 2) for number in range(9)]
    batches = [digests(groups[0:2]), digests(groups[2:4]), digests(groups[4:6]), digests(groups[6:8])]
    box = Box(max_staleness=0)
    now = rolled_back(box, steps=8, to=4)
    box.batcher.repeat(RolledBackSteps(tuple(batches), ((None, 4),)), now)
    for group in reversed(groups):
        assert not box.batcher.is_full(now)
        box.offer(group)
    for step in range(4):
        assert box.batcher.is_full(now)
        assert not box.batcher.overtakes(now)
        batch, drops = box.take(now)
        assert ([group.group_id for group in batch], drops) == ([f"e0.p{2 * step}.a0", f"e0.p{2 * step + 1}.a0"], [])
        box.groups.train(now, batch, {})
        now = PolicyVersion(now + 1)
    assert box.batcher.num_to_repeat == 0
    box.offer(ready(9, now))
    assert [group.group_id for group in box.take(now)[0]] == ["e0.p8.a0", "e0.p9.a0"]  # 8 has the weights of 13


def test_where_a_group_of_a_rolled_back_step_does_not_come_the_others_count_as_of_a_branch() -> None:
    groups = [ready(number, 4 + number // 2) for number in range(8)]
    box = Box(max_staleness=1)
    now = rolled_back(box, steps=8, to=4)
    steps = RolledBackSteps((digests(groups[0:2]), digests(groups[2:4]), digests(groups[4:6])), ((None, 4),))
    box.batcher.repeat(steps, now)
    for group in (*groups[:3], *groups[4:]):
        box.offer(group)
    batch, drops = box.take(now)
    assert (len(batch), drops) == (2, [])
    box.groups.train(now, batch, {})
    now = PolicyVersion(now + 1)
    assert box.take(now) == ([], [])
    box.batcher.stop_repeating()
    batch, drops = box.take(now)  # at the weights of 5: 6 is one update away, 7 two
    assert [group.group_id for group in batch] == ["e0.p4.a0", "e0.p5.a0"]
    assert reasons(drops) == {"e0.p6.a0": "stale", "e0.p7.a0": "stale"}


def test_less_than_a_batch_waits() -> None:
    """Too few fresh groups give no batch, and remain ready."""
    box = Box()
    box.offer(ready(1, 0))
    assert box.take(PolicyVersion(0)) == ([], [])
    assert box.num_ready == 1


def test_a_trained_group_is_known_within_the_window_and_forgotten_after_it() -> None:
    """Trained groups are refused as long as they could still be fresh, also after a resume, and are known no longer."""
    box = Box(groups_per_step=1)
    for version in range(100):
        box.offer(ready(version, version))
        box.train(version)
    assert [box.groups.state(f"e0.p{number}.a0") for number in (99, 97, 96)] == [State.CLOSED, State.CLOSED, None]
    assert box.groups.rows() == tuple((version, (f"e0.p{version}.a0",)) for version in (97, 98, 99))
    again = Box(ledger=box.groups.rows())
    assert again.groups.rows() == box.groups.rows()
    assert again.is_spent("e0.p98.a0")
    assert not again.is_spent("e0.p96.a0")


def test_letters_stop_the_issue_and_empty_queues_end_the_run() -> None:
    box = Box(max_dead=4)
    kill(box, range(4), "500")
    assert not box.batcher.stops_issue
    kill(box, [4], "501")
    assert box.batcher.stops_issue
    assert box.batcher.letters_were_true()
    assert (box.batcher.dead_in_a_row, box.batcher.last_letter) == (5, "tasks: 501: d")
    assert box.groups.letters_read == 4


def test_a_group_that_arrives_keeps_the_run() -> None:
    """Each that arrives admits one more; where queues are empty all the same, issue goes on without an end."""
    box = Box(max_dead=4)
    kill(box, range(10), "500")
    for number in range(20, 25):
        box.offer(ready(number, 0))
    assert box.batcher.stops_issue
    box.offer(ready(25, 0))
    assert not box.batcher.stops_issue
    kill(box, range(10, 13), "500")
    assert box.batcher.stops_issue
    assert not box.batcher.letters_were_true()
    assert not box.batcher.stops_issue
    for number in range(30, 80):
        box.offer(ready(number, 0))
    kill(box, range(13, 17), "500")
    assert not box.batcher.stops_issue


def test_a_letter_of_a_killed_reader_has_its_groups_issued_again() -> None:
    """Their pack may have killed it by no fault of theirs; other letters are the end of a group."""
    box = Box()
    kill(box, [1], "ReaderKilled")
    kill(box, [2], "500")
    assert [(drop.reason, drop.is_final) for drop in box._drops] == [("quarantined", False), ("dead", True)]


def kill(box: Box, numbers: Iterable[int], reason: str) -> None:
    """Issue groups, and read the dead letter that names them."""
    ids = tuple(f"e0.p{number}.a0" for number in numbers)
    box.groups.issue(ids)
    letter = DeadLetter(
        run_id="r", stage="tasks", subject="s", reason=reason, detail="d", group_ids=ids, num_delivered=1
    )
    assert box.batcher.dead_letter(letter, int(ids[0].split(".")[1][1:])) == len(ids)


def test_tokens_are_counted_by_age() -> None:
    """The histogram has every sampled token of the batch under its age in versions."""
    first, second = ready(1, 3), ready(2, 5)
    assert staleness_tokens([first, second], PolicyVersion(5)) == {0: second.num_tokens, 2: first.num_tokens}


@examples(60)
@given(arrivals=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30), max_staleness=st.integers(0, 3))
def test_every_group_is_trained_or_dropped_or_waiting(arrivals: list[tuple[int, int]], max_staleness: int) -> None:
    """However groups arrive while the version grows, each has one outcome, and no batch holds a stale one."""
    box = Box(max_staleness=max_staleness)
    trained, dropped = [], []
    version = 0
    for number, (age, growth) in enumerate(arrivals):
        box.offer(ready(number, max(0, version - age), size=1))
        batch, drops = box.take(PolicyVersion(version))
        assert all(version - g.scored.generated.oldest_version <= max_staleness for g in batch)
        trained += [g.group_id for g in batch]
        dropped += [d.group_id for d in drops]
        box.groups.train(PolicyVersion(version), batch, {})
        version += growth
    ended = [*trained, *dropped]
    assert len(ended) == len(set(ended))
    assert len(ended) + box.num_ready == len(arrivals)
