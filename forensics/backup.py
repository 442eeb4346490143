"""`penstock runs backup` and `penstock runs restore`: a run's streams and objects as files of a folder, and back.

    backup.json                 what is saved, with sizes and hashes; written last
    streams/NAME.snapshot       a stream with its consumers, in the server's format
    objects/SHA256              an object, under the hash of its bytes

Objects never change, so a second backup into the same folder copies only those that are new.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from penstock import __version__
from penstock.console import connections
from penstock.console.tools.removal import RunIsActive, running_services
from penstock.deploy.bootstrap import ConnectionSettings, bootstrap
from penstock.protocol import blob_keys, files, logs, streams
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.errors import BlobError, ConfigError, MissingStream, PenstockError
from penstock.protocol.facts import decode
from penstock.protocol.files import json_value, read_regular
from penstock.protocol.groups import BlobRef, Sha256
from penstock.protocol.process_end import error_text
from penstock.protocol.record.lineage import CheckpointCommitted
from penstock.protocol.streams import StreamLimits
from penstock.protocol.subjects import check_run_id
from penstock.protocol.transport.blobs import Blobs, BlobStat
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.stream_admin import CHUNK_BYTES, Snapshot

CONTENTS = "backup.json"
_CHUNK_BYTES = 1024 * 1024
COPIES_AT_ONCE = 8
_CONNECT_S = 10.0
_REPORT_EVERY_S = 5.0
Report = Callable[[str], None]


class BackupBroken(PenstockError):
    """A file of a backup is missing or altered."""


class SavedStream(BaseModel):
    """One stream or key-value bucket; ``config`` and ``state`` are the server's words."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    config: dict[str, Any]
    state: dict[str, Any]
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Sha256


