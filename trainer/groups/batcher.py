"""Decides which arriving groups are wanted, which of them make the next batch, and which are dropped and why; pure.

A message is settled when each of its groups was trained for the last time, dropped, or refused on arrival. Only then
may a checkpoint cover it, and only after that checkpoint may it be acknowledged.

Steps that a crash rolled back are made again of the groups they had (`repeat`): then the weights are those that the
killed session published, its samples are as old as they were, and none is dropped. Where a group of such a step does
not come, the steps from there on are made of whatever is ready, and the samples of the killed session count as of a
branch (`VersionTree`).

New groups go first: one that was trained and is kept, if `algorithm.max_trained_count` is above 1, fills a batch that
would otherwise wait, and is retired when it was used often enough or is too old.

Every service may write dead letters, and a letter may name a group that is well and on its way. So letters alone end no
run. They close groups until the groups arrive after all, and they stop the issue of others once more than ``max_dead``
were closed in excess of those that arrived. Then the queues run empty unless groups are on their way, and only if all
queues are empty the letters were true.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol

from penstock.protocol.errors import ReaderKilled
from penstock.protocol.facts import DeadLetter
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.record.lineage import GROUP_DIGITS, group_digest
from penstock.protocol.versions import PolicyVersion, staleness
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.group_filters.interface import GroupRule, drop_reason
from penstock.trainer.groups.group_states import GroupStates, State
from penstock.trainer.groups.group_totals import Drop, DropReason, claimed_tokens
from penstock.trainer.groups.prompt_cursor import GroupKey
from penstock.trainer.groups.rolled_back import RolledBackSteps
from penstock.trainer.learner.step_plan import NO_AGES, ReadyGroup
from penstock.trainer.rollout_settings import RolloutSettings

_OWN_STAGE = "scored"


@dataclass(frozen=True, slots=True)
class Reuse:
    """How often, and how far apart, a group may be trained on (AgentRL)."""

    max_trained_count: int = 1
    retrained_interval: int = 1  # versions between two uses

    def allows(self, uses: Sequence[PolicyVersion], version: PolicyVersion) -> bool:
        """Return True if a group that was trained at the versions ``uses`` may be trained again at ``version``."""
        return len(uses) < self.max_trained_count and version - uses[-1] >= self.retrained_interval


def group_rules(settings: AlgorithmSettings) -> tuple[GroupRule, ...]:
    return tuple(
        GroupRule(
            group_filter.name,
            group_filter.value.reason,
            partial(group_filter.value.fn, **settings.options_of(group_filter.value).model_dump()),
        )
        for group_filter in settings.parts.group_filters
    )


class IssuedGroups(Protocol):
    def accept(self, group_id: str, *, is_preferred: bool = False) -> DropReason | None: ...

    def drop(self, drop: Drop) -> object: ...


class Batcher:
    """The decisions between arrival and use. Not thread-safe: who holds `RunGroups.lock` may call it."""

    def __init__(
        self,
        groups: GroupStates,
        issued: IssuedGroups,
        rollout: RolloutSettings,
        algorithm: AlgorithmSettings,
        *,
        max_dead: int | None = None,
    ) -> None:
        """Start with the groups of a checkpoint; no other object may record that they arrive, are offered or are taken.

        ``max_dead`` are the consecutive dead-lettered groups, without one that arrives, that end a run; None: as many
        as may be outstanding.
        """
        self._groups, self._issued = groups, issued
        self._reuse = Reuse(algorithm.max_trained_count, algorithm.retrained_interval)
        self._rules, self._needs_baseline = group_rules(algorithm), algorithm.needs_baseline
        self._groups_per_step, self._max_staleness = rollout.groups_per_step, rollout.max_staleness
        self._max_dead = rollout.max_outstanding if max_dead is None else max_dead
        self._excess_dead = 0  # dead-lettered groups minus arrived ones, since it was last 0
        self.dead_in_a_row = 0  # dead-lettered groups since the last one that arrived
        self.last_letter = ""  # the reason of the newest dead letter
        self._checked_at: PolicyVersion | None = None  # each ready group is checked once for a version
        self._unchecked: list[ReadyGroup] = []  # offered since then
        self._too_old: dict[str, Drop] = {}  # ready groups that are not fresh at that version
        self.dropped: Counter[str] = Counter()  # groups of this session, by reason
        self._repeated: list[Sequence[str]] = []  # digests of the groups of each step that is made again
        self._in_repeated: frozenset[str] = frozenset()  # of all these
        self._marks: Sequence[tuple[PolicyVersion, PolicyVersion]] = ()  # of `Remade`, for each step that is made again
        self._digests: dict[tuple[str, int], str] = {}  # of held groups, by id and use

    def repeat(self, rolled_back: RolledBackSteps, version: PolicyVersion) -> None:
        """Make the next batches, from ``version`` on, of the groups of steps that were rolled back."""
        self._repeated = list(rolled_back.batches)
        self._in_repeated = frozenset(chain(*rolled_back.batches))
        self._marks = [
            (version if until is None else PolicyVersion(until), PolicyVersion(first))
            for until, first in rolled_back.marks
            if (until, first) != (None, version)  # no version was published after it
        ]

    @property
    def num_to_repeat(self) -> int:
        return len(self._repeated)

    def stop_repeating(self) -> None:
        self._repeated, self._digests, self._checked_at = [], {}, None

    # ── arrival ───────────────────────────────────────────────────────────────────────────────

    def receive(self, message: int, groups: Sequence[ScoredGroup], pack: BlobRef | None = None) -> list[ScoredGroup]:
        """Record a message by its sequence number; return the groups to read and offer, the others count as refused.

        Of two attempts at a prompt the one that a step had which is made again is preferred, else the one that arrived.
        """
        self._groups.receive(message)
        wanted: list[ScoredGroup] = []
        for scored in groups:
            is_repeated = bool(self._repeated) and pack is not None and _digits(scored, pack) in self._in_repeated
            reason = self._refusal(scored.generated.group_id, is_preferred=is_repeated)
            if reason is None:
                wanted.append(scored)
                self._groups.arrive(scored.generated.group_id, message)
            else:
                self._groups.totals.refuse(_unread(scored, reason))
        return wanted

    def offer(self, groups: Iterable[ReadyGroup]) -> None:
        for group in groups:
            self._excess_dead = max(0, self._excess_dead - 1)
            self.dead_in_a_row = 0
            is_new = not self._groups.uses(group.group_id)
            if is_new and (drop := self._rejected(group)) is not None:
                self._drop(drop)
                continue
            self._groups.offer(group)
            if is_new:
                self._unchecked.append(group)

    def drop_unreadable(
        self, message: int, wanted: Iterable[ScoredGroup], reason: DropReason = DropReason.UNREADABLE
    ) -> None:
        """Drop groups whose pack cannot be read; the caller moves their message to the dead letters.

        A group that an earlier session trained and kept for another use is closed already: it is only not used again.
        """
        self._groups.forget_messages([message])
        for scored in wanted:
            if self._groups.uses(scored.generated.group_id):
                self._groups.retire(scored.generated.group_id)
            else:
                self._drop(_unread(scored, reason))

    # ── the next batch ────────────────────────────────────────────────────────────────────────

    @property
    def num_ready(self) -> int:
        return self._groups.num(State.READY)

    @property
    def may_be_full(self) -> bool:
        return self.num_ready + self._groups.num_kept_here >= self._groups_per_step

    def is_full(self, version: PolicyVersion) -> bool:
        if self._repeated:
            return bool(self._next_repeated())
        self._check(version)
        return self.num_ready - len(self._too_old) + len(self._again(version)) >= self._groups_per_step

    def overtakes(self, version: PolicyVersion) -> bool:
        """Return True if a batch taken at ``version`` now leaves behind groups that may be too old for every later one.

        They are under way, as is a group whose pack is being read. False while there is no full batch.
        """
        return not self._repeated and self.is_full(version) and self._groups.is_late(version)

    def take(self, version: PolicyVersion) -> list[ReadyGroup]:
        """Return the batch to train at ``version``, or nothing while it is not full; drop what is too old.

        The oldest samples are chosen first, since they become stale first. The batch is sorted by group id, so that the
        same groups make the same batch in whatever order they arrived. Nothing is dropped while steps are made again.
        """
        if self._repeated:
            return self._take_repeated()
        self._check(version)
        too_old, self._too_old = self._too_old, {}
        for drop in too_old.values():
            self._drop(drop)
        for group in self._groups.held(State.KEPT):  # they were trained, so no data is discarded
            if self._verdict(group, version)[0] is not None:
                self._groups.retire(group.group_id)
        ready, again = self._groups.held(State.READY), self._again(version)
        missing = max(0, self._groups_per_step - len(ready))
        if missing > len(again):
            return []
        new = sorted(ready, key=lambda g: -self._verdict(g, version)[1])[: self._groups_per_step]
        batch = sorted([*new, *again[:missing]], key=lambda g: g.group_id)
        self._groups.take(group.group_id for group in batch)
        return batch

    def end(self) -> None:
        self._groups.end()

    # ── groups that do not arrive ─────────────────────────────────────────────────────────────

    def missing(self) -> list[str]:
        """Return the outstanding groups that have not arrived, in the order of their next attempts."""
        return [str(key) for key in sorted(map(GroupKey.parse, self._groups.missing()))]

    @property
    def is_drained(self) -> bool:
        return not self._groups.num(State.ISSUED) and not self._groups.num(State.ARRIVED)

    def drop_missing(self) -> list[str]:
        missing = self.missing()
        for group_id in missing:
            self._drop(Drop(group_id, DropReason.LOST, 0))
        return missing

    def dead_letter(self, letter: DeadLetter, sequence: int) -> int:
        # A letter of the trainer itself, read again after a crash: the object of the next attempt may be readable.
        reason = DropReason.UNREADABLE if letter.stage == _OWN_STAGE else DropReason.DEAD
        if letter.reason == ReaderKilled.__name__:  # perhaps not its fault: the prompt is issued again
            reason = DropReason.QUARANTINED
        dead = sorted({i for i in letter.group_ids if self._groups.state(i) is State.ISSUED})
        for group_id in dead:  # of one that is dead the service has used up its attempts
            self._drop(Drop(group_id, reason, 0, is_final=reason is DropReason.DEAD))
        self._groups.letters_read = sequence
        if dead:
            self._excess_dead += len(dead)
            self.dead_in_a_row += len(dead)
            self.last_letter = f"{letter.stage}: {letter.reason}: {letter.detail}"
        return len(dead)

    @property
    def stops_issue(self) -> bool:
        return self._excess_dead > self._max_dead

    def letters_were_true(self) -> bool:
        """Return True if the run must end, now that all queues are empty; otherwise issue may go on."""
        if self.dead_in_a_row >= self._max_dead:
            return True
        self._excess_dead = 0
        return False

    # ── reasons ───────────────────────────────────────────────────────────────────────────────

    def _refusal(self, group_id: str, *, is_preferred: bool = False) -> DropReason | None:
        if self._groups.is_returning(group_id):
            return None
        if self._groups.has_arrived(group_id) or self._groups.uses(group_id):
            return DropReason.DUPLICATE
        return self._issued.accept(group_id, is_preferred=is_preferred)

    def _rejected(self, group: ReadyGroup) -> Drop | None:
        if (reason := drop_reason(group.scored, group.group, self._rules)) is not None:
            return Drop(group.group_id, reason, group.num_tokens, group.pack, is_final=True)
        if self._needs_baseline and not group.scored.generated.has_baseline:
            return Drop(group.group_id, DropReason.NO_BASELINE, group.num_tokens, group.pack)
        return None

    def _drop(self, drop: Drop) -> None:
        self._issued.drop(drop)
        self.dropped[str(drop.reason)] += 1

    def _check(self, version: PolicyVersion) -> None:
        if version != self._checked_at:
            self._checked_at, self._unchecked, self._too_old = version, self._groups.held(State.READY), {}
        for group in self._unchecked:
            if (reason := self._verdict(group, version)[0]) is not None:
                self._too_old[group.group_id] = Drop(group.group_id, reason, group.num_tokens, group.pack)
        self._unchecked = []

    def _again(self, version: PolicyVersion) -> list[ReadyGroup]:
        uses = {group.group_id: self._groups.uses(group.group_id) for group in self._groups.held(State.KEPT)}
        free = [g for g in self._groups.held(State.KEPT) if self._reuse.allows(uses[g.group_id], version)]
        return sorted(free, key=lambda g: (len(uses[g.group_id]), -self._verdict(g, version)[1], g.group_id))

    def _verdict(self, group: ReadyGroup, version: PolicyVersion) -> tuple[DropReason | None, int]:
        """Return why a group may not be trained on at ``version``, and the age of its oldest sample; 0: not known."""
        summary, tree = group.scored.generated, self._groups.versions
        ends = (PolicyVersion(summary.oldest_version), PolicyVersion(summary.newest_version))
        sampled_by = {*ends}
        if tree.parts(*ends):  # the numbers in between may be of a branch
            sampled_by.update(run.version for row in group.group.trained_rows for run in row.version_runs)
        try:
            age = max(tree.age(version, sampled) for sampled in sampled_by)
        except ValueError:
            return DropReason.FUTURE, 0
        return (DropReason.STALE if age > self._max_staleness else None), age

    # ── steps that are made again ─────────────────────────────────────────────────────────────

    def _next_repeated(self) -> list[ReadyGroup]:
        """Return the groups of the next step that is made again, in its order; none while one is missing."""
        held: dict[str, ReadyGroup] = {}
        for group in (*self._groups.held(State.READY), *self._groups.held(State.KEPT)):
            key = group.group_id, len(self._groups.uses(group.group_id)) + 1
            if key not in self._digests:
                self._digests[key] = _digits(group.scored, group.pack, key[1])
            held[self._digests[key]] = group
        batch = [held[digest] for digest in self._repeated[0] if digest in held]
        return batch if len(batch) == len(self._repeated[0]) else []

    def _take_repeated(self) -> list[ReadyGroup]:
        if batch := self._next_repeated():
            self._groups.take(group.group_id for group in batch)
            for until, first in self._marks:
                self._groups.versions.mark_remade(until, first)
            del self._repeated[0]
            if not self._repeated:
                self.stop_repeating()
        return batch


def _digits(scored: ScoredGroup, pack: BlobRef, use: int = 1) -> str:
    return group_digest(scored, pack, use)[:GROUP_DIGITS]


def _unread(scored: ScoredGroup, reason: DropReason) -> Drop:
    abandoned = scored.generated.abandoned
    return Drop(scored.generated.group_id, reason, claimed_tokens(scored), abandoned=abandoned)


def sampling_versions(batch: Iterable[ReadyGroup]) -> set[PolicyVersion]:
    return {run.version for group in batch for row in group.group.trained_rows for run in row.version_runs}


def staleness_tokens(
    batch: Sequence[ReadyGroup], version: PolicyVersion, *, least: int = 0, ages: Mapping[int, int] = NO_AGES
) -> dict[int, int]:
    """Return the histogram of token ages in versions, of at least ``least``: above 0 the versions are another run's.

    ``ages`` are those that are not the difference of the numbers (`VersionTree.ages`).
    """
    histogram: dict[int, int] = {}
    for group in batch:
        for trajectory in group.group.trained_rows:
            for run in trajectory.version_runs:
                if least:
                    age = max(least, version - run.version)
                else:
                    age = ages[run.version] if run.version in ages else staleness(version, run.version)
                histogram[age] = histogram.get(age, 0) + run.end - run.start
    return dict(sorted(histogram.items()))
