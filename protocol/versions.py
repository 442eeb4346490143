"""Policy versions and staleness: the only place that compares two versions.

A policy version is an int that grows by one with every published set of weights; version 0 is the
model a run starts from. An engine's string (SGLang's ``weight_version``) is translated in
``rollout_service/engines/completion.py`` (`read_version`) and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NewType

PolicyVersion = NewType("PolicyVersion", int)


class VersionRun(NamedTuple):
    """Tokens ``[start, end)`` of a trajectory were sampled by ``version``."""

    version: PolicyVersion
    start: int
    end: int


def oldest(runs: Iterable[VersionRun]) -> PolicyVersion:
    """Return the oldest version among the runs; staleness is always measured from it.

    Raises ValueError when there is no run: tokens of an unknown version are never trained on.
    """
    return min(_versions(runs))


def newest(runs: Iterable[VersionRun]) -> PolicyVersion:
    return max(_versions(runs))


def _versions(runs: Iterable[VersionRun]) -> list[PolicyVersion]:
    if versions := [run.version for run in runs]:
        return versions
    raise ValueError("no version run: a trajectory must say which policy sampled its tokens")


def staleness(trainer_version: PolicyVersion, oldest_version: PolicyVersion) -> int:
    """Return by how many versions a sample is behind the trainer at the moment of use.

    Raises ValueError for a sample newer than the trainer: it belongs to another session of the run.
    """
    behind = trainer_version - oldest_version
    if behind < 0:
        raise ValueError(
            f"sample of version {oldest_version} is newer than the trainer's version {trainer_version}; "
            "it belongs to another run or to a checkpoint that was rolled back"
        )
    return behind


def is_fresh(trainer_version: PolicyVersion, oldest_version: PolicyVersion, max_staleness: int) -> bool:
    return staleness(trainer_version, oldest_version) <= max_staleness


def last_chance_version(trainer_version: PolicyVersion, max_staleness: int) -> PolicyVersion:
    """Return the version whose samples may be trained on at ``trainer_version``, but not at the version after it.

    Below 0 near the start of a run: no sample has it.
    """
    return PolicyVersion(trainer_version - max_staleness)


class Branch(NamedTuple):
    """Versions between ``after`` and ``until``, both exclusive, are of sessions that were rolled back.

    ``until`` has the weights of ``after`` again, or those that the run started from.
    """

    after: PolicyVersion
    until: PolicyVersion


class Remade(NamedTuple):
    """The ``num`` versions after ``first`` were made again, of the same groups, as those after ``until``."""

    until: PolicyVersion
    first: PolicyVersion  # has the weights of ``until``; every version after it is of the same session
    num: int


@dataclass(slots=True)
class VersionTree:
    """Ages of samples in a run whose sessions were rolled back; pure.

    A sample is as old as there are updates between the weights that sampled it and those that train on it: back to
    where their ways part, and on from there. Without a branch that is the difference of the two numbers.

                   ┌─ 11 ─ 12 ─ 13 ─ 14     killed; resumed from the checkpoint of version 10
        ─ 9 ─ 10 ──┴─ 15 ─ 16               15 has 10's weights: at 16 a token of 9 is 2 updates old, one of 12 is 1 + 2

    If 16 was made of the groups that 11 had been made of, both have the same weights: the token of 12 is 1 update away.
    """

    branches: list[Branch] = field(default_factory=list)  # of the versions that this run descends from, oldest first
    steps: dict[PolicyVersion, int] = field(default_factory=dict)  # optimizer steps done, of published versions
    remade: list[Remade] = field(default_factory=list)
    _lowest: dict[tuple[int, int], int] = field(default_factory=dict)  # cache of the lowest steps from one to another

    def begin_session(self, steps: Mapping[PolicyVersion, int], branch: Branch | None = None) -> None:
        """Add the branch of sessions that were rolled back; ``steps``: those of the versions published so far."""
        self.steps, self._lowest = dict(steps), {}
        if branch is not None:
            self.branches.append(branch)

    def mark_remade(self, until: PolicyVersion, first: PolicyVersion) -> None:
        """Record that the next version after ``until`` is made of the same groups as the next one after ``first``."""
        num = sum(entry.num for entry in self.remade if entry[:2] == (until, first))
        self.remade = [*(entry for entry in self.remade if entry[:2] != (until, first)), Remade(until, first, num + 1)]

    def is_abandoned(self, version: PolicyVersion) -> bool:
        return any(branch.after < version < branch.until for branch in self.branches)

    def parts(self, oldest_version: PolicyVersion, newest_version: PolicyVersion) -> bool:
        """Return True if versions from the oldest to the newest may be of a session that was rolled back."""
        return any(newest_version > after and oldest_version < until for after, until in self.branches)

    def age(self, trainer_version: PolicyVersion, sampled_by: PolicyVersion) -> int:
        """Return the number of updates between two versions, the first of which the run descends from.

        Raises ValueError for a sample newer than the trainer, and one of a branch whose version is not known.
        """
        at, distance = trainer_version, 0
        for after, until in reversed(self.branches):
            if sampled_by >= until or at < until:
                continue
            at, distance = after, distance + staleness(at, until)
            if sampled_by > after:
                return self._age_on_branch(Branch(after, until), sampled_by, distance)
        return distance + staleness(at, sampled_by)

    def ages(self, trainer_version: PolicyVersion, versions: Iterable[PolicyVersion]) -> dict[int, int]:
        """Return the ages that are not the difference of the numbers, by version."""
        by_version = {version: self.age(trainer_version, version) for version in {*versions} if self.branches}
        return {version: age for version, age in sorted(by_version.items()) if age != trainer_version - version}

    def _age_on_branch(self, branch: Branch, version: PolicyVersion, distance: int) -> int:
        """Return the age of a version of a branch, whose end the trainer has passed by ``distance`` updates."""
        start, step = self.steps.get(branch.until), self.steps.get(version)
        if start is None or step is None:
            raise ValueError(
                f"sample of version {version}, of a session rolled back to version {branch.after}: its step is unknown"
            )
        lowest = self._lowest.get((branch.after, version))
        if lowest is None:  # a session in between may have been resumed from an older checkpoint than this branch
            between = (s for v, s in self.steps.items() if branch.after < v <= version)
            lowest = self._lowest[branch.after, version] = min(start, *between)
        for until, first, num in self.remade:
            if until == branch.until and version >= first and step - start == version - first:
                shared = min(version - first, num, distance)
                return (distance - shared) + (version - first - shared)
        return distance + (start - lowest) + (step - lowest)


def is_newer(candidate: PolicyVersion, current: PolicyVersion | None) -> bool:
    """Return True if ``candidate`` should replace ``current`` (None: no version is held yet)."""
    return current is None or candidate > current


def newest_of(versions: Iterable[PolicyVersion | None]) -> PolicyVersion | None:
    return max((version for version in versions if version is not None), default=None)


def oldest_of(versions: Sequence[PolicyVersion | None]) -> PolicyVersion | None:
    """Return the oldest of some versions; None if one of them is not known."""
    known = [version for version in versions if version is not None]
    return min(known) if len(known) == len(versions) else None


def next_version(version: PolicyVersion) -> PolicyVersion:
    return PolicyVersion(version + 1)


def admissible_groups(*, outstanding: int, max_staleness: int, groups_per_step: int, lag: int = 0) -> int:
    """Return how many more groups may be issued (the AReaL capacity rule, arXiv 2505.24298).

    ``outstanding`` counts groups issued and not yet trained or dropped. With at most
    ``(max_staleness + 1) * groups_per_step`` of them in flight, a group that is trained in
    order can be at most ``max_staleness`` versions old.

    That holds for a group sampled by the trainer's version. Where publishing takes longer than a
    step, the newest version of the workers is ``lag`` versions behind it: the group is too old that many
    steps earlier, so that many steps' groups fewer may be in flight.
    """
    return max(0, (max_staleness + 1 - lag) * groups_per_step - outstanding)
