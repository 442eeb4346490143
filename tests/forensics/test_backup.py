"""`penstock runs backup` and `restore`: on other servers a run has the same messages, consumers, keys and objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.console.command import penstock, server_arguments
from tests.servers import wait_for

from penstock.console.tools.removal import RunIsActive, running_services
from penstock.deploy.bootstrap import delete_run
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.forensics import backup
from penstock.forensics.backup import BackupBroken, SavedRun, restore, save
from penstock.protocol import heartbeats, streams, subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.errors import BlobError, BusRefused, ConfigError
from penstock.protocol.facts import Heartbeat, RunEvent, encode
from penstock.protocol.streams import ConsumerSpec, StreamLimits
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus


def quiet(_: str) -> None:
    """Report no progress."""


def event(run: str, number: int) -> RunEvent:
    return RunEvent(run_id=run, source="trainer", kind="log", at=float(number))


@pytest.fixture
def run(bus: Bus, blobs: Blobs, nats_settings: NatsSettings, run_streams: str) -> str:
    """A run with events, of which the first is gone; tasks of which one is acknowledged and one held; keys; objects."""
    for number in range(5):
        bus.publish(subjects.events(run_streams, "log"), event(run_streams, number), msg_id=f"e{number}").wait()
        bus.publish(subjects.tasks(run_streams, "train"), event(run_streams, number), msg_id=f"t{number}").wait()
    with Bus.connect(nats_settings, name="worker") as worker:  # which exits with a message
        inbox = worker.inbox(streams.tasks_consumer(run_streams, "train"), RunEvent).wait()
        first, second = inbox.fetch(2, wait_s=5.0).wait()
        first.ack().wait()
        assert second.fact.at == 1.0
    state = bus.key_value(streams.state_bucket(run_streams).bucket).wait()
    for value in (b"1", b"2"):
        state.put("head", value).wait()
    state.put("lease", b"mine").wait()
    for number in range(12):
        blobs.put(f"runs/{run_streams}/groups/v00000000/{number}.parquet", b"pack %d" % (number % 7))
    return run_streams


@pytest.fixture
def elsewhere(own_nats: Callable[[], NatsServer], own_s3: Callable[[], S3Server]) -> Iterator[tuple[Bus, Blobs]]:
    with Bus.connect(own_nats().settings, name="elsewhere") as bus:
        yield bus, Blobs(own_s3().settings)


def messages(bus: Bus, run: str) -> dict[str, list[tuple[int, str, bytes, str]]]:
    """Everything that is stored, with its number and time."""
    return {
        name: [(one.sequence, one.subject, one.data, one.at.isoformat()) for one in bus.read_stream(name).wait()]
        for name in backup.saved_streams(run)
    }


def undelivered(bus: Bus, spec: ConsumerSpec) -> int:
    """How many messages a consumer has yet to acknowledge; the server counts them some time after it stored them."""
    state = bus.consumer_state(spec).wait()
    return state.num_pending + state.num_ack_pending


def test_a_run_is_the_same_on_other_servers(
    bus: Bus, blobs: Blobs, run: str, elsewhere: tuple[Bus, Blobs], tmp_path: Path
) -> None:
    """Numbers and times of messages, revisions of keys, what each consumer has yet to deliver, and all objects."""
    there, objects = elsewhere
    saved = save(run, bus, blobs, tmp_path / "backup", quiet)
    restored = restore(tmp_path / "backup", there, objects, StreamLimits(), quiet)
    assert restored == saved
    assert messages(there, run) == messages(bus, run)
    for spec in streams.consumers(run):
        wait_for(
            lambda spec=spec: undelivered(there, spec) == undelivered(bus, spec), f"what {spec.durable} has yet to read"
        )
    inbox = there.inbox(streams.tasks_consumer(run, "train"), RunEvent).wait()
    got = [one.fact.at for one in inbox.fetch(10, wait_s=15.0).wait()]
    assert got
    assert 0.0 not in got  # it was acknowledged before
    head = there.key_value(streams.state_bucket(run).bucket).wait().get("head").wait()
    assert head is not None
    assert (head.value, head.revision) == (b"2", 2)
    assert {stat.key: objects.get_unverified(stat.key) for stat in objects.list(f"runs/{run}/")} == {
        stat.key: blobs.get_unverified(stat.key) for stat in blobs.list(f"runs/{run}/")
    }
    with pytest.raises(ConfigError, match=rf"run {run} is at .* already; nothing was changed.*penstock runs rm {run}"):
        restore(tmp_path / "backup", there, objects, StreamLimits(), quiet)


def test_an_interrupted_restore_is_continued(
    bus: Bus, blobs: Blobs, run: str, elsewhere: tuple[Bus, Blobs], tmp_path: Path
) -> None:
    """What an earlier try left is replaced, streams that services could have written to included."""
    there, objects = elsewhere
    save(run, bus, blobs, tmp_path / "backup", quiet)
    first = backup.read_backup(tmp_path / "backup").objects[0]
    objects.ensure_bucket()
    objects.put_file(first.key, backup.object_file(tmp_path / "backup", first.sha256))
    there.ensure_stream(streams.streams(run)[0]).wait()
    with pytest.raises(BusRefused, match="stream name already in use"):
        there.restore_stream(f"{run}-tasks", bus.save_stream(f"{run}-tasks", lambda _: None).wait(), []).wait()
    restore(tmp_path / "backup", there, objects, StreamLimits(), quiet)
    assert messages(there, run) == messages(bus, run)


def test_a_second_backup_copies_only_what_is_new(bus: Bus, blobs: Blobs, run: str, tmp_path: Path) -> None:
    """Objects never change: their files are written once."""
    save(run, bus, blobs, tmp_path, quiet)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "objects").iterdir()}
    assert len(times) == 7  # equal objects are one file
    blobs.put(f"runs/{run}/groups/v00000001/new.parquet", b"new")
    again = save(run, bus, blobs, tmp_path, quiet)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "objects").iterdir()}
    assert len(again.objects) == 13
    assert {name: at for name, at in after.items() if name in times} == times
    assert len(after) == 8


def test_a_running_run_is_not_saved(bus: Bus, blobs: Blobs, run: str, tmp_path: Path) -> None:
    """A heartbeat prevents it; nothing that looks like a backup is left."""
    beat = Heartbeat(role="trainer", service_id="trainer-7", at=0.0, state="training")
    live = bus.key_value(streams.live_bucket(run).bucket).wait()
    live.put(streams.heartbeat_key("trainer", "trainer-7"), encode(beat)).wait()
    assert running_services(run, bus)
    with pytest.raises(RunIsActive, match="trainer-7; stop them first"):
        save(run, bus, blobs, tmp_path / "backup", quiet)
    assert not (tmp_path / "backup").exists()


def test_a_run_whose_services_have_just_exited_is_saved(bus: Bus, blobs: Blobs, run: str, tmp_path: Path) -> None:
    beat = Heartbeat(role="trainer", service_id="trainer-7", at=0.0, state=heartbeats.EXITED)
    live = bus.key_value(streams.live_bucket(run).bucket).wait()
    live.put(streams.heartbeat_key("trainer", "trainer-7"), encode(beat)).wait()
    assert running_services(run, bus) == []
    save(run, bus, blobs, tmp_path / "backup", quiet)


def _alter_object(folder: Path, saved: SavedRun) -> None:
    path = backup.object_file(folder, saved.objects[3].sha256)
    path.write_bytes(path.read_bytes()[::-1])


def _remove_object(folder: Path, saved: SavedRun) -> None:
    backup.object_file(folder, saved.objects[3].sha256).unlink()


def _cut_stream(folder: Path, saved: SavedRun) -> None:
    path = backup.stream_file(folder, saved.streams[0].name)
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [_alter_object, _remove_object, _cut_stream])
def test_a_damaged_backup_is_refused_before_anything_is_written(
    damage: Callable[[Path, SavedRun], None], bus: Bus, blobs: Blobs, run: str, tmp_path: Path
) -> None:
    saved = save(run, bus, blobs, tmp_path, quiet)
    delete_run(bus, run)
    blobs.delete([one.key for one in saved.objects])
    damage(tmp_path, saved)
    with pytest.raises(BackupBroken, match=r"was altered|not whole"):
        restore(tmp_path, bus, blobs, StreamLimits(), quiet)
    assert not [name for name in bus.stream_names().wait() if run in name]
    assert not list(blobs.list(f"runs/{run}/"))


def test_another_runs_object_is_not_overwritten(bus: Bus, blobs: Blobs, run: str, tmp_path: Path) -> None:
    """An object under the same key with other bytes is somebody's; the error says what to do."""
    saved = save(run, bus, blobs, tmp_path, quiet)
    delete_run(bus, run)
    blobs.delete([one.key for one in saved.objects])
    blobs.put(saved.objects[0].key, b"of another")
    with pytest.raises(BlobError, match=rf"with 10 bytes, in the backup with 6.*penstock runs rm {run}"):
        restore(tmp_path, bus, blobs, StreamLimits(), quiet)
    assert blobs.get_unverified(saved.objects[0].key) == b"of another"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("objects", 0, "key"), "runs/other/groups/x", "is no object of run"),
        (("objects", 0, "sha256"), "../../etc/passwd", "sha256"),
        (("streams", 0, "name"), "KV_penstock-secrets", "names the streams"),
        (("streams", 0, "config", "name"), "KV_penstock-secrets", "has the configuration of another stream"),
        (("run_id",), "../x", "run id"),
        (("more",), 1, "more"),
    ],
)
def test_a_backup_that_somebody_wrote_is_refused(
    path: tuple[str | int, ...], value: object, message: str, bus: Bus, blobs: Blobs, run: str, tmp_path: Path
) -> None:
    """It can name no other stream, object or file than the run's own."""
    save(run, bus, blobs, tmp_path, quiet)
    contents = json.loads((tmp_path / backup.CONTENTS).read_text())
    part = contents
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    (tmp_path / backup.CONTENTS).write_text(json.dumps(contents))
    with pytest.raises(ConfigError, match=message):
        backup.read_backup(tmp_path)


def test_the_commands_say_what_to_type_next(
    bus: Bus, nats_settings: NatsSettings, s3_settings: S3Settings, run: str, tmp_path: Path
) -> None:
    typed = server_arguments(nats_settings, s3_settings)
    saved = penstock("runs", "backup", run, "--to", "backup", *typed, cwd=tmp_path, code=0)
    assert f"saved run {run} in backup: 8 streams and buckets" in saved.stdout
    assert "next, on the other servers: penstock runs restore backup" in saved.stdout
    refused = penstock("runs", "backup", run, "--to", ".", *typed, cwd=tmp_path, code=1)
    assert "holds other files" in refused.stderr
    delete_run(bus, run)
    restored = penstock("runs", "restore", "backup", *typed, cwd=tmp_path, code=0)
    assert f"next: penstock audit {run}" in restored.stdout
