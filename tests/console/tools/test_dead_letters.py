"""Dead letters: listed, read, and resent so that neither NATS nor the trainer drops them as duplicates."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.console.command import penstock
from tests.groups import make_generated, make_group, make_scored, make_task, make_task_issued

from penstock.console.tools import dead_letters
from penstock.console.tools.dead_letters import Letter, RunProgress, content, refusal, resent
from penstock.protocol import blob_keys, streams, subjects
from penstock.protocol.facts import DeadLetter, Fact, GroupGenerated, GroupScored, Head, RunEvent, TaskIssued, encode
from penstock.protocol.groups import BlobRef
from penstock.protocol.packs import group_pack
from penstock.protocol.record.lineage import AccountState, CheckpointCommitted, LineageChapter, RecordedSession
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.inbox import Inbox
from penstock.protocol.versions import PolicyVersion

NOW = datetime(2026, 1, 1, tzinfo=UTC)
AT_4 = RunProgress(version=4, step=40, total_steps=100, max_staleness=2)


def letter(
    stage: str, fact: Fact, *, split: str = "train", ids: tuple[str, ...] = ("e0.p1.a0",), **more: object
) -> Letter:
    dead = DeadLetter(
        run_id="r", stage=stage, subject=f"penstock.r.{stage}.{split}", reason="RewardFailed", detail="d",
        group_ids=ids, num_delivered=5, payload=encode(fact),
    )  # fmt: skip
    return Letter(7, NOW, dead, **more)  # type: ignore[arg-type]


def generated(version: int) -> GroupGenerated:
    return make_generated("r", [make_group("e0.p1.a0", version=version)])


TASKS = make_task_issued("r", "e0.p1.a0.n1.12345678", [make_task("e0.p1.a0")])


def test_group_ids_stay_and_ids_for_deduplication_are_new():
    """The pack's name and the message id change with every resend, so no later message is a duplicate."""
    first = resent(letter("tasks", TASKS))
    assert first.subject == "penstock.r.tasks.train"
    assert isinstance(first.fact, TaskIssued)
    assert first.fact.tasks == TASKS.tasks
    assert (first.fact.pack_id, first.msg_id) == ("e0.p1.a0.n1.12345678.again7-1", "again:7:1")
    second = resent(letter("tasks", first.fact, times_sent=1))
    assert (second.fact.pack_id, second.msg_id) == ("e0.p1.a0.n1.12345678.again7-2", "again:7:2")


@pytest.mark.parametrize(
    ("dead", "progress", "reason"),
    [
        (letter("generated", generated(1)), AT_4, "sampled by version 1 and the run is at 4: .* max_staleness is 2"),
        (letter("generated", generated(9)), AT_4, "sampled by version 9"),
        (letter("tasks", TASKS), RunProgress(4, 100, 100, 2), "the run has ended: 100 of 100"),
        (letter("tasks", TASKS, split="eval"), AT_4, "evaluation"),
        (letter("scored", make_scored(generated(4))), AT_4, "already issued its prompts again"),
        (letter("tasks", TASKS, times_sent=1, sent_at="noon"), AT_4, "sent again at noon; add --once-more"),
        (letter("tasks", generated(4)), AT_4, "cannot be read by this build: expected task_issued.v1"),
        (letter("weights", TASKS), AT_4, "stage 'weights' is none of"),
        (letter("tasks", TASKS, split=">"), RunProgress(), "ends with none of train, eval"),
        (letter("tasks", TASKS.model_copy(update={"run_id": "other"})), RunProgress(), "it was forged"),
    ],
)  # fmt: skip
def test_a_letter_that_would_have_no_effect_is_refused_with_the_reason(
    dead: Letter, progress: RunProgress, reason: str
):
    """Too old, of a later version, of an ended run, held out, issued again, already resent, unreadable, of others."""
    assert re.search(reason, refusal(dead, progress, run="r") or "")


def test_a_usable_letter_is_not_refused():
    """Tasks have no age; samples within the window, and letters that an older build could not read, are accepted."""
    assert refusal(letter("tasks", TASKS), AT_4, run="r") is None
    assert refusal(letter("generated", generated(2)), AT_4, run="r") is None
    assert refusal(letter("generated", generated(0)), RunProgress(), run="r") is None
    assert refusal(letter("scored", make_scored(generated(4)), ids=()), AT_4, run="r") is None
    assert refusal(letter("tasks", TASKS, times_sent=1), AT_4, run="r", once_more=True) is None


def bury(bus: Bus, run: str, pack: GroupGenerated) -> Inbox[GroupGenerated]:
    """Make the reward service's inbox dead-letter a pack."""
    bus.publish(subjects.generated(run, "train"), pack, msg_id=f"g:{pack.pack_id}").wait()
    inbox = bus.inbox(streams.generated_consumer(run), GroupGenerated).wait()
    inbox.fetch(1, 30.0).wait()[0].dead_letter("RewardFailed", "the endpoint answered 500").wait()
    return inbox


