"""Copy a run's streams and objects into a folder, while no service of the run is running."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from penstock import __version__
from penstock.console.tools.removal import RunIsActive, running_services
from penstock.forensics.backup import saved_run
from penstock.forensics.backup.saved_run import SavedObject, SavedRun, SavedStream
from penstock.protocol import blob_keys, files, streams
from penstock.protocol.errors import ConfigError, MissingStream
from penstock.protocol.facts import decode
from penstock.protocol.record.lineage import CheckpointCommitted
from penstock.protocol.subjects import check_run_id
from penstock.protocol.transport.blobs import Blobs, BlobStat
from penstock.protocol.transport.bus import Bus

COPIES_AT_ONCE = 8

Report = Callable[[str], None]


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
    (folder / saved_run.CONTENTS).unlink(missing_ok=True)  # until it is written again, the folder is no backup
    saved = [found for name in saved_run.names(run) if (found := _save_stream(name, bus, folder)) is not None]
    if f"{run}-events" not in [one.name for one in saved]:
        raise ConfigError(f"no run {run} at {bus.url}: it has no stream of events there; penstock runs lists the runs")
    report(f"{len(saved)} streams and buckets")
    objects = _save_objects(list(blobs.list(blob_keys.run_prefix(run))), known, blobs, folder, report)
    _require_stopped(run, bus)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    contents = SavedRun(run_id=run, penstock=__version__, made_at=now, streams=tuple(saved), objects=tuple(objects))
    files.atomic_write(folder / saved_run.CONTENTS, contents.model_dump_json(indent=1))
    return contents


def inputs_of(saved: SavedRun, folder: Path) -> list[str]:
    """Return the rescored inputs that a run trained on: replay needs them, and their objects are their own."""
    settings = (one for one in saved.objects if one.key.startswith(f"{blob_keys.lineage_prefix(saved.run_id)}config."))
    read = (json.loads(saved_run.object_file(folder, one.sha256).read_bytes()) for one in settings)
    return sorted({name for one in read if (name := one.get("data", {}).get("from_run"))})


def checkpoint_elsewhere(saved: SavedRun, bus: Bus) -> int | None:
    """Return the step of the newest checkpoint if its files are only in the trainer's run folder; None if they are saved."""
    entry = bus.key_value(streams.state_bucket(saved.run_id).bucket).wait().get(streams.CHECKPOINT_KEY).wait()
    if entry is None:
        return None
    newest = decode(entry.value, CheckpointCommitted)
    if newest.state_sha256 is None:
        return None
    stored = f"/{newest.state_sha256}/state.json"
    return None if any(one.key.endswith(stored) for one in saved.objects) else newest.step


def _require_stopped(run: str, bus: Bus) -> None:
    if services := running_services(run, bus):
        raise RunIsActive(
            f"services of run {run} are running: {', '.join(services)}; stop them first (Ctrl-C makes a checkpoint), and repeat "
            "this command"
        )


def _known_objects(run: str, folder: Path) -> dict[str, SavedObject]:
    """Return the objects of an earlier backup in this folder whose files are there; raises ConfigError for another run's."""
    if not (folder / saved_run.CONTENTS).exists():
        if folder.is_dir() and any(one.name not in {"streams", "objects"} for one in folder.iterdir()):
            raise ConfigError(f"{folder} holds other files and no {saved_run.CONTENTS}; name a new folder")
        return {}
    earlier = saved_run.read(folder)
    if earlier.run_id != run:
        raise ConfigError(f"{folder} is a backup of run {earlier.run_id}, not of {run}; name a new folder")
    there = {one.name: one.stat().st_size for one in (folder / "objects").iterdir()}
    return {one.key: one for one in earlier.objects if there.get(one.sha256) == one.size_bytes}


def _save_stream(name: str, bus: Bus, folder: Path) -> SavedStream | None:
    """Save one stream; None when there is none, as after the end of a bucket."""
    path, digest, size = saved_run.stream_file(folder, name), hashlib.sha256(), 0
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
    found: list[BlobStat], known: dict[str, SavedObject], blobs: Blobs, folder: Path, report: Report
) -> Iterable[SavedObject]:
    def copy(stat: BlobStat) -> SavedObject:
        if (same := known.get(stat.key)) is not None and same.size_bytes == stat.size_bytes:
            return same
        partial = folder / "objects" / f"partial.{hashlib.sha256(stat.key.encode()).hexdigest()}"
        ref = blobs.fetch_file(stat, partial)
        files.replace(partial, saved_run.object_file(folder, ref.sha256))
        return SavedObject(key=ref.key, size_bytes=ref.size_bytes, sha256=ref.sha256)

    saved = list[SavedObject]()
    with ThreadPoolExecutor(COPIES_AT_ONCE) as pool:
        for one in pool.map(copy, found):
            saved.append(one)
            report(f"{len(saved)} of {len(found)} objects")
    return saved
