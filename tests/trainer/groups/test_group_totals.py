"""Every group is opened and closed once, is in one chapter, and is counted; a resumed session continues the counts."""

from __future__ import annotations

import pytest
from tests.trainer.groups.test_batcher import Box, ready

from penstock.protocol.groups import AbandonedCompletion, BlobRef
from penstock.protocol.record.lineage import SplitTotals
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.groups.group_states import GroupStates
from penstock.trainer.groups.group_totals import Drop, DropReason, Entries, GroupTotals


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
