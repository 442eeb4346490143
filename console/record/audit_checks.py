"""Hold a run's record against everything else that can be seen: checkpoint, streams, dead letters, objects; pure.

| seen                         | must agree with the record in                                                    |
|------------------------------|-----------------------------------------------------------------------------------|
| the checkpoint's state.json  | what it names as its record, its ledger, its account, what dispatch has outstanding |
| the three work queues        | every group in flight is in one of them (or dead, or not sent yet)                |
| the dead letters             | every group dropped as dead has one                                               |
| the object store             | every pack of a trained group is there, with its size and sha256                  |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.console.record.record_fold import SPLITS, Breach, RecordFold
from penstock.protocol.facts import Split
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import LineageChapter
from penstock.protocol.versions import PolicyVersion, is_fresh

STAGES = ("tasks", "generated", "scored")
_DEAD = "dead"


@dataclass(frozen=True, slots=True)
class AuditInputs:
    """Everything that was seen of a run, at one moment of its record."""

    run_id: str
    chapters: Sequence[LineageChapter] = ()  # the oldest first
    state: CheckpointState | None = None  # None: its folder is not here
    waiting: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # stage -> group id -> sampled tokens
    dead: Mapping[str, str] = field(default_factory=dict)  # group id -> reason
    all_letters: bool = True  # whether no letter was discarded, and none was too long to name all its groups
    pack_faults: Mapping[str, str] = field(default_factory=dict)  # key -> what is wrong with the object
    max_uses: int | None = None  # largest max_trained_count of the run's lives; None: not known
    packs_expire: bool = False  # whether a life of the run was told to remove packs of trained groups
    window: int | None = None  # smallest max_staleness of the run's lives; None: not known
    faults: Sequence[Breach] = ()  # found while reading


@dataclass(frozen=True, slots=True)
class SplitLine:
    """One split of the account, in groups and, where tokens exist, in sampled tokens."""

    split: Split
    issued: int
    used: int
    used_tokens: int
    dropped: dict[str, int]  # by reason, dead letters excepted
    dropped_tokens: dict[str, int]
    dead: int
    in_flight: dict[str, int]  # by where they are: a stage, dead, unsent, nowhere
    in_flight_tokens: int

    @property
    def closes(self) -> bool:
        """Whether issued = used + dropped + dead + in flight."""
        return self.issued == self.used + sum(self.dropped.values()) + self.dead + sum(self.in_flight.values())


@dataclass(frozen=True, slots=True)
class Proof:
    """What an audit found."""

    run_id: str
    step: int | None  # of the newest checkpoint; None: nothing is committed yet
    version: int | None
    chapters: int
    splits: tuple[SplitLine, ...]
    moving: dict[str, int]  # what the record does not know yet, or not any more, by kind
    breaches: tuple[Breach, ...]
    notes: tuple[str, ...]

    @property
    def closes(self) -> bool:
        """Whether nothing breaks the account."""
        return not self.breaches and all(line.closes for line in self.splits)

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "closes": self.closes}


def prove(audit_inputs: AuditInputs) -> Proof:
    """Return the account of a run and every group that breaks it."""
    fold = RecordFold(audit_inputs.chapters)
    breaches = [*audit_inputs.faults, *fold.breaches]
    places: dict[Split, dict[str, str]] = {split: _places(fold, audit_inputs, split) for split in SPLITS}
    for found in places.values():
        breaches += [
            Breach("issued and nowhere", group_id, "in flight, but in no queue and not among the dead letters")
            for group_id, place in found.items()
            if place == "nowhere"
        ]
    breaches += _too_many_uses(fold, audit_inputs.max_uses)
    breaches += _checkpoint_faults(fold, audit_inputs)
    breaches += _dead_faults(fold, audit_inputs)
    for key, fault in _pack_faults(audit_inputs).items():
        breaches += [Breach(f"pack {fault}", group_id, key) for group_id in fold.groups_of_pack.get(key, ())]
    tokens: Counter[str] = Counter()
    for stage in STAGES[1:]:
        tokens.update(audit_inputs.waiting.get(stage, {}))
    last = fold.last
    return Proof(
        run_id=audit_inputs.run_id,
        step=last.step if last else None,
        version=last.version if last else None,
        chapters=len(audit_inputs.chapters),
        splits=tuple(_line(split, fold, found, tokens) for split, found in places.items()),
        moving=_moving(fold, audit_inputs),
        breaches=tuple(breaches),
        notes=_notes(fold, audit_inputs),
    )


def _pack_faults(audit_inputs: AuditInputs) -> dict[str, str]:
    """Return what is wrong with packs; where they may expire, one that is gone is no fault."""
    return {
        k: fault
        for k, fault in audit_inputs.pack_faults.items()
        if not (audit_inputs.packs_expire and fault == "missing")
    }


def _places(fold: RecordFold, audit_inputs: AuditInputs, split: Split) -> dict[str, str]:
    """Return where each group in flight is; the furthest stage counts, for a message moves before it is removed."""
    unsent = {group_id for pack in (audit_inputs.state.unsent if audit_inputs.state else ()) for group_id in pack}
    found = {}
    for group_id in sorted(fold.books[split].in_flight):
        stages = [stage for stage in STAGES if group_id in audit_inputs.waiting.get(stage, {})]
        if stages:
            found[group_id] = stages[-1]
        elif group_id in audit_inputs.dead:
            found[group_id] = _DEAD
        else:
            found[group_id] = "unsent" if group_id in unsent else "nowhere"
    return found


def _line(split: Split, fold: RecordFold, places: Mapping[str, str], tokens: Mapping[str, int]) -> SplitLine:
    book = fold.books[split]
    dropped = Counter(book.dropped.values())
    dead = dropped.pop(_DEAD, 0)
    return SplitLine(
        split=split,
        issued=len(book.issued),
        used=len(book.used),
        used_tokens=book.used_tokens,
        dropped=dict(dropped),
        dropped_tokens={reason: n for reason, n in book.dropped_tokens.items() if reason != _DEAD},
        dead=dead,
        in_flight=dict(Counter(places.values())),
        in_flight_tokens=sum(tokens.get(group_id, 0) for group_id in places),
    )


def _too_many_uses(fold: RecordFold, allowed: int | None) -> list[Breach]:
    """A group may be trained on again by design: as often as the run's settings said, and no more."""
    if allowed is None:
        return []
    return [
        Breach("trained more often than planned", group_id, f"{count} times, algorithm.max_trained_count = {allowed}")
        for group_id, count in sorted(fold.uses.items())
        if count > allowed
    ]


