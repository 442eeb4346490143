"""Objects a run keeps: with the defaults all that a replay needs, and always those that a queue or dead letter names."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError
from tests.groups import make_generated, make_group, make_scored

from penstock.deploy.bootstrap import bootstrap
from penstock.protocol import blob_keys, streams, subjects
from penstock.protocol.config.shared_sections import RetentionSettings
from penstock.protocol.facts import DeadLetter, GroupGenerated, encode
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.lineage import (
    AccountState,
    CheckpointCommitted,
    LineageChapter,
    RecordedGroup,
    RecordedStep,
)
from penstock.protocol.record.stored_record import RescoredInput, RescoredPiece
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.weight_gc import holds_lease
from penstock.trainer.recovery.group_gc import GroupGc, sweep_period_s


class Clock:
    """The time of day, ``hours`` later."""

    hours = 0.0

    def __call__(self) -> datetime:
        return datetime.now(UTC) + timedelta(hours=self.hours)


def store(blobs: Blobs, run: str, name: str) -> BlobRef:
    return blobs.put(blob_keys.group_pack(run, PolicyVersion(0), name, "0"), name.encode())


def commit(bus: Bus, blobs: Blobs, run: str, pack: BlobRef, number: int = 1, parent: BlobRef | None = None) -> BlobRef:
    scored = make_scored(make_generated(run, [make_group(f"e0.p{number}.a0")])).groups[0]
    step = RecordedStep(
        epoch=1, step=number, trained_version=number - 1, made_version=number, weights_digest="a" * 64, packs=(pack,),
        groups=(RecordedGroup(prompt=0, pack=0, scored=scored),),
    )  # fmt: skip
    chapter = LineageChapter(
        run_id=run, number=number, parent=parent, epoch=1, step=number, version=number, weights_digest="a" * 64,
        steps=(step,), account=AccountState(),
    )  # fmt: skip
    last = blobs.put(blob_keys.lineage_chapter(run, number, 1, "x"), encode(chapter))
    state = bus.key_value(streams.state_bucket(run).bucket).wait()
    committed = CheckpointCommitted(epoch=1, step=number, version=number, chapter=number, record=last)
    state.put(streams.CHECKPOINT_KEY, encode(committed)).wait()
    return last


def store_logprobs(blobs: Blobs, run: str, step: int, epoch: int) -> str:
    return blobs.put(blob_keys.step_logprobs(run, step, epoch, "a" * 64), b"logprobs").key


def announce(bus: Bus, run: str, pack: BlobRef) -> GroupGenerated:
    fact = make_generated(run, [make_group("e0.p7.a0")]).model_copy(update={"pack": pack, "pack_id": pack.sha256})
    bus.publish(subjects.generated(run, "train"), fact, msg_id=pack.sha256).wait()
    return fact


def test_only_objects_that_nothing_names_are_deleted_after_a_day(bus: Bus, blobs: Blobs, run_streams: str) -> None:
    """Trained, queued and dead-lettered packs are kept; a dropped group's pack and an old task list are deleted after a day.

    So are the log-probabilities of a step that the record does not have.
    A message that is no dead letter lies among them.
    """
    run, clock = run_streams, Clock()
    trained, queued, dead, dropped = (store(blobs, run, name) for name in ("trained", "queued", "dead", "dropped"))
    tasks = blobs.put(blob_keys.task_list(run, "p"), b"tasks")
    commit(bus, blobs, run, trained)
    logprobs = store_logprobs(blobs, run, step=1, epoch=1)
    rolled_back = store_logprobs(blobs, run, step=2, epoch=0)
    letter = DeadLetter(
        run_id=run, stage="generated", subject="s", reason="r", detail="d", num_delivered=1,
        payload=encode(make_generated(run, [make_group()]).model_copy(update={"pack": dead})),
    )  # fmt: skip
    bus.publish(subjects.dead(run, "generated"), announce(bus, run, queued), msg_id="no dead letter").wait()
    bus.publish(subjects.dead(run, "generated"), letter, msg_id="d").wait()
    group_gc = GroupGc(Connections(run, bus, blobs), RetentionSettings(), holder="t", clock=clock)
    assert group_gc.sweep() == []
    clock.hours = 25.0
    assert sorted(group_gc.sweep()) == sorted([dropped.key, tasks.key, rolled_back])
    clock.hours = 1e5
    assert group_gc.sweep() == []
    assert all(blobs.exists(key) for key in (trained.key, queued.key, dead.key, logprobs))


def test_trained_packs_are_deleted_if_their_retention_is_set(bus: Bus, blobs: Blobs, run_streams: str) -> None:
    """With the log-probabilities of their steps. The record is read on from the chapter up to which it was read before."""
    run, clock = run_streams, Clock()
    first, second = store(blobs, run, "first"), store(blobs, run, "second")
    logprobs = store_logprobs(blobs, run, step=2, epoch=1)
    settings = RetentionSettings(trained_packs_h=48.0)
    group_gc = GroupGc(Connections(run, bus, blobs), settings, holder="t", clock=clock)
    last = commit(bus, blobs, run, first)
    clock.hours = 23.0
    assert group_gc.sweep() == []
    commit(bus, blobs, run, second, number=2, parent=last)
    clock.hours = 47.0
    assert group_gc.sweep() == []
    clock.hours = 49.0
    assert sorted(group_gc.sweep()) == sorted([first.key, second.key, logprobs])
    third = store(blobs, run, "third")
    commit(bus, blobs, run, third, number=3)
    clock.hours = 0.0
    assert group_gc.sweep() == []
    assert group_gc._trained >= {third.key}
    assert not group_gc._trained & {first.key, second.key}  # a long run does not remember what it deleted


@pytest.mark.parametrize(
    ("trained_h", "unused_h", "sweep_s"),
    [(0.0, 24.0, 600.0), (0.1, 24.0, 90.0), (48.0, 1.0, 600.0), (1e-4, 24.0, 10.0)],
)
def test_sweeps_are_as_frequent_as_the_retention_needs(trained_h: float, unused_h: float, sweep_s: float) -> None:
    """Packs are kept for a quarter longer than their retention at most, and sweeps are ten seconds apart at least."""
    settings = RetentionSettings(trained_packs_h=trained_h, unused_packs_h=unused_h)
    assert sweep_period_s(settings) == pytest.approx(sweep_s)


def test_a_clock_that_steps_back_deletes_nothing(bus: Bus, blobs: Blobs, run_streams: str) -> None:
    store(blobs, run_streams, "dropped")
    clock = Clock()
    clock.hours = -1e4
    group_gc = GroupGc(Connections(run_streams, bus, blobs), RetentionSettings(), holder="t", clock=clock)
    assert group_gc.sweep() == []


def test_one_holder_of_the_lease_sweeps(bus: Bus, blobs: Blobs, run_streams: str) -> None:
    connections = Connections(run_streams, bus, blobs)
    one, other = (GroupGc(connections, RetentionSettings(), holder=name, clock=Clock()) for name in ("a", "b"))
    leases = one._leases
    assert holds_lease(leases, streams.EXPIRY_LEASE, one._holder)
    assert not holds_lease(leases, streams.EXPIRY_LEASE, other._holder)
    assert holds_lease(leases, streams.EXPIRY_LEASE, one._holder)


def test_streams_get_the_ages_that_are_set(bus: Bus, blobs: Blobs, run_id: str) -> None:
    """Events and dead letters have an age limit; other streams keep messages until they are acknowledged."""
    settings = RetentionSettings(events_h=2.0, dead_letters_h=3.0)
    specs = {spec.name: spec.max_age_s for spec in streams.streams(run_id, settings.limits())}
    assert specs == {
        f"{run_id}-tasks": 0.0, f"{run_id}-generated": 0.0, f"{run_id}-scored": 0.0, f"{run_id}-weights": 0.0,
        f"{run_id}-events": 7200.0, f"{run_id}-dead": 10800.0,
    }  # fmt: skip
    bootstrap(bus, blobs, run_id, settings.limits())
    with pytest.raises(ValidationError, match="0 or at least 1 hour"):
        RetentionSettings(events_h=0.5)


def test_the_packs_of_an_input_never_expire(bus: Bus, blobs: Blobs, run_streams: str) -> None:
    """A run with the id of its own rescored input sweeps below that prefix, and keeps the packs there."""
    run, clock = run_streams, Clock()
    kept, dropped = store(blobs, run, "kept"), store(blobs, run, "dropped")
    scored = make_scored(make_generated(run, [make_group()])).groups[0]
    piece = RescoredPiece(packs=(kept,), groups=(RecordedGroup(prompt=0, pack=0, scored=scored),))
    reference = blobs.put(blob_keys.rescored_piece(run, 1, "b" * 64), encode(piece))
    whole = encode(
        RescoredInput(
            run_id=run,
            source="s",
            source_record=kept,
            source_version=1,
            reward="r",
            temperature=1.0,
            pieces=(reference,),
            num_groups=1,
        )
    )
    blobs.put(blob_keys.rescored_input(run, hashlib.sha256(whole).hexdigest()), whole)
    group_gc = GroupGc(Connections(run, bus, blobs), RetentionSettings(trained_packs_h=1.0), holder="t", clock=clock)
    commit(bus, blobs, run, kept)
    clock.hours = 1e5
    assert group_gc.sweep() == [dropped.key]
    assert blobs.exists(kept.key)
