"""Policy versions and staleness: the only place that compares two versions.

A policy version is an int that grows by one with every published set of weights; version 0 is the
model a run starts from. An engine's string (SGLang's ``weight_version``) is translated in
``rollout_service/engines/completion.py`` (`read_version`) and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    versions = [run.version for run in runs]
    if not versions:
        raise ValueError("no version run: a trajectory must say which policy sampled its tokens")
    return min(versions)


def newest(runs: Iterable[VersionRun]) -> PolicyVersion:
    versions = [run.version for run in runs]
    if not versions:
        raise ValueError("no version run: a trajectory must say which policy sampled its tokens")
    return max(versions)


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

    That holds for a group sampled by the trainer's own version. Where publishing takes longer than a
    step, the newest version of the workers is ``lag`` versions behind it: the group is too old that many
    steps earlier, so that many steps' groups fewer may be in flight.
    """
    return max(0, (max_staleness + 1 - lag) * groups_per_step - outstanding)
