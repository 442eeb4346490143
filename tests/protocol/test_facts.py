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
    ImageRef,
    RouterShape,
    RowImages,
    ScoredGroup,
    Wire,
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
        run_id="r", stage="tasks", subject="s", reason="Malformed", detail="", num_delivered=1, payload=b"0"
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
    with pytest.raises(ValueError, match="1 values in rewards of 2 trajectories"):
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


ROUTERS = RouterShape(num_layers=3, num_experts=8, top_k=2)
IMAGES = RowImages(
    processor="a" * 64, refs=(ImageRef(position=1, num_tokens=1, grid_thw=(1, 2, 2), sha256="b" * 64, size_bytes=77),)
)
ABANDONED = AbandonedCompletion(reason="surplus", num_tokens=7)


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        (TASK, "messages", '[{"role": "user", "content": "get 3"}]'),
        (TASK, "seed", 0),
        (TASK, "images", IMAGES),
        (TASK, "teacher_top_k", 0),
        (TASK, "redundant_completions", 2),
        (TASK, "redundant_wait", 0.5),
        (TASK.sampling, "routers", ROUTERS),
        (GENERATED, "abandoned", (ABANDONED,)),
        (GENERATED, "teacher_top_k", 0),
        (GENERATED, "routers", ROUTERS),
        (GENERATED, "image_processor", "a" * 64),
    ],
)
def test_a_field_of_a_later_release_is_written_only_where_it_is_used(model: Wire, name: str, value: object):
    """An earlier release reads messages without it, and a step's digest, which leaves defaults out, is the same."""
    for document in (model.model_dump(), model.model_dump(exclude_defaults=True)):
        assert name not in document
    used = model.model_copy(update={name: value})
    assert name in used.model_dump()
    assert type(model).model_validate(used.model_dump(), strict=True) == used


def test_no_completion_of_a_group_of_episodes_is_abandoned():
    episodes = {"rows": (1,) * len(GENERATED.completion_tokens), "row_tokens": 100}
    document = GENERATED.model_dump() | {"abandoned": (ABANDONED.model_dump(),)} | episodes
    with pytest.raises(ValidationError, match="1 abandoned completions in a group of episodes"):
        GeneratedGroup.model_validate(document)
