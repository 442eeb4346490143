"""The streams and buckets of a run are created once, updated in place, and deleted together."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.console.command import server_arguments
from tests.groups import make_task_issued
from tests.servers import secret_file, wait_for

from penstock.console.cli.main import run
from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.processes.servers import NatsServer
from penstock.protocol import streams, subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.errors import BusError, MissingStream
from penstock.protocol.streams import StreamLimits, StreamSpec
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus


def test_a_bootstrap_can_be_repeated_without_harm(bus: Bus, blobs: Blobs, run_id: str) -> None:
    """A second bootstrap changes nothing and keeps published messages."""
    bootstrap(bus, blobs, run_id)
    bus.publish(subjects.tasks(run_id, "train"), make_task_issued(run_id), msg_id="1").wait()
    bootstrap(bus, blobs, run_id)
    assert bus.stream_state(f"{run_id}-tasks").wait().num_messages == 1
    for spec in streams.consumers(run_id):
        assert bus.consumer_state(spec).wait().num_ack_pending == 0
    for bucket in streams.buckets(run_id):
        assert bus.key_value(bucket.bucket).wait().bucket == bucket.bucket


def test_limits_can_be_changed_later(bus: Bus, blobs: Blobs, run_id: str) -> None:
    bootstrap(bus, blobs, run_id, StreamLimits(max_tasks=1))
    bus.publish(subjects.tasks(run_id, "train"), make_task_issued(run_id), msg_id="1").wait()
    bootstrap(bus, blobs, run_id, StreamLimits(max_tasks=2, ack_wait_s=5.0))
    bus.publish(subjects.tasks(run_id, "train"), make_task_issued(run_id, "p1"), msg_id="2").wait()
    assert bus.stream_state(f"{run_id}-tasks").wait().num_messages == 2


def test_a_work_queue_takes_only_subjects_that_are_read(bus: Bus, blobs: Blobs, run_id: str) -> None:
    """A message that no consumer would read is refused; those of an older stream are removed, the others stay."""
    wide = StreamSpec(f"{run_id}-tasks", (subjects.tasks(run_id),), "workqueue", 100, 10_000_000)
    bus.ensure_stream(wide).wait()
    for split in ("train", "TRAIN", "other"):
        bus.publish(subjects.tasks(run_id, split), make_task_issued(run_id), msg_id=split).wait()
    bootstrap(bus, blobs, run_id)
    assert bus.stream_state(f"{run_id}-tasks").wait().num_messages == 1
    tasks = streams.tasks_consumer(run_id, "train")
    wait_for(lambda: bus.consumer_state(tasks).wait().num_pending == 1, "the task that is kept")
    refused = [
        bus.publish(subject(run_id, split), make_task_issued(run_id), msg_id="n", deadline_s=5.0)
        for subject in (subjects.tasks, subjects.generated, subjects.scored)
        for split in ("other", "TRAIN", "train.x")
    ]
    for pending in refused:
        with pytest.raises(MissingStream):
            pending.wait()


def test_a_deleted_run_is_gone_and_others_stay(bus: Bus, blobs: Blobs, run_id: str) -> None:
    """Deleting takes all streams and buckets of one run, nothing of a run whose name starts the same."""
    bootstrap(bus, blobs, run_id)
    bootstrap(bus, blobs, f"{run_id}-b")
    assert delete_run(bus, run_id) == len(streams.stream_names(run_id)) + len(streams.run_buckets(run_id))
    assert delete_run(bus, run_id) == 0
    left = set(bus.stream_names().wait())
    assert not left & set(streams.stream_names(run_id))
    assert set(streams.stream_names(f"{run_id}-b")) <= left


def test_the_command_creates_and_deletes(
    bus: Bus, run_id: str, nats_settings: NatsSettings, s3_settings: S3Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    where = server_arguments(nats_settings, s3_settings)
    assert run(["bootstrap", "--run", run_id, *where]) == 0
    assert f"run {run_id} is ready" in capsys.readouterr().out
    assert run(["bootstrap", "--run", run_id, "--delete", *where]) == 1
    assert "nothing was deleted" in capsys.readouterr().err
    assert bus.stream_state(f"{run_id}-tasks").wait().num_messages == 0
    assert run(["bootstrap", "--run", run_id, "--delete", "--yes", *where]) == 0
    assert f"streams of run {run_id} were deleted" in capsys.readouterr().out


def test_the_command_reports_errors_in_one_line(
    run_id: str, nats_settings: NatsSettings, s3_settings: S3Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unknown keys, bad ids and wrong credentials end with exit code 1 and one line of text."""
    where = server_arguments(nats_settings, s3_settings)
    for extra, text in (
        (["--run", run_id, *where, "nats.ulr=x"], "did you mean nats.url?"),
        (["--run", "A.B", *where], "run id 'A.B'"),
        (["--run", run_id, *where, f"nats.password_file={secret_file('wrong')}"], "refused user penstock"),
    ):
        assert run(["bootstrap", *extra]) == 1
        assert text in capsys.readouterr().err


def test_a_server_without_space_is_an_error_that_names_the_stream(tmp_path: Path, blobs: Blobs, run_id: str):
    """At the quota the error names the stream, its size and the fix; with space freed, smaller streams are created."""
    server = NatsServer(tmp_path / "nats", log=tmp_path / "nats.log", max_store_gb=1)
    server.start()
    try:
        with Bus.connect(server.settings, name="test") as bus:
            with pytest.raises(
                BusError, match=r"stream .*, which reserves 537 MB: .*its storage is full: .*penstock runs rm"
            ):
                bootstrap(bus, blobs, run_id)
            delete_run(bus, run_id)
            bootstrap(bus, blobs, run_id, StreamLimits(max_bytes=10_000_000))
            assert set(streams.stream_names(run_id)) <= set(bus.stream_names().wait())
    finally:
        server.stop()


def test_the_command_takes_the_run_from_its_run_file(
    bus: Bus,
    run_id: str,
    nats_settings: NatsSettings,
    s3_settings: S3Settings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`penstock bootstrap run.toml` needs no other name; without any name nothing is created."""
    where = server_arguments(nats_settings, s3_settings)
    assert run(["bootstrap", *where]) == 1
    assert "no run was named; give its run file, or run.id=NAME" in capsys.readouterr().err
    (tmp_path / "run.toml").write_text(f'run.id = "{run_id}"\n')
    assert run(["bootstrap", str(tmp_path / "run.toml"), *where]) == 0
    assert bus.stream_state(f"{run_id}-tasks").wait().num_messages == 0
    delete_run(bus, run_id)