def test_list_show_and_resend(bus: Bus, blobs: Blobs, run_streams: str, typed: list[str], tmp_path: Path):
    """A dead-lettered pack is listed with its reason, shown with prompt and answers, and queued after resend."""
    run, groups = run_streams, [make_group("e0.p1.a0"), make_group("e0.p2.a0")]
    ref = blobs.put(blob_keys.group_pack(run, PolicyVersion(0), "p", "0"), group_pack.encode(groups))
    pack = make_generated(run, groups).model_copy(update={"pack_id": "p", "pack": ref})
    inbox = bury(bus, run, pack)
    listed = penstock("dead-letters", "list", run, "--json", *typed, cwd=tmp_path, code=0)
    (row,) = json.loads(listed.stdout)
    assert (row["id"], row["stage"], row["reason"], row["times_sent"]) == (1, "generated", "RewardFailed", 0)
    assert row["group_ids"] == ["e0.p1.a0", "e0.p2.a0"]
    shown = penstock("dead-letters", "show", run, "1", *typed, cwd=tmp_path, code=0)
    for text in ("the endpoint answered 500", groups[0].prompt_text, groups[1].trajectories[0].completion_text):
        assert text in shown.stdout

    penstock("dead-letters", "resend", run, "1", *typed, cwd=tmp_path, code=0)
    (delivery,) = inbox.fetch(1, 30.0).wait()
    assert delivery.fact.groups == pack.groups
    assert delivery.fact.pack_id == "p.again1-1"
    refused = penstock("dead-letters", "resend", run, "--all", *typed, cwd=tmp_path, code=1)
    assert "1: not sent: it was sent again at" in refused.stderr


def commit(bus: Bus, blobs: Blobs, run: str, *, version: int, steps: int) -> None:
    config = json.dumps({"settings": {"trainer": {"steps": 10}, "rollout": {"max_staleness": 2}}}).encode()
    ref = blobs.put(blob_keys.lineage_config(run, "c"), config)
    life = RecordedSession(
        epoch=1, holder="t", at=1.0, step=0, version=0, parent_version=None, weights_digest="a" * 64, config=ref
    )
    last: BlobRef | None = None
    for number in (1, 2):  # the trainer process is recorded in the first chapter only
        chapter = LineageChapter(
            run_id=run, number=number, parent=last, epoch=1, step=steps, version=version, weights_digest="a" * 64,
            lives=(life,) if number == 1 else (), account=AccountState(),
        )  # fmt: skip
        last = blobs.put(blob_keys.lineage_chapter(run, number, 1, "x"), encode(chapter))
    state = bus.key_value(streams.state_bucket(run).bucket).wait()
    state.put(streams.HEAD_KEY, encode(Head(version=version, step=steps, manifest=ref))).wait()
    committed = CheckpointCommitted(epoch=1, step=steps, version=version, chapter=2, record=last)
    state.put(streams.CHECKPOINT_KEY, encode(committed)).wait()


def test_the_progress_of_the_run_is_read_from_its_record(
    bus: Bus, blobs: Blobs, run_streams: str, typed: list[str], tmp_path: Path
):
    """A stale letter is not sent again; a missing object is named; an unknown id is refused."""
    run = run_streams
    bury(bus, run, make_generated(run, [make_group("e0.p1.a0"), make_group("e0.p2.a0")]))
    answer = penstock("dead-letters", "resend", run, "2", *typed, cwd=tmp_path)
    assert "no dead letter 2; list them again" in answer.stderr
    commit(bus, blobs, run, version=9, steps=9)
    shown = json.loads(penstock("dead-letters", "show", run, "1", "--json", *typed, cwd=tmp_path).stdout)
    assert "no such object" in shown["unreadable"]
    assert "sampled by version 0 and the run is at 9" in shown["cannot_be_sent_again"]


@pytest.mark.parametrize(("trainer", "rollout"), [({}, {"max_staleness": 2}), ({"steps": 10}, {})])
def test_a_limit_that_a_session_did_not_record_leaves_the_other(trainer: dict[str, int], rollout: dict[str, int]):
    limits = dead_letters._Limits.model_validate({"settings": {"trainer": trainer, "rollout": rollout}})
    assert (limits.trainer.steps, limits.rollout.max_staleness) == (trainer.get("steps"), rollout.get("max_staleness"))


@pytest.mark.parametrize(
    "config", [{}, {"settings": None}, {"settings": {"rollout": {}}}, {"settings": {"trainer": 1, "rollout": {}}}]
)
def test_settings_without_the_sections_of_the_limits_cannot_be_read(config: dict[str, Any]):
    with pytest.raises(ValidationError, match=r"settings\.trainer"):
        dead_letters._Limits.model_validate(config)


def test_an_unreadable_message_is_shown_as_bytes(bus: Bus, run_streams: str, typed: list[str], tmp_path: Path):
    run = run_streams
    event = RunEvent(run_id=run, source="test", kind="log", at=0.0)
    bus.publish(subjects.scored(run, "train"), event, msg_id="poison").wait()
    inbox = bus.inbox(streams.scored_consumer(run, "train"), GroupScored).wait()
    assert inbox.fetch(1, 0.5).wait() == []
    shown = json.loads(penstock("dead-letters", "show", run, "1", "--json", *typed, cwd=tmp_path).stdout)
    assert "run_event.v1" in shown["unreadable"]
    assert "expected group_scored.v1" in shown["cannot_be_sent_again"]
    answer = penstock("dead-letters", "list", run, *typed, cwd=tmp_path)
    assert "UnknownSchema" in answer.stdout


def test_every_stage_has_its_fact():
    for stage, fact in (("tasks", TASKS), ("generated", generated(1)), ("scored", make_scored(generated(1)))):
        assert content(letter(stage, fact).fact) == fact
