"""`penstock runs rm`: removes one run and nothing of another, not while its services run, and only after confirmation."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
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
from penstock.protocol.record import run_folder
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


KEPT = {  # name of a run: why it stays
    "shared": "also holds another", "paused": "a console queued or paused it", "queued": "a console queued or paused it",
    "busy": "it is running", "linked": "its folder is a link", "judged": "evaluate/launch.lock", "pinned": "it has the tag pinned",
    "tagged": "its versions have tags: production", "parent": "the settings of pinned name it", "rescored": "the settings of busy name it",
    "s-lr-1e-6": "a process holds runs/s-lr-1e-6/sweep.lock", "s-lr-3e-6": "s-lr-1e-6 of the same sweep is alive",
}  # fmt: skip


def test_old_and_large_runs_are_listed_and_with_yes_removed(tmp_path: Path):
    """The oldest first, until the rest fits; none that is alive, pinned, or needed by such a run, and nothing through a link."""
    runs = tmp_path / "runs"
    for age, name in enumerate(("new", "sft", "old", *KEPT, "never")):
        folder = (tmp_path if name == "linked" else runs) / name
        place = folder / ("sft-training" if name == "sft" else "store/objects")
        place.mkdir(parents=True)
        metrics = (place if name == "sft" else folder) / "metrics.jsonl"
        metrics.write_bytes(b" " * 1_000_000)
        os.utime(metrics, (time.time() - age * 86400,) * 2)
        lr = {"s-lr-1e-6": 1e-6, "s-lr-3e-6": 3e-6}.get(name, 1.0)
        given = {"pinned": {"model": {"path": "../parent/model"}}, "busy": {"data": {"from_run": "rescored"}}}
        settings = {"trainer": {"lr": lr}, **given.get(name, {})}
        (folder / "planned-config.json").write_text(json.dumps({"settings": settings}))
        job = {"intent": {"paused": "pause", "queued": "run"}.get(name, "stop"), "starts": 1}
        (folder / "job.json").write_text(json.dumps(job))
    (runs / "linked").symlink_to(tmp_path / "linked")
    (runs / "old" / "out").symlink_to(tmp_path / "linked")
    (runs / "shared" / "store" / "objects" / "b" / "runs" / "another").mkdir(parents=True)
    seals.write(runs / "old" / "store" / "environment", "PENSTOCK_NATS__URL=nats://127.0.0.1:1\n")  # asks no server
    (runs / "pinned" / "notes.json").write_text('{"tags": ["pinned"]}')
    (runs / "tagged" / "tags.json").write_text('{"tags": {"production": {"version": 1}}}')
    locks = {"busy": "run.lock", "judged/tasks/evaluate": "launch.lock", "s-lr-1e-6": run_folder.SWEEP_LOCK}
    with contextlib.ExitStack() as held:
        for name, lock in locks.items():
            held.enter_context(run_folder.hold_lock(runs / name, lock))
        assert "give --older-days 30" in penstock("runs", "clean", cwd=tmp_path, code=1).stderr
        assert "expected 0 to" in penstock("runs", "clean", "--older-days=nan", cwd=tmp_path, code=1).stderr
        assert "run nobody has no local store and no server" in rm("nobody", "--yes", cwd=tmp_path, code=1).stderr
        assert "run busy is in use" in rm("busy", "--yes", "--folder", cwd=tmp_path, code=1).stderr
        assert "is a link" in rm("linked", "--yes", "--folder", cwd=tmp_path, code=1).stderr
        by_age = penstock("runs", "clean", "--older-days=1.5", cwd=tmp_path, code=1)
        lines = dict(line.split(": ", 1) for line in by_age.stdout.splitlines()[:-1])
        assert list(lines) == ["never", *(f"kept {name}" for name in reversed(KEPT)), "old"]
        assert {name: why for name, why in KEPT.items() if why not in lines[f"kept {name}"]} == {}
        assert by_age.stdout.endswith("2 of 16 runs in runs; removing them frees 2.0 MB\n")
        assert "remove never, old with all that they stored? Nothing was changed" in by_age.stderr
        by_size = penstock("runs", "clean", "--keep-gb=0.0125", "--yes", cwd=tmp_path)
        assert "3 of 16 runs in runs; removing them frees 3.0 MB" in by_size.stdout
    assert {path.name for path in runs.iterdir()} == {"new", *KEPT}
    rm("shared", "--yes", "--folder", "--force", cwd=tmp_path)
    assert not (runs / "shared").exists()
    assert (tmp_path / "linked" / "metrics.jsonl").exists()
