"""Compare a run's record with its checkpoint, streams, dead letters and objects; pure.

| compared                     | must agree with the record in                                                    |
|------------------------------|-----------------------------------------------------------------------------------|
| the checkpoint's state.json  | the end of the record, the ledger, the totals, the outstanding groups             |
| the three work queues        | every group in flight is in one of them (or dead, or not sent yet)                |
| the dead letters             | every group dropped as dead has one                                               |
| the object store             | every pack of a trained group is there, with its size and sha256; packs of        |
|                              | evaluated and dropped groups, unless retention has deleted them                   |
| the trainer's step events    | rewards, packs and order of the groups of every step (`record_checks.py`)         |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from penstock.forensics.audit.record_checks import SPLITS, Breach, RecordFold, ReportedSteps, check_steps
from penstock.protocol.groups import Split
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import LineageChapter
from penstock.protocol.versions import PolicyVersion, is_fresh

STAGES = ("tasks", "generated", "scored")
LETTERS = "dead letters"  # a kind of unreadable messages
_DEAD = "dead"
_MOST_NOTED = 3
_NUM_BINS, _LEAST_EXPECTED, _UNFAIR = 5, 5.0, 1e-3  # of a chi-square: bins, expected count of each, and p of a note


@dataclass(frozen=True, slots=True)
class AuditInputs:
    run_id: str
    chapters: Sequence[LineageChapter] = ()  # the oldest first
    state: CheckpointState | None = None  # None: its folder is not on this machine
    waiting: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # stage -> group id -> sampled tokens
    dead: Mapping[str, str] = field(default_factory=dict)  # group id -> reason
    all_letters: bool = True  # whether no letter was discarded or has a truncated list of groups
    pack_faults: Mapping[str, str] = field(default_factory=dict)  # key -> what is wrong with the object
    max_uses: int | None = None  # largest max_trained_count of the run's sessions; None: unknown
    packs_expire: bool = False  # whether a session of the run was set to remove packs of trained groups
    window: int | None = None  # smallest max_staleness of the run's sessions; None: unknown
    faults: Sequence[Breach] = ()  # found while reading
    unreadable: Mapping[str, Sequence[str]] = field(default_factory=dict)  # messages by kind: which, and why
    reports: Sequence[ReportedSteps] = ()  # of the steps, by the trainer that made them


@dataclass(frozen=True, slots=True)
class SplitLine:
    """The accounting of one split, in groups and, where known, in sampled tokens; its fields are keys of `--json`."""

    split: Split
    issued: int
    used: int
    used_tokens: int
    dropped: dict[str, int]  # by reason, dead letters excepted
    dropped_tokens: dict[str, int]
    dead: int
    in_flight: dict[str, int]  # by where they are: a stage, dead, unsent, nowhere
    in_flight_tokens: int
    abandoned: dict[str, int]  # completions of used and dropped groups that were started and not kept, by reason
    abandoned_tokens: dict[str, int]

    @property
    def closes(self) -> bool:
        """True if issued = used + dropped + dead + in flight."""
        return self.issued == self.used + sum(self.dropped.values()) + self.dead + sum(self.in_flight.values())


@dataclass(frozen=True, slots=True)
class Selection:
    """Whether the trained groups are a fair sample of the sampled ones, by one property; its fields are keys of `--json`."""

    by: str
    trained: int  # groups
    left_out: int  # sampled, then dropped
    chi_square: float
    freedom: int
    p: float  # of a chi-square as large as this where what is trained does not depend on the property; 1: nothing to compare


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The result of an audit; its fields are keys of `--json`."""

    run_id: str
    step: int | None  # of the newest checkpoint; None: none is committed yet
    version: int | None
    chapters: int
    splits: tuple[SplitLine, ...]
    moving: dict[str, int]  # groups in queues that are not in flight by the record, by kind
    breaches: tuple[Breach, ...]
    notes: tuple[str, ...]
    selections: tuple[Selection, ...] = ()

    @property
    def closes(self) -> bool:
        return not self.breaches and all(line.closes for line in self.splits)

    def to_document(self) -> dict[str, Any]:
        return {**asdict(self), "closes": self.closes}