def _checkpoint_faults(fold: RecordFold, audit_inputs: AuditInputs) -> list[Breach]:
    state, last = audit_inputs.state, fold.last
    if state is None or last is None:
        return []
    what = f"checkpoint of step {state.step}"
    faults = [
        Breach("checkpoint differs", "", f"{what}: {name} is {said}, its record says {recorded}")
        for name, said, recorded in (
            ("step", state.step, last.step),
            ("version", state.version, last.version),
            ("weights_digest", state.weights_digest, last.weights_digest),
            ("chapter", state.chapter, last.number),
        )
        if said != recorded
    ]
    if state.account != last.account:
        faults.append(Breach("checkpoint differs", "", f"{what}: its account is not the one of its record"))
    outstanding = set(state.dispatch.get("outstanding", ()))
    recorded = fold.books["train"].in_flight
    faults += [
        Breach("checkpoint differs", group_id, f"{what}: outstanding there or in the record, not in both")
        for group_id in sorted(outstanding ^ recorded)
    ]
    return faults + _ledger_faults(fold, state, audit_inputs.window)


def _ledger_faults(fold: RecordFold, state: CheckpointState, window: int | None) -> list[Breach]:
    """Every row of the ledger must be what was trained at its version, and the window must be whole."""
    trained = {step.trained_version: tuple(group.group_id for group in step.groups) for step in fold.steps}
    ledger = {version: tuple(ids) for version, ids in state.ledger}
    needed = set(ledger)
    if fold.steps and window is not None:
        newest = PolicyVersion(fold.steps[-1].trained_version)
        needed |= {v for v in trained if is_fresh(newest, PolicyVersion(v), window)}
    faults = []
    for version in sorted(needed):
        there, recorded = ledger.get(version, ()), trained.get(version, ())
        missing, extra = set(recorded) - set(there), set(there) - set(recorded)
        faults += [
            Breach("not in the ledger", group_id, f"trained at version {version}; a redelivery would be trained again")
            for group_id in sorted(missing)
        ]
        faults += [
            Breach("in the ledger, not in the record", group_id, f"at version {version}") for group_id in sorted(extra)
        ]
    return faults


def _dead_faults(fold: RecordFold, audit_inputs: AuditInputs) -> list[Breach]:
    if not audit_inputs.all_letters:
        return []
    return [
        Breach("dropped as dead, without a dead letter", group_id, split)
        for split, book in fold.books.items()
        for group_id, reason in book.dropped.items()
        if reason == _DEAD and group_id not in audit_inputs.dead
    ]


def _moving(fold: RecordFold, audit_inputs: AuditInputs) -> dict[str, int]:
    """Count what is in the queues beside the groups in flight: younger than the checkpoint, or done with."""
    issued = set().union(*(book.issued for book in fold.books.values()))
    open_ids = set().union(*(book.in_flight for book in fold.books.values()))
    seen = set().union(*(audit_inputs.waiting.get(stage, {}) for stage in STAGES))
    closed_scored = set(audit_inputs.waiting.get("scored", {})) & (issued - open_ids)
    figures = {
        "issued after the checkpoint": len(seen - issued),
        "closed, waiting for their acknowledgement": len(closed_scored),
        "closed, a repetition is still on its way": len((seen & (issued - open_ids)) - closed_scored),
    }
    return {kind: count for kind, count in figures.items() if count}


def _notes(fold: RecordFold, audit_inputs: AuditInputs) -> tuple[str, ...]:
    notes = []
    trained_and_dead = sorted(fold.books["train"].used.keys() & audit_inputs.dead.keys())
    if fold.last is None:
        notes.append("nothing is committed yet: every group is issued after the newest checkpoint")
    if audit_inputs.state is None and fold.last is not None:
        notes.append("the run's folder is not here: the checkpoint's own ledger and account were not looked at")
    if trained_and_dead:
        notes.append(
            f"a repetition of {len(trained_and_dead)} trained groups went to the dead letters "
            f"({', '.join(trained_and_dead[:3])}{'…' if len(trained_and_dead) > 3 else ''}): their effect is there once"
        )
    if num_expired := len(audit_inputs.pack_faults) - len(_pack_faults(audit_inputs)):
        notes.append(f"{num_expired} packs are gone, as retention.trained_packs_h says: their steps cannot be replayed")
    if not audit_inputs.all_letters:
        notes.append("old dead letters are discarded or cut short: dropped as dead is taken from the record alone")
    return tuple(notes)
