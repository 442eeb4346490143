"""Checkpoints with files in the object store alone: whole here or there at every moment, never twice on the disk."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
from tests.trainer.recovery.test_checkpoint import state
from tests.trainer.recovery.test_stored_checkpoints import Machine, objects

from penstock.protocol import blob_keys
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import BlobCorrupt, BlobError
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.checkpoint_state import STATE_FILE, read_state
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer import crash_points
from penstock.trainer.crash_points import CrashPoint
from penstock.trainer.errors import CheckpointError, LeaseLost
from penstock.trainer.recovery import checkpoint
from penstock.trainer.recovery.checkpoint import missing_files, verify_files
from penstock.trainer.recovery.stored_checkpoints import complete_copy

FILES = {
    "engine/rank0.bin": b"weights",
    "engine/rank1.bin": b"other weights",
    "random.bin": b"",
    "same.bin": b"weights",
}
STEP = "step00000002"


@pytest.fixture
def machine(tmp_path: Path, blobs: Blobs, run_id: str) -> Machine:
    """A trainer that keeps no files of checkpoints."""
    return Machine(tmp_path / "here", blobs, run_id, keeps_local=False)


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() or not any(path.iterdir()))


def test_only_the_state_stays_and_a_resumed_trainer_fetches_the_rest(machine: Machine) -> None:
    """Before a checkpoint is written no other one has files on the disk; each of the kept ones can be fetched."""
    for step in (2, 4, 6):
        held = [path for path in files_below(machine.root) if not path.endswith(STATE_FILE)]
        assert held == [], "files of an earlier checkpoint are on the disk"
        machine.commit(step, chapter=step, keep=2, files=FILES | {"engine/rank0.bin": b"%d" % step})
    assert files_below(machine.root) == ["step00000004/state.json", "step00000006/state.json"]
    for folder, found in checkpoint.committed(machine.root):
        machine.stored.complete(folder, found)
        verify_files(folder, found)
        assert (folder / "engine/rank0.bin").read_bytes() == b"%d" % found.step


def test_whatever_part_of_the_files_is_left_the_rest_is_fetched(machine: Machine) -> None:
    """A trainer that was killed while it removed or fetched files leaves any of them, and some under another name."""
    machine.commit(2, chapter=1, files=FILES)
    folder, found = machine.newest()
    for count in range(len(FILES) + 1):
        for left in itertools.combinations(FILES, count):
            (folder / "engine").mkdir(exist_ok=True)
            for path, data in FILES.items():
                (folder / path).unlink(missing_ok=True)
                if path in left:
                    (folder / path).write_bytes(data)
            (folder / "engine" / "rank1.bin.fetched.partial").write_bytes(b"oth")
            machine.stored.complete(folder, found)
            verify_files(folder, found)
    machine.copy(2)  # as when it is resumed
    assert files_below(machine.root) == [f"{STEP}/state.json"]


def _work(s3: S3Settings, folder: Path, run_id: str, point: str, *, resumes: bool) -> None:
    """Copy and remove a committed checkpoint, or resume it; killed at a point."""
    crash_points.arm(point)
    killed = Machine(folder, Blobs(s3), run_id, keeps_local=False)
    if resumes:
        killed.stored.complete(*killed.newest())
    else:
        killed.copy(2)
    os._exit(0)


def test_killed_after_each_file_that_is_removed_or_fetched_nothing_is_lost(
    tmp_path: Path, machine: Machine, s3_settings: S3Settings, run_id: str
) -> None:
    """SIGKILL after the first, the second … file; the next session finds the whole checkpoint, and one state."""
    processes = get_context("fork")
    machine.write(2, chapter=1, files=FILES)
    folder, found = machine.newest()
    for point, resumes in ((CrashPoint.REMOVING, False), (CrashPoint.FETCHED, True)):
        for times in range(1, len(FILES)):
            (machine.stored.complete if point is CrashPoint.REMOVING else _remove)(folder, found)
            arguments = (s3_settings, tmp_path / "here", run_id, f"{point}:{times}")
            process = processes.Process(target=_work, args=arguments, kwargs={"resumes": resumes})
            process.start()
            process.join(60.0)
            assert process.exitcode == -signal.SIGKILL, (point, times)
            if point is CrashPoint.REMOVING:
                assert len(missing_files(folder, found)) == times
            machine.stored.complete(folder, found)
            verify_files(folder, found)


def _remove(folder: Path, found: checkpoint.CheckpointState) -> None:
    for path in found.files:
        (folder / path).unlink()


class AlteringStore(Blobs):
    """An object store that acknowledges a file and keeps something else."""

    alters: Callable[[bytes], bytes] | None = None

    def put_file(self, key: str, path: Path) -> BlobRef:
        sent = super().put_file(key, path)
        if self.alters is not None and path.name == "rank1.bin":
            self.put(key, self.alters(path.read_bytes()))
        return sent


@pytest.mark.parametrize(
    "alters",
    [
        pytest.param(lambda data: data[:3] + b"!" + data[4:], id="another byte"),
        pytest.param(lambda data: data[:-1], id="cut off"),
        pytest.param(lambda data: data + b"!", id="longer"),
    ],
)
def test_a_copy_that_is_not_what_was_sent_keeps_the_files_here(
    tmp_path: Path, s3_settings: S3Settings, blobs: Blobs, run_id: str, alters: Callable[[bytes], bytes]
) -> None:
    """Read back, it is found before ``state.json`` is stored; the next start sends the file again."""
    store = AlteringStore(s3_settings)
    machine = Machine(tmp_path / "here", store, run_id, keeps_local=False)
    machine.write(2, chapter=1, files=FILES)
    store.alters = alters
    key = blob_keys.checkpoint_file(run_id, 1, hashlib.sha256(b"other weights").hexdigest())
    with pytest.raises(CheckpointError, match=f"the object store does not return what it was sent: {key}"):
        machine.copy(2)
    verify_files(*machine.newest())
    assert not any(one == key or one.endswith(STATE_FILE) for one in objects(blobs, run_id))
    store.alters = None
    machine.copy(2)
    assert files_below(machine.root) == [f"{STEP}/state.json"]
    machine.stored.complete(*machine.newest())
    verify_files(*machine.newest())


def test_a_copy_that_was_altered_later_is_found_before_the_files_are_removed(
    machine: Machine, blobs: Blobs, run_id: str
) -> None:
    """A session that resumes a whole folder reads the copy that an earlier one made; then it is sent again."""
    machine.write(2, chapter=1, files=FILES)
    machine.stored.store(machine.root / STEP)
    key = blob_keys.checkpoint_file(run_id, 1, hashlib.sha256(b"other weights").hexdigest())
    blobs.put(key, b"other weightS")
    later = Machine.__new__(Machine)
    later.__dict__ |= machine.__dict__ | {
        "stored": type(machine.stored)(blobs, run_id, root=machine.root, metrics=machine.metrics, keeps_local=False)
    }
    with pytest.raises(CheckpointError, match="the object store does not return what it was sent"):
        later.copy(2)
    verify_files(*machine.newest())
    later.copy(2)
    assert files_below(machine.root) == [f"{STEP}/state.json"]


def test_files_are_removed_only_while_the_lease_is_held_and_the_state_is_the_named_one(machine: Machine) -> None:
    machine.write(2, chapter=1, files=FILES)
    folder = machine.root / STEP
    machine.stored.store(folder)

    def refuse() -> None:
        raise LeaseLost("another trainer holds the run")

    machine.stored.mark_named(folder, (folder / STATE_FILE).read_bytes())
    with pytest.raises(LeaseLost):
        machine.stored.remove_local(refuse)
    verify_files(*machine.newest())
    machine.write(2, chapter=2, epoch=2, files=FILES)
    machine.stored.remove_local(lambda: None)
    verify_files(*machine.newest())


def test_the_same_weights_are_written_anew_where_their_files_are_not_here(
    machine: Machine, blobs: Blobs, run_id: str
) -> None:
    """What NATS does not name yet is whole on the disk; the object store gets only what it lacks."""
    machine.commit(2, chapter=1, files=FILES)
    before = objects(blobs, run_id)
    later = state(2, run_id, chapter=2, weights="c")
    assert not checkpoint.has_weights_of(machine.root, later)
    machine.write(2, chapter=2, files=FILES)
    verify_files(*machine.newest())
    assert checkpoint.has_weights_of(machine.root, state(2, run_id, chapter=3, weights="c"))
    machine.copy(2)
    assert {one for one in objects(blobs, run_id) if "/files/" in one} == {one for one in before if "/files/" in one}


def test_a_replay_fetches_into_a_folder_of_its_own(tmp_path: Path, machine: Machine) -> None:
    """The run's folder stays as it is; a checkpoint that is whole is read where it is."""
    machine.write(2, chapter=1, files=FILES)
    blobs = machine.stored._blobs
    (scratch := tmp_path / "scratch").mkdir()
    assert complete_copy(blobs, *machine.newest(), scratch) == machine.root / STEP
    machine.copy(2)
    copy = complete_copy(blobs, *machine.newest(), scratch)
    assert copy == scratch / STEP
    verify_files(copy, read_state(copy))
    assert files_below(machine.root) == [f"{STEP}/state.json"]


