"""`penstock runs rm` and `clean`: remove what a run has in the object store, on NATS and on this machine, in `/dev/shm` where its workers were killed.

Buckets and streams are removed first, then the objects, the stream of events last. NATS refuses the first step to a login
that may not delete, before an object is gone: the object store's key is often shared by all logins. After an interruption
the run is still listed, and the same command continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich import filesize

from penstock.console import connections
from penstock.console.connections import NamedRun
from penstock.console.report import curves
from penstock.console.report.event_fields import number, read_object
from penstock.console.terminal import one_line
from penstock.console.tools import runs
from penstock.protocol import blob_keys, heartbeats, logs, streams
from penstock.protocol.errors import BusRefused, ConfigError, MissingStream, PenstockError, WireError
from penstock.protocol.facts import Heartbeat, decode
from penstock.protocol.record import run_folder
from penstock.protocol.record.stored_record import users_of_input
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry
from penstock.protocol.weights.shared_segments import SharedSegments

PINNED = "pinned"  # tag of a run that `penstock runs clean` never removes
_MOST = 1_000_000  # days, or gigabytes
_JOB_LOCK = "job.lock"  # held while a console changes the run, also to remove it


class RunIsActive(PenstockError):
    """Services of the run are running; it is not removed."""


class RunIsNeeded(PenstockError):
    """Other runs depend on what would be removed."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a run has: streams (including key-value buckets) as (messages, bytes), and objects."""

    streams: dict[str, tuple[int, int]]
    objects: tuple[str, ...]
    object_bytes: int

    @property
    def is_empty(self) -> bool:
        return not (self.streams or self.objects)

    @property
    def num_bytes(self) -> int:
        return self.object_bytes + sum(size for _, size in self.streams.values())

    def describe(self) -> str:
        messages = sum(count for count, _ in self.streams.values())
        stream_bytes = self.num_bytes - self.object_bytes
        return (
            f"{len(self.objects)} objects ({filesize.decimal(self.object_bytes)}) and {len(self.streams)} streams and buckets "
            f"({messages} messages, {filesize.decimal(stream_bytes)})"
        )


def remove_run(run: NamedRun, *, yes: bool, folder: bool, force: bool) -> int:
    """Remove a run after confirmation; return 1 when it was not confirmed.

    Raises ConfigError, RunIsActive, RunIsNeeded, BusError or BlobError; the next try removes what is left.
    """
    here = run.folder
    holdings = examine(run, force=force)
    if holdings is None:
        print(f"the streams and objects of run {run} are in its folder: {here}")
    elif not holdings.is_empty:
        if not agreed(f"remove {holdings.describe()} of run {run}? It cannot be replayed afterwards.", yes=yes):
            return 1
        with _servers(run) as (bus, blobs):
            remove_holdings(run.id, holdings, bus, blobs)
        print(f"removed {holdings.describe()}")
    SharedSegments(run.id).clear_abandoned()
    if run_folder.is_locked(here / connections.STORE / "lock"):
        print(f"kept {here}: the run's own servers are using it")
    elif here.is_dir():
        files = [path for path in here.rglob("*") if path.is_file() and not path.is_symlink()]
        what = f"{len(files)} files ({filesize.decimal(sum(path.stat().st_size for path in files))}) in {here}"
        if yes and not folder:
            print(f"kept {what}: checkpoints, exported model, report; --folder removes it too")
        elif agreed(f"remove {what} too: checkpoints, exported model, report?", yes=folder):
            shutil.rmtree(here)
            print(f"removed {what}")
    return 0


def examine(run: NamedRun, *, force: bool) -> Holdings | None:
    """Print and return what a run has at its servers, None when all of it is in its folder; nothing is changed.

    Raises RunIsActive and RunIsNeeded unless ``force``, and ConfigError for what is no run.
    """
    here = run.folder
    own_store = here / connections.STORE
    its_servers_run = run_folder.is_locked(own_store / "lock")
    if here.is_symlink():
        raise ConfigError(f"{here} is a link; remove it, or remove the run where it is")
    if its_servers_run and not force:
        raise RunIsActive(f"run {run} is running on this machine with its own servers in {own_store}; stop it first")
    if (lock := held_lock(here)) and not force:
        raise RunIsActive(f"run {run} is in use on this machine: a process holds {lock}; stop it, or wait for its end")
    if connections.is_configured(run.given) or its_servers_run:
        logs.configure("runs", level="error")
        with _servers(run) as (bus, blobs):
            return _examine_stored(run.id, bus, blobs, force=force)
    if own_store.is_dir():
        _refuse_others(own_store, run.id, force=force)
    elif curves.command_of(here) is None:  # sft, dpo, rm and scripts have neither
        raise ConfigError(
            f"run {run} has no local store and no server is configured; give a run file, or nats.url and s3.endpoint"
        )
    return None


