"""Every violation of a run's accounting is listed, with its group."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.groups import make_generated, make_group, make_scored

from penstock.forensics.audit.audit_checks import (
    AuditInputs,
    AuditResult,
    _chi_square_tail,
    _unfair,
    check_record,
    compare_selection,
)
from penstock.protocol.groups import AbandonedCompletion, BlobRef
from penstock.protocol.record.lineage import (
    AccountState,
    DroppedGroup,
    EvaluatedGroup,
    LineageChapter,
    RecordedGroup,
    RecordedSession,
    RecordedStep,
    SplitTotals,
)

PACK = BlobRef(key="runs/r/groups/p", size_bytes=1, sha256="0" * 64)
A, B, C, D, E = (f"e0.p{i}.a0" for i in range(5))
HELD_OUT = "eval.v1.p0"


def recorded(group_id: str, use: int = 1) -> RecordedGroup:
    group = make_group(group_id, size=2)
    return RecordedGroup(prompt=0, pack=0, use=use, scored=make_scored(make_generated("r", [group])).groups[0])


def step(number: int, *group_ids: str, again: dict[str, int] | None = None) -> RecordedStep:
    return RecordedStep(
        epoch=1,
        step=number,
        trained_version=number - 1,
        made_version=number,
        weights_digest="a" * 64,
        packs=(PACK,),
        groups=(
            *(recorded(group_id) for group_id in group_ids),
            *(recorded(group_id, use) for group_id, use in (again or {}).items()),
        ),
    )


TOKENS = recorded(A).num_tokens


def chapters() -> list[LineageChapter]:
    """Two steps of two groups; one group dropped as a dead letter, one in flight; one evaluated."""
    session = RecordedSession(
        epoch=1, holder="t", at=1.0, step=0, version=0, parent_version=None, weights_digest="a" * 64, config=PACK
    )
    first = SplitTotals(issued=3, used=1, used_tokens=TOKENS, in_flight=2)
    second = SplitTotals(
        issued=4, used=2, used_tokens=2 * TOKENS, dropped={"dead": 1}, dropped_tokens={"dead": 0}, in_flight=1
    )
    held_out = SplitTotals(issued=1, used=1, used_tokens=3)
    base = {"run_id": "r", "epoch": 1, "weights_digest": "a" * 64}
    return [
        LineageChapter(
            **base,
            number=1,
            parent=None,
            step=1,
            version=1,
            lives=(session,),
            steps=(step(1, A),),
            issued={"train": (A, B, C)},
            account=AccountState(totals={"train": first}, in_flight={"train": (B, C)}),
        ),
        LineageChapter(
            **base,
            number=2,
            parent=PACK,
            step=2,
            version=2,
            steps=(step(2, B),),
            issued={"train": (D,), "eval": (HELD_OUT,)},
            dropped=(DroppedGroup(group_id=C, split="train", reason="dead", num_tokens=0),),
            evaluated=(EvaluatedGroup(group_id=HELD_OUT, num_tokens=3),),
            account=AccountState(totals={"train": second, "eval": held_out}, in_flight={"train": (D,)}),
        ),
    ]


def audit_inputs() -> AuditInputs:
    return AuditInputs("r", chapters(), waiting={"tasks": {D: 0, E: 0}, "scored": {B: 5}}, dead={C: "RewardFailed"})


def breaches(result: AuditResult) -> set[tuple[str, str]]:
    assert not result.closes
    return {(breach.kind, breach.group_id) for breach in result.breaches}


def test_a_complete_accounting_balances():
    """In groups and tokens, by split; queued groups that are not in flight by the record are in motion."""
    result = check_record(audit_inputs())
    assert result.closes, result.breaches
    train, held_out = result.splits
    assert (train.issued, train.used, train.dead, train.in_flight) == (4, 2, 1, {"tasks": 1})
    assert train.used_tokens == 2 * TOKENS
    assert (held_out.issued, held_out.used, held_out.used_tokens) == (1, 1, 3)
    assert result.moving == {"issued after the checkpoint": 1, "closed, waiting for their acknowledgement": 1}


def test_abandoned_completions_are_part_of_the_balance():
    """The sums over the groups are those that the trainer counted; one that is missing in its totals is a violation."""
    lost = AbandonedCompletion(reason="aborted", num_tokens=4)
    first = chapters()[0]
    group = first.steps[0].groups[0]
    generated = group.scored.generated.model_copy(update={"abandoned": (lost, lost)})
    group = group.model_copy(update={"scored": group.scored.model_copy(update={"generated": generated})})
    first = first.model_copy(update={"steps": (first.steps[0].model_copy(update={"groups": (group,)}),)})
    counted = {"abandoned": {"aborted": 2}, "abandoned_tokens": {"aborted": 8}}
    whole = [first.model_copy(update={"account": with_train_totals(first, counted)})]
    result = check_record(AuditInputs("r", whole, waiting={"tasks": {B: 0, C: 0}}))
    assert result.closes, result.breaches
    assert (result.splits[0].abandoned, result.splits[0].abandoned_tokens) == ({"aborted": 2}, {"aborted": 8})
    counted["abandoned_tokens"] = {"aborted": 7}
    short = [first.model_copy(update={"account": with_train_totals(first, counted)})]
    found = check_record(AuditInputs("r", short, waiting={"tasks": {B: 0, C: 0}}))
    assert [(breach.kind, "abandoned tokens" in breach.detail) for breach in found.breaches] == [
        ("totals differ", True)
    ]


def with_train_totals(chapter: LineageChapter, update: dict[str, dict[str, int]]) -> AccountState:
    totals = {**chapter.account.totals, "train": chapter.account.totals["train"].model_copy(update=update)}
    return chapter.account.model_copy(update={"totals": totals})


def test_a_run_without_checkpoint_has_no_violation():
    result = check_record(AuditInputs("r", waiting={"tasks": {A: 0}}))
    assert result.closes
    assert result.moving == {"issued after the checkpoint": 1}
    assert "no checkpoint is committed yet" in result.notes[0]


def test_a_dead_group_that_was_sent_again_may_be_trained():
    """A chapter that reopens it undoes the drop; without that it is trained and also a dead letter."""
    totals = SplitTotals(issued=4, used=3, used_tokens=3 * TOKENS, in_flight=1)
    third = LineageChapter(
        run_id="r", epoch=1, weights_digest="a" * 64, number=3, parent=PACK, step=3, version=3, steps=(step(3, C),),
        revived=(C,),
        account=AccountState(totals={"train": totals, "eval": SplitTotals(issued=1, used=1, used_tokens=3)},
                             in_flight={"train": (D,)}),
    )  # fmt: skip
    seen = replace(audit_inputs(), chapters=[*chapters(), third])
    assert check_record(seen).closes, check_record(seen).breaches
    untold = replace(seen, chapters=[*chapters(), third.model_copy(update={"revived": ()})])
    assert ("trained and also a dead letter", C) in breaches(check_record(untold))
    reopened_twice = replace(seen, chapters=[*chapters(), third.model_copy(update={"revived": (B, C)})])
    assert ("revived but not dead", B) in breaches(check_record(reopened_twice))


def test_an_expired_pack_is_no_violation():
    """A run set to remove trained packs cannot be replayed but balances; an altered pack is a violation."""
    missing = replace(audit_inputs(), pack_faults={PACK.key: "missing"})
    assert ("pack missing", A) in breaches(check_record(missing))
    result = check_record(replace(missing, packs_expire=True))
    assert result.closes
    assert any("1 packs were removed by retention.trained_packs_h" in note for note in result.notes)
    assert not check_record(replace(audit_inputs(), pack_faults={PACK.key: "altered"}, packs_expire=True)).closes


def changed(**second: object) -> AuditInputs:
    first, last = chapters()
    return replace(audit_inputs(), chapters=[first, last.model_copy(update=second)])


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (changed(steps=(step(2, A),)), ("trained twice", A)),
        (changed(steps=(step(2, B, C),)), ("trained and also a dead letter", C)),
        (
            changed(dropped=(DroppedGroup(group_id=A, split="train", reason="stale", num_tokens=9),)),
            ("trained and also dropped", A),
        ),
        (changed(steps=(step(2, E),)), ("trained but never issued", E)),
        (changed(issued={"train": (A, D)}), ("issued twice", A)),
        (changed(issued={"train": (D, E), "eval": (HELD_OUT,)}), ("issued and nowhere", E)),
        (changed(issued={"train": (D,)}), ("evaluated but never issued", HELD_OUT)),
        (changed(steps=()), ("issued and nowhere", B)),
        (changed(steps=(step(3, B),)), ("record broken", "")),
        (changed(number=3), ("record broken", "")),
        (changed(account=chapters()[0].account), ("totals differ", "")),
        (changed(account=chapters()[0].account), ("in flight but closed", C)),
        (replace(audit_inputs(), waiting={}), ("issued and nowhere", D)),
        (replace(audit_inputs(), dead={}), ("dropped as dead, without a dead letter", C)),
        (replace(audit_inputs(), pack_faults={PACK.key: "missing"}), ("pack missing", B)),
        (replace(audit_inputs(), chapters=chapters()[1:]), ("trained but never issued", B)),
    ],
)
def test_every_violation_is_listed(broken: AuditInputs, expected: tuple[str, str]):
    assert expected in breaches(check_record(broken))


def test_a_planned_second_use_balances():
    """A group that a later step marks as a second use counts once, however many uses were planned."""
    again = changed(steps=(step(2, B, again={A: 2}),))
    for planned in (2, 3, None):
        result = check_record(replace(again, max_uses=planned))
        assert result.closes, result.breaches
        assert result.splits[0].used == 2


@pytest.mark.parametrize(
    ("again", "planned", "expected"),
    [
        ({A: 2}, 1, ("trained more often than planned", A)),
        ({A: 3}, 3, ("reuse unclear", A)),
        ({A: 1}, 3, ("trained twice", A)),
        ({D: 2}, 3, ("reuse unclear", D)),
        ({E: 1}, 3, ("trained but never issued", E)),
    ],
)
def test_an_unplanned_second_use_is_listed(again: dict[str, int], planned: int, expected: tuple[str, str]):
    """More uses than the settings allow, a use that is missing, a first use that is a second, a use of nothing trained."""
    assert expected in breaches(check_record(replace(changed(steps=(step(2, B, again=again),)), max_uses=planned)))


def test_a_dead_lettered_duplicate_is_a_note():
    result = check_record(replace(audit_inputs(), dead={C: "x", A: "RewardFailed"}))
    assert result.closes
    assert A in result.notes[-1]


@pytest.mark.parametrize(
    ("left_out", "is_fair"),
    [(list(range(0, 200, 4)), True), (list(range(100, 200, 2)), False), ([], True)],
    ids=["dropped at random", "the long ones dropped", "none dropped"],
)
def test_dropping_by_length_is_seen_and_dropping_at_random_is_not(left_out: list[int], is_fair: bool):
    trained = sorted(set(range(200)) - set(left_out))
    found = compare_selection("tokens", trained, left_out)
    assert (found.p > 0.05) == is_fair
    assert (found.freedom, found.trained, found.left_out) == (4 if left_out else 0, len(trained), len(left_out))


def test_a_bias_by_length_is_noted_and_twenty_fair_draws_are_not():
    """Of 400 answers with the lengths of a run, a third is left out: at random, or with a chance that grows with the length."""
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [min(round(draw.lognormvariate(4.0, 0.6)), 256) for _ in range(400)]
        for chance, is_fair in ((lambda length: 0.33, True), (lambda length: min(length / 200.0, 1.0), False)):
            kept: dict[bool, list[float]] = {True: [], False: []}
            for length in lengths:
                kept[draw.random() >= chance(length)].append(length)
            assert bool(_unfair([compare_selection("tokens", kept[True], kept[False])])) != is_fair, seed


@pytest.mark.parametrize(("value", "freedom"), [(3.8414588, 1), (5.9914645, 2), (7.8147279, 3), (9.4877290, 4)])
def test_the_tail_of_a_chi_square_is_that_of_the_tables(value: float, freedom: int):
    """These are the critical values at 0.05, for even and odd degrees of freedom."""
    assert _chi_square_tail(value, freedom) == pytest.approx(0.05, rel=1e-6)
