"""The next chapter has everything that happened, and a batch at which a run stopped is saved whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.groups import make_group
from tests.trainer.groups.stored_groups import invent_group

from penstock.console.connections import NamedRun
from penstock.console.record.stopped import print_stopped
from penstock.protocol import streams
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.record.lineage import chapters
from penstock.protocol.record.stopped_batch import BATCH, stopped_batches
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.errors import TrainingDiverged
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.recovery.lease import FencedKey
from penstock.trainer.recovery.run_record_writer import RunRecordWriter, save_batch


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


def ready(number: int, reward: float) -> ReadyGroup:
    group = invent_group(f"e0.p{number}.a0", seed=number)
    scored = ScoredGroup(generated=group.summary(3), rewards=(reward, 0.0, 1.0, 0.5), scorer="mine")
    return ReadyGroup(scored, BlobRef(key="k", size_bytes=1, sha256="0" * 64), group)


def test_a_saved_batch_is_shown_and_a_damaged_one_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest one, or that of a step; saving it again replaces it, and what is far out is marked."""
    home = tmp_path / "mine"
    for step, reward in ((7, 1.0), (12, 1.0), (12, 1e25)):
        batch, error = [ready(1, 0.0), ready(2, reward)], TrainingDiverged("it is nan")
        save_batch(home, batch, error, config=b"{}", run_id="mine", step=step, version=step - 1)
    assert [folder.name for folder in stopped_batches(home)] == ["step00000007", "step00000012"]
    given = [f"run.dir={tmp_path}"]

    def shown(step: int | None = None, *, as_json: bool) -> str:
        assert print_stopped(NamedRun("mine", given, {}), step=step, as_json=as_json) == 0
        return capsys.readouterr().out

    found = json.loads(shown(as_json=True))
    assert (found["step"], found["version"], found["reason"]) == (12, 11, "it is nan")
    assert [one["group_id"] for one in found["groups"]] == ["e0.p1.a0", "e0.p2.a0"]
    assert [one["far_out"] for one in found["groups"]] == [[], ["reward 1e+25"]]
    assert found["groups"][1]["rewards"] == [1e25, 0.0, 1.0, 0.5]
    assert json.loads(shown(7, as_json=True))["version"] == 6
    text = shown(as_json=False)
    assert "run mine, step 12 on version 11: it is nan" in text
    assert "reward 1e+25" in text
    with pytest.raises(ConfigError, match="no batch of step 8; saved are those of 7, 12"):
        shown(8, as_json=True)
    with pytest.raises(ConfigError, match="no run other"):
        print_stopped(NamedRun("other", given, {}), step=None, as_json=True)
    (home / "stopped" / "step00000012" / BATCH).write_text("{}")
    with pytest.raises(ConfigError, match=r"step00000012 cannot be read .*restore it"):
        shown(as_json=True)