def held_lock(folder: Path) -> Path | None:
    """Return a lock in a run's folder that a process of this machine holds: that of a trainer, of a task such as its evaluation, of a sweep."""
    locks = (path for pattern in ("*.lock", "tasks/*/*.lock") for path in sorted(folder.glob(pattern)))
    return next((path for path in locks if path.name != _JOB_LOCK and run_folder.is_locked(path)), None)


@contextlib.contextmanager
def _servers(run: NamedRun) -> Iterator[tuple[Bus, Blobs]]:
    settings = run.settings
    with Bus.connect(settings.nats, name="runs-rm", deadline_s=5.0) as bus:
        yield bus, Blobs(settings.s3)


def clean(arguments: Sequence[str], *, older_days: float | None, keep_gb: float | None, yes: bool) -> int:
    """Remove old runs after confirmation; returns 1 when it was not confirmed, or one of them could not be removed."""
    if older_days is None and keep_gb is None:
        raise ConfigError("nothing says which runs; give --older-days 30, or --keep-gb 50 to keep the newest of them")
    for name, given in (("older-days", older_days), ("keep-gb", keep_gb)):
        if given is not None and not 0 <= given <= _MOST:
            raise ConfigError(f"--{name} {given}: expected 0 to {_MOST}")
    folder = connections.find(arguments, os.environ).settings.run.dir
    lines = [replace(line, size_bytes=runs.size_bytes(Path(line.folder))) for line in runs.list_folder(folder)]
    kept = reasons_to_keep(lines)
    limits = (timedelta.max if older_days is None else timedelta(days=older_days), (keep_gb or 0) * 1e9)
    now, left = datetime.now(UTC), sum(line.size_bytes or 0 for line in lines)
    found: dict[str, int] = {}
    for line in sorted(lines, key=lambda line: line.when):
        is_old = now - datetime.fromisoformat(line.when) > limits[0]
        if not is_old and (keep_gb is None or left <= limits[1]):
            continue
        try:
            if line.run in kept:
                raise RunIsNeeded(kept[line.run])
            holdings = examine(NamedRun(line.run, arguments), force=False)
        except PenstockError as err:
            print(f"kept {line.run}: {one_line(str(err))}")
            continue
        left -= line.size_bytes or 0
        found[line.run] = (line.size_bytes or 0) + (holdings.num_bytes if holdings else 0)
        print(f"{line.run}: {line.state}, {line.when[:10]}, {filesize.decimal(found[line.run])}")
    print(f"{len(found)} of {len(lines)} runs in {folder}; removing them frees {filesize.decimal(sum(found.values()))}")
    if not found or not agreed(f"remove {', '.join(found)} with all that they stored?", yes=yes):
        return 1 if found else 0
    return max([_removed(NamedRun(run, arguments)) for run in found])


def _removed(run: NamedRun) -> int:
    try:
        if why := _use(run.folder, runs.state_of(run.folder)) or _pin(run.folder):  # since it was listed
            raise RunIsNeeded(why)
        return remove_run(run, yes=True, folder=True, force=False)
    except PenstockError as err:
        print(f"kept {run}: {err}", file=sys.stderr)
        return 1


def reasons_to_keep(lines: Sequence[runs.RunLine]) -> dict[str, str]:
    """Return why runs stay, whatever their age: in use, wanted by a console, pinned; named in the settings of such a run, or of its sweep."""
    alive = {line.run: why for line in lines if (why := _use(Path(line.folder), line.state))}
    kept = alive | {line.run: why for line in lines if line.run not in alive and (why := _pin(Path(line.folder)))}
    folders = {line.run: Path(line.folder) for line in lines}
    named = {name: run for run in kept for name in _named(folders[run])}
    for run in folders.keys() - kept.keys():
        sweep = runs.sweep_of(folders[run])
        others = [other for other in alive if sweep and other.startswith(f"{sweep}-")]
        if run in named:
            kept[run] = f"the settings of {named[run]} name it"
        elif others:
            kept[run] = f"{others[0]} of the same sweep is alive"
    return kept


def _use(folder: Path, state: str) -> str:
    """Return why a run is alive: it runs, or a console queued, submitted or paused it."""
    if folder.is_symlink():
        return "its folder is a link"
    if state == "running":
        return "it is running"
    if lock := held_lock(folder):
        return f"a process holds {lock}"
    job, launch = (read_object(folder / name) or {} for name in ("job.json", "launch.json"))
    is_queued = (number(launch.get("start")) or 0) < (number(job.get("starts")) or 0)
    is_wanted = job.get("intent") in {"run", "pause"} and (is_queued or state == "stopped")
    return "a console queued or paused it" if is_wanted else ""


