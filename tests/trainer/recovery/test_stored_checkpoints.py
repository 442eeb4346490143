"""Copies of checkpoints in a real object store: whole or not there, verified, as many as the folder holds."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.trainer.recovery.test_checkpoint import state

from penstock.protocol import blob_keys
from penstock.protocol.errors import BlobCorrupt, BlobError
from penstock.protocol.facts import encode
from penstock.protocol.record.checkpoint_state import STATE_FILE, CheckpointState
from penstock.protocol.record.lineage import CheckpointCommitted
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer.errors import CheckpointError
from penstock.trainer.recovery import checkpoint
from penstock.trainer.recovery.checkpoint import verify_files
from penstock.trainer.recovery.stored_checkpoints import StoredCheckpoints

METRICS = b'{"step":1}\n{"step":2, "after": "the checkpoint"}\n'


class Machine:
    """A trainer's folder on one machine, and the object store that it shares with others."""

    def __init__(self, folder: Path, blobs: Blobs, run_id: str, *, keeps_local: bool = True) -> None:
        self.root, self.run_id = folder / "checkpoints", run_id
        self.root.mkdir(parents=True, exist_ok=True)
        self.metrics = folder / "metrics.jsonl"
        self.stored = StoredCheckpoints(blobs, run_id, root=self.root, metrics=self.metrics, keeps_local=keeps_local)

    def commit(self, step: int, *, chapter: int, epoch: int = 1, keep: int = 1, files: dict[str, bytes]) -> bytes:
        """Commit a checkpoint and copy it; return the key that NATS would hold."""
        known = self.write(step, chapter=chapter, epoch=epoch, keep=keep, files=files)
        self.copy(step, epoch=epoch)
        return known

    def write(self, step: int, *, chapter: int, epoch: int = 1, keep: int = 1, files: dict[str, bytes]) -> bytes:
        """Commit a checkpoint in the folder alone; return the key that NATS would hold."""
        self.metrics.write_bytes(METRICS)

        def write(folder: Path) -> None:
            for path, data in files.items():
                (folder / path).parent.mkdir(exist_ok=True)
                (folder / path).write_bytes(data)

        made = state(step, self.run_id, epoch=epoch, chapter=chapter, weights="abcdef"[step % 6])
        data = checkpoint.commit(self.root, made, write, keep=keep)
        return key(made, data)

    def copy(self, step: int, *, epoch: int = 1) -> None:
        """Do what follows a commit, as the trainer does: copy it, have NATS name it, remove what is no longer needed."""
        folder = self.root / f"step{step:08d}"
        self.stored.store(folder)
        self.stored.mark_named(folder, (folder / STATE_FILE).read_bytes())
        self.stored.remove_local(lambda: None)
        self.stored.prune(epoch)

    def newest(self) -> tuple[Path, CheckpointState]:
        found = checkpoint.newest(self.root, self.run_id)
        assert found is not None
        return found


def key(made: CheckpointState, state_json: bytes, *, epoch: int = 9) -> bytes:
    return encode(
        CheckpointCommitted(
            epoch=epoch, step=made.step, version=made.version, chapter=made.chapter, record=made.record,
            state_sha256=hashlib.sha256(state_json).hexdigest(),
        )
    )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path, blobs: Blobs, run_id: str) -> Callable[[str], Machine]:
    """Makes machines that share the object store."""
    return lambda name: Machine(tmp_path / name, blobs, run_id)


def objects(blobs: Blobs, run_id: str) -> set[str]:
    return {stat.key for stat in blobs.list(blob_keys.checkpoints_prefix(run_id))}


FILES = {"engine/weights.bin": b"weights", "random.bin": b"\x00"}


def test_another_machine_gets_the_checkpoint_and_the_metrics_up_to_it(machine: Callable[[str], Machine]) -> None:
    """Every byte is the committed one; a folder that has the checkpoint, or a newer one, fetches nothing."""
    first, second = machine("first"), machine("second")
    known = first.commit(2, chapter=1, files=FILES)
    assert second.stored.fetch(known, None)
    folder, found = second.newest()
    verify_files(folder, found)
    assert (folder / STATE_FILE).read_bytes() == (first.root / "step00000002" / STATE_FILE).read_bytes()
    assert second.metrics.read_bytes() == METRICS[:11]  # the rest belongs to a step after the checkpoint
    assert not second.stored.fetch(known, found)
    assert not second.stored.fetch(None, None)
    assert not second.stored.fetch(encode(CheckpointCommitted(epoch=1)), None)


