"""Where a worker keeps its copies: in memory while those of all workers of the host fit, else on disk; what killed workers left goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.rollout_service.weights.test_worker_mirror import Run

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.run_file import load
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.rollout_service.settings import RolloutSettings
from penstock.rollout_service.weights import cache_folder
from penstock.rollout_service.weights.cache_folder import MemoryFolder, Room, choose
from penstock.rollout_service.weights.mirror import Mirror

GB = 10**9
OpenMirror = Callable[[str], Mirror]


@pytest.mark.parametrize(
    ("model_gb", "room", "fits", "words"),
    [
        (15.2, Room(100 * GB, 200 * GB, 0, 0), True, "in memory: 2 copies of 15.20 GB, and 50.00 GB (50% of what is free in /dev/shm)"),
        (15.2, Room(100 * GB, 200 * GB, 30 * GB, 31 * GB), True, "beside 31.00 GB of other workers, and 65.00 GB"),
        (15.2, Room(100 * GB, 200 * GB, 0, 31 * GB), False, "on disk: "),
        (15.2, Room(100 * GB, 40 * GB, 0, 0), False, "20.00 GB (50% of what is free in memory) may be used; set worker.cache_dir"),
        (1.2, Room(64 * 2**20, 40 * GB, 0, 0), False, "give the container a larger /dev/shm, or set worker.cache_dir"),
    ],
    ids=["a 7B model", "a worker that has written", "one that will write", "little memory", "a container's 64 MiB"],
)  # fmt: skip
def test_the_copies_of_all_workers_of_a_host_must_fit(model_gb: float, room: Room, fits: bool, words: str) -> None:
    found, reason = choose(int(model_gb * GB), room)
    assert found is fits
    assert words in reason


@pytest.fixture
def run(bus: Bus, blobs: Blobs, run_streams: str, tmp_path: Path) -> Run:
    write_model(tmp_path / "model", seed=0)
    run = Run(bus, blobs, run_streams, tmp_path / "model")
    run.publish(0)
    return run


@pytest.fixture
def opened(blobs: Blobs, run_streams: str, tmp_path: Path) -> Iterator[OpenMirror]:
    """Mirrors by worker id, whose file system in memory is a folder of the test."""
    (tmp_path / "shm").mkdir()
    mirrors: list[Mirror] = []

    def open_one(worker_id: str) -> Mirror:
        home = tmp_path / "disk" / run_streams / worker_id
        mirrors.append(Mirror(blobs, home, run_streams, memory=MemoryFolder(home, tmp_path / "shm")))
        return mirrors[-1]

    yield open_one
    for mirror in mirrors:
        mirror.close()


def kill(mirror: Mirror) -> None:
    """Leave what a killed process leaves: its folders, and no lock."""
    for cache in (mirror._cache, mirror._on_disk):
        cache.unlock()


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0].rpartition("-")[2] for path in (tmp_path / "shm").glob("*/*"))


def test_copies_in_memory_outlive_a_kill_and_go_when_their_owner_does_not_come_back(
    run: Run, opened: OpenMirror, tmp_path: Path
) -> None:
    """A restarted worker applies one patch to what it has; another worker's start removes the rest, and leaves a running one's."""
    first, second = opened("w0"), opened("w1")
    run.assert_is(run.fetch(first, 0), 0)
    run.fetch(second, 0)
    assert folders(tmp_path) == ["w0", "w1"]
    kill(first)
    run.publish(1)
    again = opened("w0")
    mirrored = run.fetch(again, 1)
    run.assert_is(mirrored, 1)
    assert mirrored.num_bytes < 2 * run.facts[1].num_bytes < run.facts[0].num_bytes, "its copies are used again"
    assert mirrored.folder.is_relative_to(tmp_path / "shm")
    kill(again)
    (
        tmp_path / "shm" / again._cache.path.parent.name / "run-w8-0"
    ).mkdir()  # of a worker that was killed before it had its lock
    MemoryFolder(tmp_path / "disk" / "r" / "w9", tmp_path / "shm").clear_abandoned(keep_own=True)
    assert folders(tmp_path) == ["w1"]
    second.close()
    assert not folders(tmp_path)


def test_a_decision_meets_files_that_another_worker_removes(
    run: Run, opened: OpenMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They vanish while what is written is counted; the weights are in memory all the same."""
    run.fetch(opened("w0"), 0)
    walk = os.walk
    monkeypatch.setattr(
        os, "walk", lambda folder: ((at, inside, [*names, "removed.part"]) for at, inside, names in walk(folder))
    )
    assert run.fetch(opened("w1"), 0).folder.is_relative_to(tmp_path / "shm")


def test_a_worker_without_room_in_memory_uses_the_disk(
    run: Run, opened: OpenMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does one that finds a folder that is not its user's alone; both serve the same version."""
    monkeypatch.setattr(cache_folder, "free_memory", lambda: 1000)
    on_disk = run.fetch(opened("w0"), 0)
    run.assert_is(on_disk, 0)
    monkeypatch.undo()
    parent = MemoryFolder(tmp_path / "disk", tmp_path / "shm").parent
    parent.chmod(0o777)
    other = run.fetch(opened("w1"), 0)
    assert all(mirrored.folder.is_relative_to(tmp_path / "disk") for mirrored in (on_disk, other))
    parent.chmod(0o700)
    assert run.fetch(opened("w2"), 0).folder.is_relative_to(tmp_path / "shm")


@pytest.mark.parametrize(
    ("overrides", "may"),
    [
        ((), True),
        (("worker.engine=sglang",), True),
        (("worker.engine=sglang", 'sglang.command=["docker", "run"]'), False),
        (("worker.engine=sglang-url", "worker.engine_url=http://127.0.0.1:1"), False),
        (("worker.cache_dir=/data",), False),
    ],
)
def test_only_engines_that_see_this_memory_get_copies_there(overrides: tuple[str, ...], may: bool) -> None:
    settings = load(RolloutSettings, files=[], overrides=["run.id=r", *overrides], environ={}).settings
    assert settings.may_use_memory is may