def _pin(folder: Path) -> str:
    """Return why its user wants a run to stay: its tag, or a tag of one of its versions."""
    if PINNED in ((read_object(folder / run_folder.NOTES) or {}).get("tags") or []):
        return f"it has the tag {PINNED}"
    tags = (read_object(folder / "tags.json") or {}).get("tags")  # penstock weights tag
    return f"its versions have tags: {', '.join(tags)}" if isinstance(tags, dict) and tags else ""


def _named(folder: Path) -> set[str]:
    """Return what may be a run's id in a run's settings: the parts of each path and of RUN@VERSION, and data.from_run."""
    text = json.dumps((runs.stored_config(folder) or {}).get("settings"))
    paths = re.findall(r'"([^"]*[/@][^"]*)"', text)
    return {part for path in paths for part in re.split("[/@]", path)} | {*re.findall(r'"from_run": "([^"]*)"', text)}


def find_holdings(run: str, bus: Bus, blobs: Blobs) -> Holdings:
    streams = {}
    for name in _names(run):
        try:
            state = bus.stream_state(name).wait()
        except MissingStream:
            continue
        streams[name] = (state.num_messages, state.num_bytes)
    objects = list(blobs.list(blob_keys.run_prefix(run)))
    return Holdings(streams, tuple(stat.key for stat in objects), sum(stat.size_bytes for stat in objects))


def running_services(run: str, bus: Bus) -> list[str]:
    """Return the ids of the services that have a heartbeat which has not expired; the key of one that cannot be read.

    A service that has exited says so in its last heartbeat, and does not count.
    """
    try:
        beats = bus.key_value(streams.live_bucket(run).bucket).wait().entries().wait()
    except MissingStream:
        return []
    return sorted(service for beat in beats if (service := _running_service(beat)) is not None)


def _running_service(beat: Entry) -> str | None:
    try:
        newest = decode(beat.value, Heartbeat)
    except WireError:  # of another build, perhaps; it renews the key, so it runs
        return f"{beat.key} (unreadable)"
    return None if newest.state == heartbeats.EXITED else newest.service_id


def remove_holdings(run: str, holdings: Holdings, bus: Bus, blobs: Blobs) -> None:
    """Remove buckets and streams, then objects, then the events.

    Raises BusRefused before anything is removed if this login may not delete streams, BlobError, or BusError.
    """
    *others, events = _names(run)
    for name in others:  # those that are missing too: NATS then tells whether this login may delete
        try:
            bus.delete_stream(name).wait()
        except BusRefused as err:
            raise BusRefused(
                f"nothing of run {run} was removed from bucket {blobs.bucket}: this login may not delete its streams ({err}); use "
                "the login of the administrator"
            ) from None
    blobs.delete(holdings.objects)
    bus.delete_stream(events).wait()


def _examine_stored(run: str, bus: Bus, blobs: Blobs, *, force: bool) -> Holdings:
    services = running_services(run, bus)
    if services and not force:
        raise RunIsActive(
            f"services of run {run} are running: {', '.join(services)}; stop them first (--force removes the run anyway)"
        )
    if (dependants := users_of_input(run, blobs)) and not force:
        raise RunIsNeeded(
            f"{', '.join(dependants)} trained on {run}, whose packs are the only copy: without them these runs can be "
            f"neither replayed nor rescored; remove these runs first (--force removes {run} anyway)"
        )
    holdings = find_holdings(run, bus, blobs)
    if holdings.is_empty:
        print(f"run {run} has no streams at {bus.url} and no objects in bucket {blobs.bucket}")
        return holdings
    for name, (count, size) in holdings.streams.items():
        print(f"  {name:<40} {count:>9} messages {filesize.decimal(size):>10}")
    print(
        f"  {blobs.bucket}/{blob_keys.run_prefix(run):<34} {len(holdings.objects):>9} objects  {filesize.decimal(holdings.object_bytes):>10}"
    )
    return holdings


def _refuse_others(store: Path, run: str, *, force: bool) -> None:
    if (others := _others_in(store, run)) and not force:
        raise RunIsNeeded(
            f"{store} also holds {', '.join(others)}, which would be removed too; copy what you need of them "
            "(penstock weights export), or add --force"
        )


def _others_in(store: Path, run: str) -> list[str]:
    copies = {path.name for path in store.glob(f"{connections.COPIED_INPUTS}/*")}
    run_ids = {path.name for path in store.glob("objects/*/runs/*") if path.is_dir()}
    return sorted(run_ids - copies - {run})


def agreed(question: str, *, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        print(f"{question} Nothing was changed: stdin is not a terminal. Confirm with --yes", file=sys.stderr)
        return False
    return input(f"{question} [y/N] ").strip().lower() in {"y", "yes"}


def _names(run: str) -> list[str]:
    """Return the names of all streams, the events last: a run with that stream is listed."""
    names = [f"KV_{spec.bucket}" for spec in streams.run_buckets(run)] + list(streams.stream_names(run))
    return sorted(names, key=lambda name: name.endswith("-events"))
