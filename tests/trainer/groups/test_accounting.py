"""Every group is opened once and closed once, and is in one chapter."""

from __future__ import annotations

import pytest

from penstock.protocol.facts import AbandonedCompletion, BlobRef
from penstock.protocol.record.lineage import SplitTotals
from penstock.trainer.groups.accounting import Accounting
from penstock.trainer.groups.counters import Counters
from penstock.trainer.groups.drops import Drop, DropReason


def test_entries_hold_what_happened_since_the_previous_ones():
    """Totals accumulate, each event is in one entry; a resumed accounting continues both."""
    accounting = Accounting()
    accounting.issue("train", ["a", "b", "c"])
    accounting.issue("eval", ["x"])
    accounting.use("train", {"a": 5})
    first = accounting.take_entries()
    assert first.issued == {"train": ("a", "b", "c"), "eval": ("x",)}
    assert first.account.totals["train"] == SplitTotals(issued=3, used=1, used_tokens=5, in_flight=2)
    resumed = Accounting(first.account)
    resumed.drop("train", Drop("b", DropReason.STALE, 7))
    resumed.refuse("train", Drop("a", DropReason.DUPLICATE, 5))
    resumed.use("eval", {"x": 2})
    second = resumed.take_entries()
    assert second.issued == {}
    assert [(drop.group_id, drop.reason, drop.num_tokens) for drop in second.dropped] == [("b", "stale", 7)]
    assert [(group.group_id, group.num_tokens) for group in second.evaluated] == [("x", 2)]
    assert second.account.totals["train"] == SplitTotals(
        issued=3, used=1, used_tokens=5, in_flight=1, dropped={"stale": 1}, dropped_tokens={"stale": 7},
        refused={"duplicate": 1}, refused_tokens={"duplicate": 5},
    )  # fmt: skip
    assert second.account.in_flight == {"train": ("c",), "eval": ()}
    assert resumed.take_entries().is_empty


def test_abandoned_completions_are_counted_by_reason():
    """Those of trained and of dropped groups, each once, in completions and in tokens; a resumed accounting goes on."""
    aborted, surplus = (AbandonedCompletion(reason=why, num_tokens=n) for why, n in (("aborted", 3), ("surplus", 9)))
    accounting = Accounting()
    accounting.issue("train", ["a", "b"])
    accounting.use("train", {"a": 5}, abandoned=[aborted, surplus, aborted])
    resumed = Accounting(accounting.take_entries().account)
    resumed.drop("train", Drop("b", DropReason.STALE, 7, abandoned=(aborted,)))
    resumed.refuse("train", Drop("a", DropReason.DUPLICATE, 5, abandoned=(surplus,)))
    entries = resumed.take_entries()
    assert [drop.abandoned for drop in entries.dropped] == [(aborted,)]
    totals = entries.account.totals["train"]
    assert (totals.abandoned, totals.abandoned_tokens) == ({"aborted": 3, "surplus": 1}, {"aborted": 9, "surplus": 9})
    assert Counters(resumed).to_document()["abandoned_tokens"] == {"aborted": 9, "surplus": 9}


def test_entries_hold_the_packs_of_dropped_and_evaluated_groups():
    """Each pack is listed once, and the groups hold its number; one that was not verified has none."""
    one, two = (BlobRef(key=key, size_bytes=1, sha256="0" * 64) for key in ("one", "two"))
    accounting = Accounting()
    accounting.issue("train", ["a", "b", "c"])
    accounting.issue("eval", ["x", "y"])
    for group_id, pack in (("a", two), ("b", None), ("c", two)):
        accounting.drop("train", Drop(group_id, DropReason.STALE, 1, pack))
    accounting.use("eval", {"x": 1, "y": 1}, {"x": one, "y": two})
    entries = accounting.take_entries()
    packs = [None if group.pack is None else entries.closed_packs[group.pack] for group in entries.dropped]
    assert packs == [two, None, two]
    assert [entries.closed_packs[group.pack or 0] for group in entries.evaluated] == [one, two]
    assert len(entries.closed_packs) == 2


def test_an_inconsistent_change_is_an_error_at_once():
    """Issuing twice, closing twice, and closing a group that was never issued raise ValueError."""
    accounting = Accounting()
    accounting.issue("train", ["a"])
    with pytest.raises(ValueError, match="group a is issued already"):
        accounting.issue("train", ["a"])
    accounting.use("train", {"a": 1})
    with pytest.raises(ValueError, match="group a is not in flight"):
        accounting.drop("train", Drop("a", DropReason.LOST, 0))
    with pytest.raises(ValueError, match="group b is not in flight"):
        accounting.use("eval", {"b": 1})
