"""The displayed counts are the accounting's sums, with uses and ages added."""

from __future__ import annotations

from penstock.trainer.groups.accounting import Accounting
from penstock.trainer.groups.counters import Counters
from penstock.trainer.groups.drops import Drop, DropReason


def test_counts_of_a_checkpoint_are_unchanged_by_a_resume():
    """The stored document has every count by its stored name, and a resumed session continues from it."""
    accounting = Accounting()
    counters = Counters(accounting)
    accounting.issue("train", ["a", "b", "c"])
    accounting.use("train", {"a": 5})
    counters.groups_scored = 2
    counters.count_batch({0: 5, 1: 7}, num_reused=1)
    accounting.drop("train", Drop("b", DropReason.STALE, 3))
    accounting.refuse("train", Drop("b", DropReason.STALE, 3))
    accounting.drop("train", Drop("c", DropReason.DEAD, 0))
    accounting.reopen("c")
    document = counters.to_document()
    assert document == {
        "groups_trained": 1, "groups_reused": 1, "tokens_trained": 12, "groups_scored": 2,
        "dropped_groups": {"stale": 2, "dead": 0}, "dropped_tokens": {"stale": 6, "dead": 0},
        "abandoned_completions": {}, "abandoned_tokens": {},
        "staleness_tokens": {"0": 5, "1": 7},
    }  # fmt: skip
    resumed = Accounting(accounting.take_entries().account)
    assert Counters(resumed, document).to_document() == document


def test_held_out_groups_are_not_counted():
    """Only groups of the train split are in the counts."""
    accounting = Accounting()
    accounting.issue("eval", ["x", "y"])
    accounting.use("eval", {"x": 5})
    accounting.drop("eval", Drop("y", DropReason.ABANDONED, 0))
    counters = Counters(accounting)
    assert (counters.groups_trained, dict(counters.dropped_groups)) == (0, {})
