"""Facts round-trip unchanged, and `decode` refuses hostile input."""

from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.examples import examples
from tests.groups import make_group, make_task

from penstock.protocol import facts
from penstock.protocol.errors import MalformedFact, MessageTooLarge, UnknownSchema, WireError
from penstock.protocol.groups import (
    AbandonedCompletion,
    BlobRef,
    GeneratedGroup,
    ScoredGroup,
)

BLOB = BlobRef(key="runs/r/groups/v00000001/p.a.parquet", size_bytes=10, sha256="0" * 64)


GENERATED = make_group("e0.p1.a0", size=2).summary(0)
TASK = make_task("e0.p1.a0")

EVERY_FACT = [
    facts.TaskIssued(run_id="r", pack_id="p", tasks=(TASK,)),
    facts.TaskIssued(run_id="r", pack_id="p", tasks_blob=BLOB),
    facts.TaskList(tasks=(TASK,)),
    facts.GroupGenerated(run_id="r", pack_id="p", worker_id="w", pack=BLOB, groups=(GENERATED,)),
    facts.GroupScored(
        run_id="r",
        pack_id="p",
        worker_id="w",
        pack=BLOB,
        groups=(ScoredGroup(generated=GENERATED, rewards=(1.0, 0.5), parts={"x": (0.0, 1.0)}, scorer="s@1"),),
    ),
    facts.WeightsPublished(run_id="r", version=3, step=3, manifest=BLOB, num_bytes=5),
    facts.WeightsApplied(
        run_id="r",
        worker_id="w",
        version=3,
        previous_version=None,
        pause_s=0.1,
        fetch_s=0.2,
        num_bytes=5,
        checksum="abc",
        layout="mirror",
    ),
    facts.WeightsRefused(run_id="r", worker_id="w", version=3, manifest=BLOB, serving=2, reason="sha256"),
    facts.RetirementFloor(version=3),
    facts.KeptVersions(
        best=(facts.KeptVersion(version=3, step=3, manifest=BLOB, measure="gsm8k ≥ 1", score=0.5),),
        milestones=(facts.KeptVersion(version=2, step=2),),
    ),
    facts.Head(version=3, step=3, manifest=BLOB),
    facts.Heartbeat(role="rollout", service_id="w", at=1.0, state="generating", figures={"tokens_per_s": 3.0}),
    facts.RunEvent(run_id="r", source="trainer", kind="step", at=1.0, data={"loss": 0.5, "groups": {"issued": 3}}),
    facts.DeadLetter(
        run_id="r", stage="tasks", subject="s", reason="MalformedFact", detail="d", num_delivered=1, payload=b"\x00"
    ),
    facts.Lease(holder="t-1", epoch=3, host="gpu-1", pid=7, since=1.0, ttl_s=6.0),
]


@pytest.mark.parametrize("fact", EVERY_FACT, ids=lambda f: f.schema_tag)
def test_every_fact_round_trips(fact: facts.Fact):
    assert facts.decode(facts.encode(fact), type(fact)) == fact
    assert facts.Fact.registry[fact.schema_tag] is type(fact)


def test_another_schema_is_refused_by_name():
    data = facts.encode(EVERY_FACT[5])
    with pytest.raises(UnknownSchema, match=r"expected head.v1, got 'weights_published.v1' \(known"):
        facts.decode(data, facts.Head)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"version": -1, "step": 0, "manifest": BLOB.model_dump()}, "version"),
        ({"version": "3", "step": 0, "manifest": BLOB.model_dump()}, "version"),
        ({"version": 1, "step": 0, "manifest": BLOB.model_dump(), "extra": 1}, "extra"),
        ({"version": 1, "step": 0, "manifest": {**BLOB.model_dump(), "sha256": "zz"}}, "sha256"),
        ({"version": 1, "step": 0}, "manifest"),
    ],
)
def test_a_wrong_field_is_named(fields: dict, complaint: str):
    """A field of the wrong type, out of range, missing or unknown is named in the error."""
    with pytest.raises(MalformedFact, match=complaint):
        facts.decode(msgpack.packb(["head.v1", fields]), facts.Head)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_must_be_a_finite_number(value: float):
    with pytest.raises(ValueError, match="finite"):
        ScoredGroup(generated=GENERATED, rewards=(value, 0.0), scorer="s")


def test_a_group_has_one_reward_for_each_trajectory():
    """Too few rewards, or too few values of a part, are refused."""
    with pytest.raises(ValueError, match="1 values in rewards, expected one for each of 2"):
        ScoredGroup(generated=GENERATED, rewards=(1.0,), scorer="s")
    with pytest.raises(ValueError, match="1 values in format"):
        ScoredGroup(generated=GENERATED, rewards=(1.0, 0.0), parts={"format": (1.0,)}, scorer="s")


def test_an_oversized_message_is_refused_before_it_is_sent():
    with pytest.raises(MessageTooLarge, match="groups_per_message"):
        facts.encode(facts.TaskIssued(run_id="r", pack_id="p", tasks=(make_task(prompt_ids=range(40_000)),)))


def test_deep_nesting_is_refused():
    value: object = 1
    for _ in range(40):
        value = {"x": value}
    data = msgpack.packb(["run_event.v1", {"run_id": "r", "source": "s", "kind": "k", "at": 1.0, "data": value}])
    with pytest.raises(MalformedFact, match="nested deeper"):
        facts.decode(data, facts.RunEvent)


@given(st.binary(max_size=200))
@examples(100)
def test_random_bytes_are_refused_as_wire_errors(data: bytes):
    with pytest.raises(WireError):
        facts.decode(data, facts.GroupScored)


@given(st.sampled_from(EVERY_FACT), st.data())
@examples(100)
def test_a_flipped_byte_never_escapes_the_error_tree(fact: facts.Fact, data: st.DataObject):
    """A damaged message is either refused or still a valid fact of its type; it never crashes a reader."""
    raw = bytearray(facts.encode(fact))
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(WireError):
        assert isinstance(facts.decode(bytes(raw), type(fact)), type(fact))


def test_a_task_of_one_turn_is_written_as_before_episodes():
    """Workers of earlier releases read it: ``messages`` is left out where it is empty."""
    assert "messages" not in TASK.model_dump()
    assert "seed" not in TASK.model_dump()
    assert TASK.model_copy(update={"seed": 0}).model_dump()["seed"] == 0
    chat = TASK.model_copy(update={"environment": "lookup", "messages": '[{"role": "user", "content": "get 3"}]'})
    both = facts.TaskList(tasks=(TASK, chat))
    assert facts.decode(facts.encode(both), facts.TaskList) == both


def test_redundant_completions_are_written_only_where_there_are_any():
    """Tasks and groups without them are those that earlier releases read and write; abandoned ones are never episodes'."""
    for name in ("redundant_completions", "redundant_wait"):
        assert name not in TASK.model_dump()
    task = TASK.model_copy(update={"redundant_completions": 2, "redundant_wait": 0.5})
    assert facts.decode(facts.encode(facts.TaskList(tasks=(task,))), facts.TaskList).tasks == (task,)
    generated = make_group("e0.p0.a0").summary(0)
    assert "abandoned" not in generated.model_dump()
    one = AbandonedCompletion(reason="surplus", num_tokens=7)
    document = generated.model_dump() | {"abandoned": (one.model_dump(),)}
    assert GeneratedGroup.model_validate(document).abandoned == (one,)
    episodes = {"rows": (1,) * len(generated.completion_tokens), "row_tokens": 100}
    with pytest.raises(ValidationError, match="1 abandoned completions in a group of episodes, expected none"):
        GeneratedGroup.model_validate(document | episodes)