def check_record(audit_inputs: AuditInputs) -> AuditResult:
    fold = RecordFold(audit_inputs.chapters)
    breaches = [*audit_inputs.faults, *fold.breaches]
    locations: dict[Split, dict[str, str]] = {split: _locations(fold, audit_inputs, split) for split in SPLITS}
    for group_locations in locations.values():
        breaches += [
            Breach("issued and nowhere", group_id, "in flight, but in no queue and not among the dead letters")
            for group_id, location in group_locations.items()
            if location == "nowhere"
        ]
    breaches += _too_many_uses(fold, audit_inputs.max_uses)
    breaches += _checkpoint_faults(fold, audit_inputs)
    breaches += _dead_faults(fold, audit_inputs)
    step_breaches, step_notes = check_steps(fold.steps, audit_inputs.reports)
    breaches += step_breaches
    for key, fault in _pack_faults(fold, audit_inputs).items():
        breaches += [Breach(f"pack {fault}", group_id, key) for group_id in fold.groups_of_pack.get(key, ())]
    tokens: Counter[str] = Counter()
    for stage in STAGES[1:]:
        tokens.update(audit_inputs.waiting.get(stage, {}))
    last, selections = fold.last, _selections(fold)
    return AuditResult(
        run_id=audit_inputs.run_id,
        step=last.step if last else None,
        version=last.version if last else None,
        chapters=len(audit_inputs.chapters),
        splits=tuple(_line(split, fold, group_locations, tokens) for split, group_locations in locations.items()),
        moving=_moving(fold, audit_inputs),
        breaches=tuple(breaches),
        notes=(*step_notes, *_unfair(selections), *_notes(fold, audit_inputs)),
        selections=selections,
    )


def _selections(fold: RecordFold) -> tuple[Selection, ...]:
    """Compare what was trained with what was sampled: by the tokens of a group, and by the mean reward of its prompt."""
    account = fold.accounts["train"]
    rewards: dict[str, list[float]] = {}
    for step in fold.steps:
        for group in step.groups:
            rewards.setdefault(_prompt(group.group_id), []).append(fmean(group.scored.rewards))
    known = {group_id: rewards.get(_prompt(group_id)) for group_id in account.sizes}
    difficulties = {group_id: fmean(found) for group_id, found in known.items() if found}
    return tuple(
        compare_selection(by, [v for i, v in of.items() if i in account.used], [v for i, v in of.items() if i not in account.used])
        for by, of in (("tokens of a group", account.sizes), ("mean reward of its prompt", difficulties))
    )  # fmt: skip


def _prompt(group_id: str) -> str:
    return group_id.rpartition(".a")[0].partition(".")[2]