class SavedRun(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["penstock_backup.v1"] = "penstock_backup.v1"
    run_id: str
    penstock: str  # version that made it
    made_at: str  # ISO 8601, UTC
    streams: tuple[SavedStream, ...]
    objects: tuple[BlobRef, ...]  # the sha256 of each is the name of its file

    @field_validator("run_id")
    @classmethod
    def _run_id(cls, value: str) -> str:
        return check_run_id(value)

    @property
    def num_bytes(self) -> int:
        return sum(part.size_bytes for part in (*self.streams, *self.objects))

    @property
    def num_messages(self) -> int:
        return sum(int(stream.state.get("messages", 0)) for stream in self.streams)


def saved_streams(run_id: str) -> tuple[str, ...]:
    """Return the streams that are saved, the state last: a restored run that has it is whole.

    Heartbeats and leases are not: they end within seconds.
    """
    kept = (streams.scoring_bucket(run_id), streams.state_bucket(run_id))
    return (*streams.stream_names(run_id), *(f"KV_{spec.bucket}" for spec in kept))


def stream_file(folder: Path, name: str) -> Path:
    return folder / "streams" / f"{name}.snapshot"


def object_file(folder: Path, sha256: str) -> Path:
    return folder / "objects" / sha256


def read_backup(folder: Path) -> SavedRun:
    """Read what a folder holds; raises ConfigError when it is no backup, or names what no run has."""
    try:
        data = read_regular(folder / CONTENTS)
    except OSError as err:
        raise ConfigError(
            f"{folder} is no whole backup: {CONTENTS} cannot be read ({err.strerror or err}); it is written last, so repeat the "
            "backup: penstock runs backup RUN --to FOLDER"
        ) from None
    try:
        backup = SavedRun.model_validate(json_value(data))
    except (ValueError, ValidationError) as err:
        raise ConfigError(f"{folder / CONTENTS} is not what penstock runs backup writes: {str(err)[:500]}") from None
    prefix = blob_keys.run_prefix(backup.run_id)
    named, expected = [stream.name for stream in backup.streams], saved_streams(backup.run_id)
    if named != [name for name in expected if name in named]:
        raise ConfigError(
            f"{folder / CONTENTS} names the streams {sorted(set(named))}; run {backup.run_id} has {', '.join(expected)}, in this order"
        )
    for stream in backup.streams:
        if stream.config.get("name") != stream.name:
            raise ConfigError(f"{folder / CONTENTS}: stream {stream.name} has the configuration of another stream")
    for saved in backup.objects:
        if not saved.key.startswith(prefix):
            raise ConfigError(f"{folder / CONTENTS}: {saved.key[:200]!r} is no object of run {backup.run_id}")
    return backup


def verified(path: Path, size_bytes: int, sha256: str) -> Path:
    """Return a file whose bytes are those that were saved; raises BackupBroken."""
    digest, size = hashlib.sha256(), 0
    try:
        for chunk in chunks(path, _CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    except OSError as err:
        raise BackupBroken(f"{path} cannot be read: {err.strerror or err}; the backup is not whole") from None
    if (size, digest.hexdigest()) != (size_bytes, sha256):
        raise BackupBroken(
            f"{path}: expected {size_bytes} bytes with sha256 {sha256[:12]}…, got {size} with {digest.hexdigest()[:12]}…; the "
            "file was altered"
        )
    return path


def chunks(path: Path, size: int) -> Iterator[bytes]:
    with files.open_regular(path) as file:
        while chunk := file.read(size):
            yield chunk


def save(run: str, bus: Bus, blobs: Blobs, folder: Path, report: Report) -> SavedRun:
    """Write a backup of a run; one into the same folder copies only new objects.

    ``report`` is called with a line about the progress.

    Raises:
        RunIsActive: A service of the run is running. Queues that are written to meanwhile would be from different moments.
        ConfigError: There is no such run, or the folder has the backup of another one.
        BusError, BlobError: A server is unreachable or refuses.
    """
    check_run_id(run)
    _require_stopped(run, bus)
    known = _known_objects(run, folder)
    (folder / "streams").mkdir(parents=True, exist_ok=True)
    (folder / "objects").mkdir(exist_ok=True)
    (folder / CONTENTS).unlink(missing_ok=True)  # until it is written again, the folder is no backup
    saved = [
        saved_stream for name in saved_streams(run) if (saved_stream := _save_stream(name, bus, folder)) is not None
    ]
    if f"{run}-events" not in [stream.name for stream in saved]:
        raise ConfigError(f"no run {run} at {bus.url}: it has no stream of events there; penstock runs lists the runs")
    report(f"{len(saved)} streams and buckets")
    objects = _save_objects(list(blobs.list(blob_keys.run_prefix(run))), known, blobs, folder, report)
    _require_stopped(run, bus)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    contents = SavedRun(run_id=run, penstock=__version__, made_at=now, streams=tuple(saved), objects=tuple(objects))
    files.atomic_write(folder / CONTENTS, contents.model_dump_json(indent=1))
    return contents


def inputs_of(saved: SavedRun, folder: Path) -> list[str]:
    """Return the rescored inputs that a run trained on: replay needs them, and their objects are separate."""
    settings = (
        stored for stored in saved.objects if stored.key.startswith(f"{blob_keys.lineage_prefix(saved.run_id)}config.")
    )
    read = (json_value(read_regular(object_file(folder, stored.sha256))) for stored in settings)
    return sorted({str(name) for document in read if (name := document.get("data", {}).get("from_run"))})


def checkpoint_elsewhere(saved: SavedRun, bus: Bus) -> int | None:
    entry = bus.key_value(streams.state_bucket(saved.run_id).bucket).wait().get(streams.CHECKPOINT_KEY).wait()
    if entry is None:
        return None
    newest = decode(entry.value, CheckpointCommitted)
    if newest.state_sha256 is None:
        return None
    stored = f"/{newest.state_sha256}/state.json"
    return None if any(stored_object.key.endswith(stored) for stored_object in saved.objects) else newest.step


def _require_stopped(run: str, bus: Bus) -> None:
    if services := running_services(run, bus):
        raise RunIsActive(
            f"services of run {run} are running: {', '.join(services)}; stop them first (Ctrl-C makes a checkpoint), and repeat "
            "this command"
        )


def _known_objects(run: str, folder: Path) -> dict[str, BlobRef]:
    if not (folder / CONTENTS).exists():
        if folder.is_dir() and any(entry.name not in {"streams", "objects"} for entry in folder.iterdir()):
            raise ConfigError(f"{folder} holds other files and no {CONTENTS}; name a new folder")
        return {}
    earlier = read_backup(folder)
    if earlier.run_id != run:
        raise ConfigError(f"{folder} is a backup of run {earlier.run_id}, not of {run}; name a new folder")
    there = {file.name: file.stat().st_size for file in (folder / "objects").iterdir()}
    return {known.key: known for known in earlier.objects if there.get(known.sha256) == known.size_bytes}


def _save_stream(name: str, bus: Bus, folder: Path) -> SavedStream | None:
    path, digest, size = stream_file(folder, name), hashlib.sha256(), 0
    with path.open("wb") as file:

        def write(chunk: bytes) -> None:
            nonlocal size
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)

        try:
            snapshot = bus.save_stream(name, write).wait()
        except MissingStream:
            path.unlink()
            return None
    config, state = snapshot.config, snapshot.state
    return SavedStream(name=name, config=config, state=state, size_bytes=size, sha256=digest.hexdigest())


def _save_objects(
    stats: list[BlobStat], known: dict[str, BlobRef], blobs: Blobs, folder: Path, report: Report
) -> Iterable[BlobRef]:
    def copy(stat: BlobStat) -> BlobRef:
        if (same := known.get(stat.key)) is not None and same.size_bytes == stat.size_bytes:
            return same
        partial = folder / "objects" / f"partial.{hashlib.sha256(stat.key.encode()).hexdigest()}"
        ref = blobs.fetch_file(stat, partial)
        files.replace(partial, object_file(folder, ref.sha256))
        return ref

    saved = list[BlobRef]()
    with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
        for copied in pool.map(copy, stats):
            saved.append(copied)
            report(f"{len(saved)} of {len(stats)} objects")
    return saved


def restore(folder: Path, bus: Bus, blobs: Blobs, limits: StreamLimits, report: Report) -> SavedRun:
    """Restore a run: its objects, then its streams, its state last. Repeat it after an interruption.

    Every file is verified before anything is written.

    Raises:
        BackupBroken: A file of the backup is missing or altered.
        ConfigError: The folder is no backup, or the servers have this run.
        BusError, BlobError: A server is unreachable or refuses.
    """
    saved = read_backup(folder)
    _require_absent(saved, bus)
    for stream in saved.streams:
        verified(stream_file(folder, stream.name), stream.size_bytes, stream.sha256)
    for number, saved_object in enumerate(saved.objects, start=1):
        verified(object_file(folder, saved_object.sha256), saved_object.size_bytes, saved_object.sha256)
        report(f"{number} of {len(saved.objects)} objects verified")
    blobs.ensure_bucket()
    _restore_objects(saved, blobs, folder, report)
    for stream in saved.streams:
        bus.delete_stream(stream.name).wait()  # of an interrupted restore
        parts = chunks(stream_file(folder, stream.name), CHUNK_BYTES)
        bus.restore_stream(stream.name, Snapshot(stream.config, stream.state), parts).wait()
    bootstrap(bus, blobs, saved.run_id, limits)
    report(f"{len(saved.streams)} streams and buckets")
    return saved


def _require_absent(saved: SavedRun, bus: Bus) -> None:
    """Raise ConfigError when the servers have the run: its state is restored last, so one without it is not whole."""
    try:
        bus.stream_state(f"KV_{streams.state_bucket(saved.run_id).bucket}").wait()
    except MissingStream:
        return
    raise ConfigError(
        f"run {saved.run_id} is at {bus.url} already; nothing was changed. To replace it: penstock runs rm {saved.run_id}, then repeat "
        "this command"
    )


def _restore_objects(saved: SavedRun, blobs: Blobs, folder: Path, report: Report) -> None:
    there = {stat.key: stat.size_bytes for stat in blobs.list(blob_keys.run_prefix(saved.run_id))}
    for saved_object in saved.objects:
        if there.get(saved_object.key, saved_object.size_bytes) != saved_object.size_bytes:
            raise BlobError(
                f"{saved_object.key} is in bucket {blobs.bucket} with {there[saved_object.key]} bytes, in the backup with {saved_object.size_bytes}: it is "
                f"another run's. Remove it first: penstock runs rm {saved.run_id}"
            )

    missing = [saved_object for saved_object in saved.objects if saved_object.key not in there]
    with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
        copies = pool.map(lambda one: blobs.put_file(one.key, object_file(folder, one.sha256)), missing)
        for number, _ in enumerate(copies, start=1):
            report(f"{number} of {len(missing)} objects")


def backup_run(run: str, arguments: Sequence[str], folder: Path) -> int:
    return _explained(lambda: _backup(run, arguments, folder))


def restore_run(folder: Path, arguments: Sequence[str]) -> int:
    return _explained(lambda: _restore_backup(folder, arguments))


def _explained(work: Callable[[], int]) -> int:
    logs.configure("backup", level="error")
    try:
        return work()
    except OSError as err:
        print(error_text(f"penstock: {err}; nothing on the servers was changed"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("penstock: interrupted; repeat the command, it continues", file=sys.stderr)
        return 130


def _backup(run: str, arguments: Sequence[str], folder: Path) -> int:
    settings = connections.find(arguments, os.environ, run_id=run).settings
    with Bus.connect(settings.nats, name="backup", deadline_s=_CONNECT_S) as bus:
        saved = save(run, bus, Blobs(settings.s3), folder, _Progress())
        missing = checkpoint_elsewhere(saved, bus)
    print(f"saved run {run} in {folder}: {_described(saved)}")
    if missing is not None:
        print(
            f"the checkpoint of step {missing} is in the trainer's run folder only: copy that folder too (by default "
            f"runs/{run}), without its store/, or the restored run cannot be resumed, only audited and replayed"
        )
    for name in inputs_of(saved, folder):
        print(f"it trained on the groups of {name}: replay needs them too; back up or keep {name}")
    print(f"next, on the other servers: penstock runs restore {folder} nats.url=URL s3.endpoint=URL")
    return 0


def _restore_backup(folder: Path, arguments: Sequence[str]) -> int:
    files, overrides = split_arguments(arguments)
    settings = load(ConnectionSettings, files=files, overrides=overrides, environ=os.environ).settings
    with Bus.connect(settings.nats, name="restore", deadline_s=_CONNECT_S) as bus:
        saved = restore(folder, bus, Blobs(settings.s3), settings.retention.limits(), _Progress())
    print(
        f"restored run {saved.run_id}, saved {saved.made_at}, at {settings.nats.url} and "
        f"{settings.s3.endpoint}/{settings.s3.bucket}: {_described(saved)}"
    )
    print(f"next: penstock audit {saved.run_id}")
    return 0


def _described(saved: SavedRun) -> str:
    return (
        f"{len(saved.streams)} streams and buckets ({saved.num_messages} messages), {len(saved.objects)} objects, "
        f"{saved.num_bytes / 1e6:.1f} MB"
    )


class _Progress:
    def __init__(self) -> None:
        self._next = time.monotonic() + _REPORT_EVERY_S

    def __call__(self, text: str) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_EVERY_S
            print(text, file=sys.stderr)