def test_unchanged_files_are_sent_once_and_removed_with_the_last_checkpoint_that_has_them(
    machine: Callable[[str], Machine], blobs: Blobs, run_id: str
) -> None:
    """The object store holds the folder's checkpoints, also after only ``state.json`` was replaced."""
    first = machine("first")
    first.commit(2, chapter=1, files=FILES)
    kept = objects(blobs, run_id)
    first.commit(2, chapter=2, files=FILES)
    assert len(objects(blobs, run_id)) == len(kept) == 4  # two files, the state, the metrics
    assert {one for one in kept if "/files/" in one} == {one for one in objects(blobs, run_id) if "/files/" in one}
    first.commit(3, chapter=3, files=FILES | {"random.bin": b"\x01"}, keep=2)
    assert len(objects(blobs, run_id)) == 4 + 3  # the weights are shared
    known = first.commit(4, chapter=4, files={"random.bin": b"\x01"}, keep=1)
    assert len(objects(blobs, run_id)) == 3
    second = machine("second")
    assert second.stored.fetch(known, None)
    assert second.newest()[1].chapter == 4


def test_a_trainer_that_lost_its_lease_removes_nothing_of_its_successor(
    machine: Callable[[str], Machine], blobs: Blobs, run_id: str
) -> None:
    """Objects of a newer epoch stay, although no checkpoint in the older trainer's folder names them."""
    old, new = machine("old"), machine("new")
    known = old.commit(2, chapter=1, files=FILES)
    assert new.stored.fetch(known, None)
    known = new.commit(3, chapter=2, epoch=2, files=FILES)
    old.stored.prune(1)
    third = machine("third")
    assert third.stored.fetch(known, None)
    verify_files(*third.newest())


def test_a_copy_that_is_altered_or_not_whole_is_refused(
    machine: Callable[[str], Machine], blobs: Blobs, run_id: str
) -> None:
    """The error names the object; the folder has no checkpoint afterwards."""
    known = machine("first").commit(2, chapter=1, files=FILES)
    second = machine("second")
    weights = blob_keys.checkpoint_file(run_id, 1, hashlib.sha256(b"weights").hexdigest())
    blobs.put(weights, b"wEights")
    with pytest.raises(BlobCorrupt, match=weights):
        second.stored.fetch(known, None)
    blobs.delete([weights])
    with pytest.raises(BlobError, match=f"{weights} is missing in the object store: the stored checkpoint of step 2"):
        second.stored.fetch(known, None)
    assert checkpoint.newest(second.root, run_id) is None
    blobs.delete(one for one in objects(blobs, run_id) if one.endswith(STATE_FILE))
    assert not second.stored.fetch(known, None)  # the state is stored last: without it there is no copy


def test_a_file_that_changed_after_the_commit_is_not_copied(
    machine: Callable[[str], Machine], blobs: Blobs, run_id: str
) -> None:
    first = machine("first")
    first.commit(2, chapter=1, files=FILES)
    shutil.rmtree(first.root)
    blobs.delete(objects(blobs, run_id))

    def write(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"weights")

    checkpoint.commit(first.root, state(4, run_id, chapter=2), write, keep=1)
    (first.root / "step00000004" / "weights.bin").write_bytes(b"wEights")
    with pytest.raises(CheckpointError, match=r"weights\.bin: expected sha256 \w+, got \w+: it was altered after"):
        first.stored.store(first.root / "step00000004")
    assert objects(blobs, run_id) == set()


def test_a_state_that_nats_does_not_name_is_refused(machine: Callable[[str], Machine], blobs: Blobs) -> None:
    """Whoever can write to the bucket cannot put another state, and with it other paths, under a checkpoint's key."""
    first, second = machine("first"), machine("second")
    known = first.commit(2, chapter=1, files=FILES)
    forged = first.newest()[1].model_copy(update={"files": {"../../stolen": "0" * 64}}).model_dump_json().encode()
    name = next(one for one in objects(blobs, first.run_id) if one.endswith(STATE_FILE))
    blobs.put(name, forged)
    with pytest.raises(BlobCorrupt, match=STATE_FILE):
        second.stored.fetch(known, None)
    assert checkpoint.newest(second.root, second.run_id) is None
