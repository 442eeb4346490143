"""`penstock runs rm`: remove what a run has in the object store, on NATS and on this machine, in `/dev/shm` where its workers were killed.

Buckets and streams are removed first, then the objects, the stream of events last. NATS refuses the first step to a login
that may not delete, before an object is gone: the object store's key is often shared by all logins. After an interruption
the run is still listed, and the same command continues.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich import filesize

from penstock.console import connections
from penstock.console.connections import NamedRun
from penstock.protocol import blob_keys, heartbeats, logs, streams
from penstock.protocol.errors import BusRefused, ConfigError, MissingStream, PenstockError, WireError
from penstock.protocol.facts import Heartbeat, decode
from penstock.protocol.record import run_folder
from penstock.protocol.record.stored_record import users_of_input
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import Entry
from penstock.protocol.weights.shared_segments import SharedSegments


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

    def describe(self) -> str:
        messages = sum(count for count, _ in self.streams.values())
        stream_bytes = sum(size for _, size in self.streams.values())
        return (
            f"{len(self.objects)} objects ({filesize.decimal(self.object_bytes)}) and {len(self.streams)} streams and buckets "
            f"({messages} messages, {filesize.decimal(stream_bytes)})"
        )


def remove_run(run: NamedRun, *, yes: bool, folder: bool, force: bool) -> int:
    """Remove a run after confirmation; return 1 when it was not confirmed.

    Raises ConfigError, RunIsActive, RunIsNeeded, BusError or BlobError; the next try removes what is left.
    """
    here = run.folder
    own_store = here / connections.STORE
    its_servers_run = run_folder.is_locked(own_store / "lock")
    if its_servers_run and not force:
        raise RunIsActive(f"run {run} is running on this machine with its own servers in {own_store}; stop it first")
    if connections.is_configured(run.given) or its_servers_run:
        logs.configure("runs", level="error")
        settings = run.settings
        with Bus.connect(settings.nats, name="runs-rm", deadline_s=5.0) as bus:
            if not _remove_stored(run.id, bus, Blobs(settings.s3), yes=yes, force=force):
                return 1
    elif not own_store.is_dir():
        raise ConfigError(
            f"run {run} has no local store and no server is configured; give a run file, or nats.url and s3.endpoint"
        )
    else:
        print(f"the streams and objects of run {run} are in its folder: {own_store}")
        if (others := _others_in(own_store, run.id)) and not force:
            raise RunIsNeeded(
                f"{own_store} also holds {', '.join(others)}, which would be removed too; copy what you need of them "
                "(penstock weights export), or add --force"
            )
    SharedSegments(run.id).clear_abandoned()
    if its_servers_run:
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


def _remove_stored(run: str, bus: Bus, blobs: Blobs, *, yes: bool, force: bool) -> bool:
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
        return True
    for name, (count, size) in holdings.streams.items():
        print(f"  {name:<40} {count:>9} messages {filesize.decimal(size):>10}")
    print(
        f"  {blobs.bucket}/{blob_keys.run_prefix(run):<34} {len(holdings.objects):>9} objects  {filesize.decimal(holdings.object_bytes):>10}"
    )
    if not agreed(f"remove {holdings.describe()} of run {run}? It cannot be replayed afterwards.", yes=yes):
        return False
    remove_holdings(run, holdings, bus, blobs)
    print(f"removed {holdings.describe()}")
    return True


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