def test_files_that_are_nowhere_are_named(tmp_path: Path, machine: Machine, blobs: Blobs, run_id: str) -> None:
    """An object that is missing or altered, and a checkpoint of which the object store has no copy."""
    machine.commit(2, chapter=1, files=FILES)
    folder, found = machine.newest()
    key = blob_keys.checkpoint_file(run_id, 1, found.files["engine/rank1.bin"])
    blobs.put(key, b"other weightS")
    with pytest.raises(BlobCorrupt, match=key):
        machine.stored.complete(folder, found)
    blobs.delete([key])
    with pytest.raises(BlobError, match=f"{key} is missing in the object store: the stored checkpoint of step 2"):
        machine.stored.complete(folder, found)
    assert not (folder / "engine" / "rank1.bin").exists()
    blobs.delete(objects(blobs, run_id))
    machine.stored.complete(folder, found)
    with pytest.raises(CheckpointError, match=r"engine/rank1\.bin: missing"):
        verify_files(folder, found)
    with pytest.raises(CheckpointError, match=r"engine/rank1\.bin: missing"):
        verify_files(complete_copy(blobs, folder, found, tmp_path), found)


@pytest.mark.parametrize("name", ["../../stolen", "/stolen", "engine/../../stolen", "link/stolen"])
def test_a_state_that_names_a_file_elsewhere_is_refused(machine: Machine, tmp_path: Path, name: str) -> None:
    """Nothing is fetched to a place outside of the checkpoint's folder, and nothing is removed there."""
    machine.write(2, chapter=1, files=FILES)
    folder, found = machine.newest()
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    name = str(tmp_path / "elsewhere" / "stolen") if name == "/stolen" else name
    forged = found.model_copy(update={"files": {name: found.files["random.bin"]}}).model_dump_json().encode()
    (folder / STATE_FILE).write_bytes(forged)
    target = folder / name
    machine.stored._blobs.put(
        blob_keys.checkpoint_file(machine.run_id, 1, found.files["random.bin"]), FILES["random.bin"]
    )
    machine.stored._blobs.put(blob_keys.checkpoint_state(machine.run_id, 1, hashlib.sha256(forged).hexdigest()), forged)
    with pytest.raises(CheckpointError, match="which is not in that folder"):
        machine.stored.complete(*machine.newest())
    assert not target.exists()
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(b"mine")
    machine.stored.mark_named(folder, forged)
    with pytest.raises(CheckpointError, match="which is not in that folder"):
        machine.stored.remove_local(lambda: None)
    assert target.read_bytes() == b"mine"
