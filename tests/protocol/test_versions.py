"""Versions and staleness: the rules every service relies on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol import versions
from penstock.protocol.versions import Branch, PolicyVersion, VersionRun, VersionTree


def test_staleness_counts_versions_from_the_oldest_token():
    """A group sampled by versions 3 and 5 is two versions behind a trainer at 5."""
    runs = (VersionRun(PolicyVersion(3), 4, 6), VersionRun(PolicyVersion(5), 6, 9))
    assert versions.oldest(runs) == 3
    assert versions.newest(runs) == 5
    assert versions.staleness(PolicyVersion(5), versions.oldest(runs)) == 2
    assert versions.is_fresh(PolicyVersion(5), PolicyVersion(3), max_staleness=2)
    assert not versions.is_fresh(PolicyVersion(6), PolicyVersion(3), max_staleness=2)


def test_a_sample_from_the_future_is_an_error():
    """A sample newer than the trainer is from an earlier trainer process of the run."""
    with pytest.raises(ValueError, match="newer than the trainer's version 4"):
        versions.staleness(PolicyVersion(4), PolicyVersion(5))


def test_tokens_of_unknown_version_are_an_error():
    """A trajectory without version runs is never given a staleness."""
    with pytest.raises(ValueError, match="no version run"):
        versions.oldest(())


@given(st.integers(0, 10**6), st.integers(0, 50), st.integers(1, 512), st.integers(0, 60))
def test_admission_fills_the_pipe_and_never_overfills_it(outstanding: int, max_staleness: int, per_step: int, lag: int):
    """Outstanding groups never exceed (max_staleness + 1) steps, less one for each version not announced yet."""
    more = versions.admissible_groups(
        outstanding=outstanding, max_staleness=max_staleness, groups_per_step=per_step, lag=lag
    )
    bound = max(0, (max_staleness + 1 - lag) * per_step)
    assert more >= 0
    assert outstanding + more == bound or (more == 0 and outstanding >= bound)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 4))
def test_the_last_chance_is_the_last_version_at_which_a_sample_is_fresh(now: int, age: int, max_staleness: int):
    trainer, sampled = PolicyVersion(now + age), PolicyVersion(now)
    fresh = [versions.is_fresh(PolicyVersion(trainer + more), sampled, max_staleness) for more in (0, 1)]
    assert (versions.last_chance_version(trainer, max_staleness) == sampled) == (fresh == [True, False])


def test_the_newer_version_wins():
    assert versions.is_newer(PolicyVersion(0), None)
    assert versions.is_newer(versions.next_version(PolicyVersion(1)), PolicyVersion(1))
    assert not versions.is_newer(PolicyVersion(1), PolicyVersion(1))


def numbered(steps: dict[int, int]) -> dict[PolicyVersion, int]:
    return {PolicyVersion(version): step for version, step in steps.items()}


def age(tree: VersionTree, trainer: int, sampled: int) -> int:
    return tree.age(PolicyVersion(trainer), PolicyVersion(sampled))


def branch(after: int, until: int) -> Branch:
    return Branch(PolicyVersion(after), PolicyVersion(until))


def test_the_age_of_an_abandoned_version_is_the_number_of_updates_through_the_branch_point():
    """Versions 11 to 14 were rolled back: 15 has the weights of 10, and numbers say nothing of the distance."""
    tree = VersionTree()
    tree.begin_session(numbered({v: v for v in range(15)} | {15: 10}), branch(10, 15))
    assert [age(tree, 15, v) for v in (8, 10, 11, 14, 15)] == [2, 0, 1, 4, 0]
    assert [age(tree, 17, v) for v in (8, 10, 11, 14, 15, 17)] == [4, 2, 3, 6, 2, 0]
    assert tree.ages(PolicyVersion(17), map(PolicyVersion, (8, 11, 16))) == {8: 4, 11: 3}
    with pytest.raises(ValueError, match="newer"):
        age(tree, 17, 18)
    tree.begin_session(numbered({v: v for v in range(15)} | {15: 10, 20: 11}), branch(16, 20))
    with pytest.raises(ValueError, match="its step is unknown"):
        age(tree, 20, 19)


class Sessions:
    """A run by the batches that each version was made of, its `VersionTree`, and what its checkpoints hold of it."""

    def __init__(self) -> None:
        self.paths: dict[int, tuple[int, ...]] = {0: ()}
        self.trees: dict[int, VersionTree] = {0: VersionTree()}
        self.parents: dict[int, int] = {}
        self.now, self.first, self.tree = 0, 0, VersionTree()

    def updates(self, one: int, other: int) -> int:
        a, b = self.paths[one], self.paths[other]
        shared = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        return len(a) + len(b) - 2 * shared

    def step(self, batch: int) -> None:
        self._add(self.now, (*self.paths[self.now], batch))

    def ancestors(self) -> list[int]:
        found = [self.now]
        while found[-1] in self.parents:
            found.append(self.parents[found[-1]])
        return found

    def resume(self, after: int, num_remade: int) -> None:
        session = [v for v in range(self.first, self.now + 1) if self.paths[v] == self.paths[after]]
        again = self.paths[self.now][len(self.paths[after]) :][:num_remade] if session else ()
        held = self.trees[after]
        self.tree = VersionTree(list(held.branches), remade=list(held.remade))
        self.first = len(self.paths)
        steps = {version: len(path) for version, path in self.paths.items()} | {self.first: len(self.paths[after])}
        self.tree.begin_session(numbered(steps), branch(after, self.first))
        self._add(after, self.paths[after])
        for batch in again:
            self.tree.mark_remade(PolicyVersion(self.first), PolicyVersion(session[0]))
            self.step(batch)

    def _add(self, parent: int, path: tuple[int, ...]) -> None:
        self.now = len(self.paths)
        self.parents[self.now], self.paths[self.now] = parent, path
        self.trees[self.now] = VersionTree(list(self.tree.branches), remade=list(self.tree.remade))


@given(st.data())
def test_ages_are_exact_for_any_kills_and_never_too_low(data: st.DataObject):
    """Each session goes on from a version that the one before descends from; too high where steps came thrice."""
    run, remakes = Sessions(), data.draw(st.sampled_from((0, 1, 2, "always")))
    for number in range(data.draw(st.integers(1, 5))):
        for batch in range(data.draw(st.integers(0, 4))):
            run.step(10 * number + batch)
        num_remade = data.draw(st.integers(0, 3)) if remakes in (number, "always") else 0
        run.resume(data.draw(st.sampled_from(run.ancestors())), num_remade)
    for version in run.paths:
        found, true = age(run.tree, run.now, version), run.updates(run.now, version)
        assert found >= true
        assert found == true or remakes == "always"