def compare_selection(by: str, trained: Sequence[float], left_out: Sequence[float]) -> Selection:
    """Return Pearson's chi-square of homogeneity of two samples, in bins with a fifth of both together, fewer where counts are small."""
    whole = sorted([*trained, *left_out])
    num_bins = min(_NUM_BINS, int(min(len(trained), len(left_out)) / _LEAST_EXPECTED))
    edges = sorted({whole[len(whole) * cut // num_bins] for cut in range(1, num_bins)} - set(whole[:1]))
    freedom, chi_square = len(edges), 0.0
    for sample in (trained, left_out) if freedom else ():
        counts = Counter(sum(value >= edge for edge in edges) for value in sample)
        both = Counter(sum(value >= edge for edge in edges) for value in whole)
        for place, count in both.items():
            expected = count * len(sample) / len(whole)
            chi_square += (counts[place] - expected) ** 2 / expected
    p = _chi_square_tail(chi_square, freedom) if freedom else 1.0
    return Selection(by, len(trained), len(left_out), chi_square, freedom, p)


def _chi_square_tail(value: float, freedom: int) -> float:
    """Return Q(freedom / 2, value / 2), the regularised upper incomplete gamma function (NIST DLMF 8.8.2, 8.4.6, 8.4.8)."""
    x, a = value / 2.0, 0.5 if freedom % 2 else 1.0
    tail = math.erfc(math.sqrt(x)) if freedom % 2 else math.exp(-x)
    while a < freedom / 2.0:
        tail += x**a * math.exp(-x) / math.gamma(a + 1.0)
        a += 1.0
    return min(tail, 1.0)


def _unfair(selections: Sequence[Selection]) -> list[str]:
    return [
        f"what is trained depends on the {one.by}: chi-square {one.chi_square:.1f} with {one.freedom} degrees of freedom, p {one.p:.1g}; "
        "groups were dropped by a filter or a deadline that leaves out such groups more often"
        for one in selections
        if one.p < _UNFAIR
    ]


def _pack_faults(fold: RecordFold, audit_inputs: AuditInputs) -> dict[str, str]:
    """Return the faults of packs by key; a missing pack is no fault where packs may expire.

    Those that no step names always may: `retention.unused_packs_h` has no value that keeps them.
    """
    return {
        key: fault
        for key, fault in audit_inputs.pack_faults.items()
        if fault != "missing" or (key in fold.used_packs and not audit_inputs.packs_expire)
    }


def _locations(fold: RecordFold, audit_inputs: AuditInputs, split: Split) -> dict[str, str]:
    """Return where each group in flight is; of several stages the last, as a message is published before the ack."""
    unsent = {group_id for pack in (audit_inputs.state.unsent if audit_inputs.state else ()) for group_id in pack}
    locations = {}
    for group_id in sorted(fold.accounts[split].in_flight):
        stages = [stage for stage in STAGES if group_id in audit_inputs.waiting.get(stage, {})]
        if stages:
            locations[group_id] = stages[-1]
        elif group_id in audit_inputs.dead:
            locations[group_id] = _DEAD
        else:
            locations[group_id] = "unsent" if group_id in unsent else "nowhere"
    return locations


def _line(split: Split, fold: RecordFold, locations: Mapping[str, str], tokens: Mapping[str, int]) -> SplitLine:
    account = fold.accounts[split]
    dropped = Counter(account.dropped.values())
    dead = dropped.pop(_DEAD, 0)
    return SplitLine(
        split=split,
        issued=len(account.issued),
        used=len(account.used),
        used_tokens=account.used_tokens,
        dropped=dict(dropped),
        dropped_tokens={reason: n for reason, n in account.dropped_tokens.items() if reason != _DEAD},
        dead=dead,
        in_flight=dict(Counter(locations.values())),
        in_flight_tokens=sum(tokens.get(group_id, 0) for group_id in locations),
        abandoned=dict(account.abandoned),
        abandoned_tokens=dict(account.abandoned_tokens),
    )


def _too_many_uses(fold: RecordFold, allowed: int | None) -> list[Breach]:
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
        Breach("checkpoint differs", "", f"{what}: {name} is {stated}, its record has {recorded}")
        for name, stated, recorded in (
            ("step", state.step, last.step),
            ("version", state.version, last.version),
            ("weights_digest", state.weights_digest, last.weights_digest),
            ("chapter", state.chapter, last.number),
        )
        if stated != recorded
    ]
    if state.account != last.account:
        faults.append(Breach("checkpoint differs", "", f"{what}: its totals are not those of its record"))
    listed = state.dispatch.get("outstanding", ())
    if not isinstance(listed, Iterable) or not all(isinstance(group_id, str) for group_id in listed):
        return [*faults, Breach("checkpoint differs", "", f"{what}: dispatch.outstanding is no list of group ids")]
    outstanding = set(listed)
    recorded = fold.accounts["train"].in_flight
    faults += [
        Breach("checkpoint differs", group_id, f"{what}: outstanding there or in the record, not in both")
        for group_id in sorted(outstanding ^ recorded)
    ]
    return faults + _ledger_faults(fold, state, audit_inputs.window)


def _ledger_faults(fold: RecordFold, state: CheckpointState, window: int | None) -> list[Breach]:
    """Return differences between the ledger and the record: each row within the staleness window must be complete."""
    trained = {step.trained_version: tuple(group.group_id for group in step.groups) for step in fold.steps}
    ledger = {version: tuple(ids) for version, ids in state.ledger}
    needed = set(ledger)
    if fold.steps and window is not None:
        newest = PolicyVersion(fold.steps[-1].trained_version)
        needed |= {v for v in trained if is_fresh(newest, PolicyVersion(v), window)}
    faults = []
    for version in sorted(needed):
        listed, recorded = ledger.get(version, ()), trained.get(version, ())
        missing, extra = set(recorded) - set(listed), set(listed) - set(recorded)
        faults += [
            Breach("not in the ledger", group_id, f"trained at version {version}; a redelivery would be trained again")
            for group_id in sorted(missing)
        ]
        faults += [
            Breach("in the ledger, not in the record", group_id, f"at version {version}") for group_id in sorted(extra)
        ]
    return faults


def _dead_faults(fold: RecordFold, audit_inputs: AuditInputs) -> list[Breach]:
    if not audit_inputs.all_letters or audit_inputs.unreadable.get(LETTERS):
        return []
    return [
        Breach("dropped as dead, without a dead letter", group_id, split)
        for split, account in fold.accounts.items()
        for group_id, reason in account.dropped.items()
        if reason == _DEAD and group_id not in audit_inputs.dead
    ]


def _moving(fold: RecordFold, audit_inputs: AuditInputs) -> dict[str, int]:
    """Count queued groups that are not in flight by the record: issued after the checkpoint, or already closed."""
    issued = set().union(*(account.issued for account in fold.accounts.values()))
    open_ids = set().union(*(account.in_flight for account in fold.accounts.values()))
    seen = set().union(*(audit_inputs.waiting.get(stage, {}) for stage in STAGES))
    closed_scored = set(audit_inputs.waiting.get("scored", {})) & (issued - open_ids)
    counts = {
        "issued after the checkpoint": len(seen - issued),
        "closed, waiting for their acknowledgement": len(closed_scored),
        "closed, with a duplicate still queued": len((seen & (issued - open_ids)) - closed_scored),
    }
    return {kind: count for kind, count in counts.items() if count}


def _notes(fold: RecordFold, audit_inputs: AuditInputs) -> tuple[str, ...]:
    notes = []
    trained_and_dead = sorted(fold.accounts["train"].used.keys() & audit_inputs.dead.keys())
    if fold.last is None:
        notes.append("no checkpoint is committed yet: every group counts as issued after it")
    if fold.without_pack:
        notes.append(
            f"the packs of {fold.without_pack} evaluated or dropped groups are not recorded (by an older build); not verified"
        )
    if audit_inputs.state is None and fold.last is not None:
        notes.append(
            "the run's folder is not on this machine: the ledger and totals of the checkpoint were not checked"
        )
    if trained_and_dead:
        notes.append(
            f"duplicates of {len(trained_and_dead)} trained groups were dead-lettered "
            f"({', '.join(trained_and_dead[:3])}{'…' if len(trained_and_dead) > 3 else ''}); each was trained once"
        )
    expired = audit_inputs.pack_faults.keys() - _pack_faults(fold, audit_inputs).keys()
    if num_expired := len(expired & fold.used_packs):
        notes.append(f"{num_expired} packs were removed by retention.trained_packs_h: their steps cannot be replayed")
    if num_expired := len(expired - fold.used_packs):
        notes.append(
            f"{num_expired} packs of evaluated or dropped groups are not stored any more (retention.unused_packs_h); not verified"
        )
    for kind, entries in audit_inputs.unreadable.items():
        shown = "; ".join(entries[:_MOST_NOTED]) + ("; …" if len(entries) > _MOST_NOTED else "")
        notes.append(f"{len(entries)} {kind} cannot be read and are left out: {shown}")
    if audit_inputs.unreadable.get(LETTERS):
        notes.append("groups dropped as dead were not checked: a letter that cannot be read may be theirs")
    if not audit_inputs.all_letters:
        notes.append(
            "old dead letters were discarded or truncated: groups dropped as dead were not checked against them"
        )
    return tuple(notes)
