"""What was acknowledged is there after a power loss that drops all else: objects, messages and keys, checkpoints."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.deploy.processes.servers import S3Server
from penstock.protocol import streams, subjects
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.trainer.recovery import checkpoint
from tests import servers
from tests.groups import make_task, make_task_issued
from tests.power import Disk
from tests.trainer.recovery.test_checkpoint import state

_SIZES = (200, 14_000, 300_000)
_LARGE = 6_000_000  # more than one part of an upload


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.remove()


def test_a_file_that_was_not_synced_is_lost(disk: Disk) -> None:
    written = disk.folder / "written"
    (disk.folder / "partial").write_bytes(b"data" * 1000)
    (disk.folder / "partial").rename(written)
    disk.lose_power()
    with pytest.raises(OSError, match="Input/output error"):
        (disk.folder / "later").write_bytes(b"data")
    disk.start_again()
    assert not written.exists() or written.read_bytes() == b""


def test_acknowledged_objects_survive_a_power_loss(disk: Disk) -> None:
    """Objects of every size, in new folders and in one that was made before the store was durable."""
    (disk.folder / "s3" / "penstock" / "old").mkdir(parents=True)
    servers.require("rclone")
    server = S3Server(disk.folder / "s3", log=disk.folder / "s3.log")
    server.is_durable = True
    server.start()
    try:
        blobs = Blobs(server.settings)
        blobs.ensure_bucket()
        wanted = {}
        for folder in ("old", "new/er"):
            for number, size in enumerate((*_SIZES, _LARGE)):
                data = os.urandom(size)
                ref = blobs.put(f"{folder}/{number}", data)
                wanted[ref.key] = (ref, data)
        disk.lose_power()
        server.kill()
        disk.start_again()
        server.start()
        for ref, data in wanted.values():
            assert blobs.get(ref) == data, ref.key
    finally:
        server.kill()


def test_a_file_system_that_cannot_write_through_is_a_warning(tmp_path: Path) -> None:
    """The server starts all the same, and the log says what a power loss may cost, and what to do."""
    server = S3Server(tmp_path / "s3", log=tmp_path / "s3.log")
    server.store = Path("/proc/self")
    with capture_logs() as logs:
        server._write_through()
    assert [(log["log_level"], log["folder"]) for log in logs] == [("warning", "/proc/self")]
    assert "cannot write through; use ext4" in logs[0]["event"]


def test_acknowledged_messages_and_keys_survive_a_power_loss(disk: Disk) -> None:
    server = servers.start_nats(disk.folder, max_store_gb=0.2)
    try:
        with Bus.connect(server.settings, name="test") as bus:
            spec = streams.streams("r", streams.StreamLimits(max_bytes=20_000_000))[0]
            bus.ensure_stream(spec).wait()
            bus.ensure_bucket(streams.state_bucket("r")).wait()
            state = bus.key_value(streams.state_bucket("r").bucket).wait()

            def publish(number: int) -> bool:
                fact = make_task_issued("r", f"p{number}", [make_task(f"e0.p{number}.a0")])
                return bus.publish(subjects.tasks("r", "train"), fact, msg_id=f"p{number}").wait().duplicate

            for number in range(40):
                assert not publish(number)
            revision = state.put("head", b"value").wait()
            disk.lose_power()
            server.kill()
            disk.start_again()
            server.start()
            stored = bus.read_stream(spec.name).wait()
            assert [message.sequence for message in stored] == list(range(1, 41))
            assert publish(39), "the server still knows its message id"
            entry = state.get("head").wait()
            assert entry is not None
            assert (entry.value, entry.revision) == (b"value", revision)
    finally:
        server.kill()


def test_a_committed_checkpoint_survives_a_power_loss(disk: Disk) -> None:
    """The power is lost as soon as the commit has returned, for the first checkpoint and for a later one."""
    root = disk.folder / "runs" / "r" / "checkpoints"
    for step in (2, 4):
        data = os.urandom(300_000)

        def write(folder: Path, data: bytes = data) -> None:
            (folder / "engine").mkdir()
            (folder / "engine" / "weights.bin").write_bytes(data)

        checkpoint.commit(root, state(step, chapter=step), write, keep=2)
        disk.lose_power()
        disk.start_again()
        found = checkpoint.newest(root, "r")
        assert found is not None
        assert found[1].step == step
        assert found[1].files["engine/weights.bin"] == hashlib.sha256(data).hexdigest()
        assert (found[0] / "engine" / "weights.bin").read_bytes() == data
