"""What happened is in the next chapter, however little of it there is."""

from __future__ import annotations

import pytest

from protocol import streams
from protocol.facts import BlobRef, ScoredGroup
from protocol.lineage import chapters
from protocol.transport.blobs import Blobs
from protocol.transport.bus import Bus
from protocol.versions import PolicyVersion
from tests.groups import make_group
from trainer.account import Account
from trainer.chronicle import Chronicle
from trainer.doors import Doors
from trainer.lease import FencedKey
from trainer.step_plan import ReadyGroup


@pytest.fixture
def chronicle(bus: Bus, blobs: Blobs, ring_streams: str) -> Chronicle:
    """The record of a run that has just begun."""
    state = bus.key_value(streams.state_bucket(ring_streams).bucket).wait()
    pointer = FencedKey(state, streams.CHECKPOINT_KEY, lambda value: value)
    return Chronicle(Doors(ring_streams, bus, blobs), pointer, epoch=1, resumed=None)


def test_one_step_alone_is_something_to_write(chronicle: Chronicle, blobs: Blobs) -> None:
    """A single step since the last chapter, with nothing issued or dropped, is not passed over by a checkpoint."""
    assert chronicle.is_empty
    group = make_group()
    scored = ScoredGroup(generated=group.summary(0), rewards=(1.0,) * 8, scorer="exact_match")
    pack = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)
    ready = ReadyGroup(scored, pack, group)
    chronicle.step(1, PolicyVersion(0), PolicyVersion(1), [ready], {}, {group.group_id: 1})
    assert not chronicle.is_empty
    chronicle.weights(lambda: "0" * 64)
    entries = Account().take_entries()
    assert entries.is_empty
    reference, number, digest = chronicle.write(entries, step=1, version=PolicyVersion(1))
    (chapter,) = chapters(reference, blobs.get)
    assert number == 1
    assert [(step.step, step.weights_digest) for step in chapter.steps] == [(1, digest)]
