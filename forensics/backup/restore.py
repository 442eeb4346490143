"""Make a run again from a backup, on servers that do not have it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.deploy.bootstrap import bootstrap
from penstock.forensics.backup import saved_run
from penstock.forensics.backup.save import COPIES_AT_ONCE, Report
from penstock.forensics.backup.saved_run import SavedObject, SavedRun
from penstock.protocol import blob_keys, streams
from penstock.protocol.errors import BlobError, ConfigError, MissingStream
from penstock.protocol.streams import StreamLimits
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.stream_admin import CHUNK_BYTES, Snapshot


def restore(folder: Path, bus: Bus, blobs: Blobs, limits: StreamLimits, report: Report) -> SavedRun:
    """Restore a run: its objects, then its streams, its state last. Repeat it after an interruption.

    Every file is verified before anything is written.

    Raises:
        BackupBroken: A file of the backup is missing or altered.
        ConfigError: The folder is no backup, or the servers have this run.
        BusError, BlobError: A server is unreachable or refuses.
    """
    saved = saved_run.read(folder)
    _require_absent(saved, bus)
    for stream in saved.streams:
        saved_run.verified(saved_run.stream_file(folder, stream.name), stream.size_bytes, stream.sha256)
    for number, one in enumerate(saved.objects, start=1):
        saved_run.verified(saved_run.object_file(folder, one.sha256), one.size_bytes, one.sha256)
        report(f"{number} of {len(saved.objects)} objects verified")
    blobs.ensure_bucket()
    _restore_objects(saved, blobs, folder, report)
    for stream in saved.streams:
        bus.delete_stream(stream.name).wait()  # of an interrupted restore
        chunks = saved_run.chunks(saved_run.stream_file(folder, stream.name), CHUNK_BYTES)
        bus.restore_stream(stream.name, Snapshot(stream.config, stream.state), chunks).wait()
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
    for one in saved.objects:
        if there.get(one.key, one.size_bytes) != one.size_bytes:
            raise BlobError(
                f"{one.key} is in bucket {blobs.bucket} with {there[one.key]} bytes, in the backup with {one.size_bytes}: it is "
                f"another run's. Remove it first: penstock runs rm {saved.run_id}"
            )

    def copy(one: SavedObject) -> None:
        blobs.put_file(one.key, saved_run.object_file(folder, one.sha256))

    missing = [one for one in saved.objects if one.key not in there]
    with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
        for number, _ in enumerate(pool.map(copy, missing), start=1):
            report(f"{number} of {len(missing)} objects")
