"""`penstock runs rm`: removes one run and nothing of another, not while its services run, and only after confirmation."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.console.command import penstock
from tests.console.record.recorded_run import Services, event

from penstock.console.tools.removal import find_holdings, remove_holdings
from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.protocol import seals, streams
from penstock.protocol.errors import BlobStoreUnreachable
from penstock.protocol.facts import Heartbeat, encode
from penstock.protocol.record.stored_record import mark_use_of_input
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.weights.shared_segments import SharedSegments


@pytest.fixture
def neighbour(bus: Bus, blobs: Blobs, run_streams: str) -> Iterator[str]:
    name = f"{run_streams}-b"
    bootstrap(bus, blobs, name)
    blobs.put(f"runs/{name}/groups/x", b"theirs")
    yield name
    delete_run(bus, name)


def fill(bus: Bus, blobs: Blobs, run: str, folder: Path) -> None:
    for number in range(3):
        blobs.put(f"runs/{run}/groups/v00000000/{number}", b"group")
    Services(bus, run).say(*[event("log", 0.0)] * 3)
    (folder / "runs" / run).mkdir(parents=True)
    (folder / "runs" / run / "config.json").write_text("{}")


def rm(*arguments: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    return penstock("runs", "rm", *arguments, cwd=cwd, code=code)


def test_rm_removes_one_run_and_confirms_its_folder_separately(
    bus: Bus, blobs: Blobs, run_streams: str, neighbour: str, typed: list[str], tmp_path: Path
):
    run = run_streams
    fill(bus, blobs, run, tmp_path)
    shared = SharedSegments(run)
    shared.join()
    (left := shared.folder.with_name(f"{run}-left-by-killed-workers")).mkdir()
    unasked = rm(run, *typed, cwd=tmp_path, code=1)
    assert "3 objects" in unasked.stdout
    assert "stdin is not a terminal. Confirm with --yes" in unasked.stderr
    assert len(find_holdings(run, bus, blobs).objects) == 3
    assert "--folder removes it too" in rm(run, "--yes", *typed, cwd=tmp_path).stdout
    assert find_holdings(run, bus, blobs).is_empty
    assert (tmp_path / "runs" / run).is_dir()
    assert "has no streams" in rm(run, "--yes", "--folder", *typed, cwd=tmp_path).stdout
    assert not (tmp_path / "runs" / run).exists()
    assert shared.folder.exists(), "it is read"
    assert not left.exists()
    shared.close()
    theirs = find_holdings(neighbour, bus, blobs)
    assert len(theirs.objects) == 1
    assert len(theirs.streams) == len(streams.stream_names(neighbour)) + len(streams.run_buckets(neighbour))


def test_a_running_run_is_not_removed(bus: Bus, blobs: Blobs, run_streams: str, typed: list[str], tmp_path: Path):
    """A heartbeat prevents it, and the error names the service; --force removes it anyway."""
    beat = Heartbeat(role="trainer", service_id="trainer-7", at=0.0, state="training")
    live = bus.key_value(streams.live_bucket(run_streams).bucket).wait()
    live.put(streams.heartbeat_key("trainer", "trainer-7"), encode(beat)).wait()
    over = threading.Event()

    def beat_on() -> None:
        while not over.wait(2.0):  # it lapses after ten seconds, and the command may need longer to look
            live.put(streams.heartbeat_key("trainer", "trainer-7"), encode(beat)).wait()

    heart = threading.Thread(target=beat_on)
    heart.start()
    try:
        refused = rm(run_streams, "--yes", *typed, cwd=tmp_path, code=1)
    finally:
        over.set()
        heart.join()
    assert "are running: trainer-7; stop them first" in refused.stderr
    live.put(streams.heartbeat_key("trainer", "trainer-7"), encode(beat)).wait()
    rm(run_streams, "--yes", "--force", *typed, cwd=tmp_path)
    assert find_holdings(run_streams, bus, blobs).is_empty


def test_an_interrupted_removal_is_repeated(
    bus: Bus, blobs: Blobs, run_streams: str, own_s3: Callable, typed: list[str], tmp_path: Path
):
    """With the object store unreachable no object is removed and the run is still listed; the next try removes it."""
    fill(bus, blobs, run_streams, tmp_path)
    holdings = find_holdings(run_streams, bus, blobs)
    storage = own_s3()
    unreachable = Blobs(storage.settings, deadline_s=0.5)
    storage.kill()
    with pytest.raises(BlobStoreUnreachable, match="delete 3 objects"):
        remove_holdings(run_streams, holdings, bus, unreachable)
    left = find_holdings(run_streams, bus, blobs)
    assert left.objects == holdings.objects
    assert list(left.streams) == [f"{run_streams}-events"]
    blobs.delete(holdings.objects[:2])  # half of it
    assert "1 objects" in rm(run_streams, "--yes", *typed, cwd=tmp_path).stdout
    assert find_holdings(run_streams, bus, blobs).is_empty


def test_a_finished_local_run_is_removed_with_its_folder(tmp_path: Path):
    store = tmp_path / "runs" / "mine" / "store"
    store.mkdir(parents=True)
    seals.write(store / "environment", "PENSTOCK_NATS__URL=nats://127.0.0.1:1\n")
    rm("mine", "--yes", "--folder", cwd=tmp_path)
    assert not (tmp_path / "runs" / "mine").exists()
    unknown = rm("nobody", "--yes", cwd=tmp_path, code=1)
    assert "run nobody has no local store and no server is configured" in unknown.stderr


def test_what_other_runs_trained_on_is_not_removed(
    bus: Bus, blobs: Blobs, run_id: str, typed: list[str], tmp_path: Path
):
    """A rescored input is removed only when no run depends on it, or by force; the error names the runs."""
    name, user, removed = f"{run_id}-input", f"{run_id}-user", f"{run_id}-gone"
    blobs.put(f"runs/{name}/groups/v00000000/0", b"pack")
    for run in (user, removed, name):
        mark_use_of_input(name, run, blobs)
    record = blobs.put(f"runs/{user}/lineage/chapter", b"record")
    refused = rm(name, "--yes", *typed, cwd=tmp_path, code=1)
    assert f"{user} trained on {name}" in refused.stderr
    assert "--force" in refused.stderr
    assert blobs.exists(f"runs/{name}/groups/v00000000/0")
    blobs.delete([record.key])
    rm(name, "--yes", *typed, cwd=tmp_path)
    assert find_holdings(name, bus, blobs).is_empty


def test_a_local_store_with_other_runs_is_removed_only_by_force(tmp_path: Path):
    store = tmp_path / "runs" / "mine" / "store"
    for run in ("mine", "mine-strict"):
        (store / "objects" / "penstock" / "runs" / run).mkdir(parents=True)
    assert "also holds mine-strict" in rm("mine", "--yes", "--folder", cwd=tmp_path, code=1).stderr
    assert store.is_dir()
    rm("mine", "--yes", "--folder", "--force", cwd=tmp_path)
    assert not store.exists()
