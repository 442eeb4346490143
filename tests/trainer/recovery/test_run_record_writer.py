"""The next chapter has everything that happened, even a single step."""

from __future__ import annotations

import pytest
from tests.groups import make_group

from penstock.protocol import streams
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.record.lineage import chapters
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.recovery.lease import FencedKey
from penstock.trainer.recovery.run_record_writer import RunRecordWriter


@pytest.fixture
def record_writer(bus: Bus, blobs: Blobs, run_streams: str) -> RunRecordWriter:
    state = bus.key_value(streams.state_bucket(run_streams).bucket).wait()
    pointer = FencedKey(state, streams.CHECKPOINT_KEY, lambda value: value)
    return RunRecordWriter(Connections(run_streams, bus, blobs), pointer, epoch=1, resumed=None)


def test_a_single_step_makes_a_chapter(record_writer: RunRecordWriter, blobs: Blobs) -> None:
    """A single step since the last chapter, with nothing issued or dropped, is not skipped by a checkpoint."""
    assert record_writer.is_empty
    group = make_group()
    scored = ScoredGroup(generated=group.summary(0), rewards=(1.0,) * 8, scorer="exact_match")
    pack = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)
    ready = ReadyGroup(scored, pack, group)
    record_writer.add_step(1, PolicyVersion(0), PolicyVersion(1), [ready], {}, {group.group_id: 1})
    assert not record_writer.is_empty
    record_writer.set_weights(lambda: "0" * 64)
    entries = RunGroups().take_entries()
    assert entries.is_empty
    reference, number, digest = record_writer.write(entries, step=1, version=PolicyVersion(1))
    (chapter,) = chapters(reference, blobs.get)
    assert number == 1
    assert [(step.step, step.weights_digest) for step in chapter.steps] == [(1, digest)]


def test_the_record_holds_the_digests_of_user_code(record_writer: RunRecordWriter, blobs: Blobs) -> None:
    record_writer.set_weights(lambda: "0" * 64)
    digests = {"extension loss my_losses.py:tilted": "0123456789abcdef"}
    record_writer.add_session(holder="h", at=0.0, step=0, version=0, parent=None, config=b"{}", extensions=digests)
    reference, _, _ = record_writer.write(RunGroups().take_entries(), step=0, version=PolicyVersion(0))
    (chapter,) = chapters(reference, blobs.get)
    assert digests.items() <= chapter.lives[0].environment.items()
