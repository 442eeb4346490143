"""Every group is opened and closed once, in one chapter, and counted; resumed sessions, of older releases too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.trainer.groups.test_batcher import Box, ready

from penstock.protocol.groups import AbandonedCompletion, BlobRef
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import SplitTotals
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.errors import CheckpointError
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.groups.group_states import GroupStates, State
from penstock.trainer.groups.group_totals import Drop, DropReason, Entries, GroupTotals
from penstock.trainer.groups.prompt_cursor import GroupKey, PromptCursor


def resumed(entries: Entries) -> RunGroups:
    """The groups of a session that starts from a checkpoint of these entries."""
    splits = (
        GroupStates(totals=GroupTotals(entries.account.totals[split]), outstanding=entries.account.in_flight[split])
        for split in ("train", "eval")
    )
    return RunGroups(*splits)


def evaluate(groups: RunGroups, tokens: dict[str, int], packs: dict[str, BlobRef] | None = None) -> None:
    groups.held_out.evaluate(tokens, packs or {})


def test_entries_hold_what_happened_since_the_previous_ones():
    """Totals accumulate, each event is in one entry; a resumed session continues both."""
    box = Box(groups_per_step=1)
    groups = RunGroups(box.groups, GroupStates())
    group = ready(1, 0)
    box.offer(group)
    groups.train.issue(["e0.p2.a0", "e0.p3.a0"])
    groups.held_out.issue(["x"])
    box.train(0)
    first = groups.take_entries()
    assert first.issued == {"train": ("e0.p1.a0", "e0.p2.a0", "e0.p3.a0"), "eval": ("x",)}
    used = {"issued": 3, "used": 1, "used_tokens": group.num_tokens}
    assert first.account.totals["train"] == SplitTotals(**used, in_flight=2)
    after = resumed(first)
    after.train.drop(Drop("e0.p2.a0", DropReason.STALE, 7))
    after.train.totals.refuse(Drop("e0.p1.a0", DropReason.DUPLICATE, 5))
    evaluate(after, {"x": 2})
    second = after.take_entries()
    assert second.issued == {}
    assert [(drop.group_id, drop.reason, drop.num_tokens) for drop in second.dropped] == [("e0.p2.a0", "stale", 7)]
    assert [(group.group_id, group.num_tokens) for group in second.evaluated] == [("x", 2)]
    assert second.account.totals["train"] == SplitTotals(
        **used, in_flight=1, dropped={"stale": 1}, dropped_tokens={"stale": 7},
        refused={"duplicate": 1}, refused_tokens={"duplicate": 5},
    )  # fmt: skip
    assert second.account.in_flight == {"train": ("e0.p3.a0",), "eval": ()}
    assert after.take_entries().is_empty


def test_abandoned_completions_are_counted_by_reason():
    """Those of trained and of dropped groups, each once, in completions and in tokens; a resumed session goes on."""
    aborted, surplus = (AbandonedCompletion(reason=why, num_tokens=n) for why, n in (("aborted", 3), ("surplus", 9)))
    totals = GroupTotals()
    trained = ready(1, 0)
    summary = trained.scored.generated.model_copy(update={"abandoned": (aborted, surplus, aborted)})
    scored = trained.scored.model_copy(update={"generated": summary})
    totals.train([type(trained)(scored, trained.pack, trained.group)], {}, num_reused=0)
    after = GroupTotals(totals.sums)
    drop = Drop("b", DropReason.STALE, 7, abandoned=(aborted,))
    after.drop(drop)
    after.refuse(Drop("a", DropReason.DUPLICATE, 5, abandoned=(surplus,)))
    assert after.take_new().dropped == [drop]
    assert after.counts_document()["abandoned_completions"] == {"aborted": 3, "surplus": 1}
    assert after.counts_document()["abandoned_tokens"] == {"aborted": 9, "surplus": 9}


def test_entries_hold_the_packs_of_dropped_and_evaluated_groups():
    """Each pack is listed once, and the groups hold its number; one that was not verified has none."""
    one, two = (BlobRef(key=key, size_bytes=1, sha256="0" * 64) for key in ("one", "two"))
    groups = RunGroups()
    groups.train.issue(["a", "b", "c"])
    groups.held_out.issue(["x", "y"])
    for group_id, pack in (("a", two), ("b", None), ("c", two)):
        groups.train.drop(Drop(group_id, DropReason.STALE, 1, pack))
    evaluate(groups, {"x": 1, "y": 1}, {"x": one, "y": two})
    entries = groups.take_entries()
    packs = [None if group.pack is None else entries.closed_packs[group.pack] for group in entries.dropped]
    assert packs == [two, None, two]
    assert [entries.closed_packs[group.pack or 0] for group in entries.evaluated] == [one, two]
    assert len(entries.closed_packs) == 2


def test_a_group_that_was_not_issued_cannot_be_evaluated():
    with pytest.raises(ValueError, match="group b is not outstanding, and evaluate is not allowed"):
        GroupStates().evaluate({"b": 1}, {})


def test_counts_of_a_checkpoint_are_unchanged_by_a_resume():
    """The stored document has every count by its stored name, and a resumed session continues from it."""
    totals = GroupTotals()
    totals.issue(["a", "b", "c"])
    trained = ready(1, 0, size=1)
    totals.num_scored = 2
    totals.train([trained], {0: 5, 1: 7}, num_reused=1)
    totals.drop(Drop("b", DropReason.STALE, 3))
    totals.refuse(Drop("b", DropReason.STALE, 3))
    totals.drop(Drop("c", DropReason.DEAD, 0))
    totals.revive("c")
    document = totals.counts_document()
    assert document == {
        "groups_trained": 1, "groups_reused": 1, "tokens_trained": 12, "groups_scored": 2,
        "dropped_groups": {"stale": 2, "dead": 0}, "dropped_tokens": {"stale": 6, "dead": 0},
        "abandoned_completions": {}, "abandoned_tokens": {},
        "staleness_tokens": {"0": 5, "1": 7},
    }  # fmt: skip
    assert GroupTotals(totals.sums, document).counts_document() == document


# As written by the release of f4f3f92c, where ids, ledger, totals and counters were five objects.
EARLIER: dict[str, Any] = {
    "run_id": "run", "epoch": 1, "step": 2, "version": 2, "weights_digest": "0" * 64, "weights_dtype": "float32",
    "ledger": [[0, ["e0.p0.a0", "e0.p1.a0"]], [1, ["e0.p0.a0", "e0.p5.a0"]]],
    "dispatch": {
        "schema_tag": "dispatch_state.v1", "order_id": "fe135cfcc5890ed4", "position": 7,
        "outstanding": ["e0.p6.a0", "e0.p10.a0", "e0.p4.a1"][::-1], "again": ["e0.p3.a1"], "ahead": [[0, 10]],
        "refused": ["e0.p6.a1"], "dead": ["e0.p2.a0"], "num_issued": 9, "num_issued_again": 1, "num_given_up": 0,
    },
    "unsent": [["e0.p4.a1"]], "letters_read": 3,
    "totals": {
        "groups_trained": 3, "groups_reused": 1, "tokens_trained": 36, "groups_scored": 5,
        "dropped_groups": {"dead": 1, "unreadable": 2, "duplicate": 1},
        "dropped_tokens": {"dead": 0, "unreadable": 18, "duplicate": 9},
        "abandoned_completions": {}, "abandoned_tokens": {}, "staleness_tokens": {"0": 27, "1": 9},
    },
    "account": {
        "totals": {
            "train": {
                "issued": 9, "used": 3, "used_tokens": 27, "dropped": {"dead": 1, "unreadable": 2},
                "dropped_tokens": {"dead": 0, "unreadable": 18}, "refused": {"duplicate": 1},
                "refused_tokens": {"duplicate": 9}, "in_flight": 3,
            },
            "eval": {
                "issued": 3, "used": 1, "used_tokens": 4, "dropped": {}, "dropped_tokens": {}, "refused": {},
                "refused_tokens": {}, "in_flight": 2,
            },
        },
        "in_flight": {"train": ["e0.p10.a0", "e0.p4.a1", "e0.p6.a0"], "eval": ["eval.v2.p0", "eval.v2.p1"]},
    },
    "metrics_bytes": 0, "record": {"key": "runs/run/lineage/c", "size_bytes": 1, "sha256": "0" * 64}, "chapter": 2,
}  # fmt: skip


def earlier(**changes: Any) -> CheckpointState:
    return CheckpointState.model_validate_json(json.dumps(EARLIER | changes))


def test_a_checkpoint_of_an_earlier_release_is_written_again_as_it_was() -> None:
    """Ids, attempts, uses, totals and counts are continued, in the form that the release before can read too."""
    state = earlier(dispatch=EARLIER["dispatch"] | {"outstanding": ["e0.p4.a1", "e0.p6.a0", "e0.p10.a0"]})
    groups = RunGroups.of(state, max_staleness=2, max_trained_count=2)
    cursor = PromptCursor(DataOrder(12, seed=1), "fe135cfcc5890ed4", groups.train)
    cursor.resume(state.dispatch)
    assert cursor.to_document() == state.dispatch
    assert groups.train.rows() == state.ledger
    assert groups.train.totals.counts_document() == state.totals
    assert groups.train.letters_read == 3
    entries = groups.take_entries()
    assert entries.account == state.account
    assert entries.is_empty
    assert {i: groups.train.state(i) for i in ("e0.p0.a0", "e0.p1.a0", "e0.p2.a0", "e0.p6.a0", "e0.p3.a0")} == {
        "e0.p0.a0": State.CLOSED, "e0.p1.a0": State.KEPT, "e0.p2.a0": State.CLOSED, "e0.p6.a0": State.ISSUED,
        "e0.p3.a0": None,
    }  # fmt: skip
    assert [group_id for group_id in ("e0.p0.a0", "e0.p1.a0", "e0.p5.a0") if groups.train.is_returning(group_id)] == [
        "e0.p1.a0", "e0.p5.a0",
    ]  # fmt: skip
    assert cursor.queue_again("e0.p6.a0", max_attempts=9)
    assert cursor.again == [GroupKey(0, 3, 1), GroupKey(0, 6, 2)]  # the refused attempt is skipped


def test_a_document_before_dead_letters_were_recorded_is_read() -> None:
    """Releases before them wrote neither ``refused`` nor ``dead``."""
    dispatch = {name: value for name, value in EARLIER["dispatch"].items() if name not in ("refused", "dead")}
    state = earlier(dispatch=dispatch)
    groups = RunGroups.of(state, max_staleness=2)
    cursor = PromptCursor(DataOrder(12, seed=1), "fe135cfcc5890ed4", groups.train)
    cursor.resume(state.dispatch)
    assert (groups.train.dead(), cursor.refused) == ([], set())


@pytest.mark.parametrize(
    "changes", [{"dispatch": EARLIER["dispatch"] | {"outstanding": []}}, {"ledger": [[1, ["e0.p6.a0"]]]}]
)
def test_a_checkpoint_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    """A group that is open by one part and closed by another would be trained twice or never."""
    with pytest.raises(CheckpointError, match="is outstanding by one of its parts and closed by another"):
        RunGroups.of(earlier(**changes), max_staleness=2)
