"""A checkpoint of an earlier release is resumed, and written again as it was; one that contradicts itself is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.errors import CheckpointError
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.groups.group_states import State
from penstock.trainer.groups.prompt_cursor import GroupKey, PromptCursor

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
    "changes",
    [
        {"dispatch": EARLIER["dispatch"] | {"outstanding": []}},
        {"ledger": [[1, ["e0.p6.a0"]]]},
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    """A group that is open by one part and closed by another would be trained twice or never."""
    with pytest.raises(CheckpointError, match="is outstanding by one of its parts and closed by another"):
        RunGroups.of(earlier(**changes), max_staleness=2)
