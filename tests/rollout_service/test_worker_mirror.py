"""The local copies of weights: complete or absent, linked where nothing changed, removed when their worker is dead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.versions import PolicyVersion
from rollout_service.errors import WeightsUnusable
from rollout_service.mirror import Mirror
from tests.rollout_service.ring_end import RingEnd

OpenMirror = Callable[[str], Mirror]


@pytest.fixture
def open_mirror(ring_end: RingEnd, tmp_path: Path) -> Iterator[OpenMirror]:
    """Mirrors of the run by worker id, closed after the test."""
    opened: list[Mirror] = []

    def open_one(worker_id: str) -> Mirror:
        opened.append(Mirror(ring_end.blobs, tmp_path / worker_id, ring_end.run_id))
        return opened[-1]

    yield open_one
    for mirror in opened:
        mirror.close()


def test_a_version_is_fetched_once(ring_end: RingEnd, open_mirror: OpenMirror):
    """The second request is answered from disk, and the folder holds what was published, byte for byte."""
    fact = ring_end.publish(0)
    mirror = open_mirror("w0")
    first = mirror.fetch(PolicyVersion(0), fact.manifest)
    assert mirror.fetch(PolicyVersion(0), fact.manifest) is first
    published = {path.name: path.read_bytes() for path in (ring_end.folder / "model-0").iterdir()}
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == published


def test_only_what_changed_is_fetched(ring_end: RingEnd, open_mirror: OpenMirror):
    """Config and tokenizer of the second version cost nothing."""
    mirror = open_mirror("w0")
    first = mirror.fetch(PolicyVersion(0), ring_end.publish(0).manifest)
    announced = ring_end.publish(1)
    second = mirror.fetch(PolicyVersion(1), announced.manifest)
    assert second.num_bytes == announced.num_bytes < first.num_bytes
    assert second.checksum != first.checksum


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_corrupt_file_leaves_no_folder(ring_end: RingEnd, tmp_path: Path, open_mirror: OpenMirror, file: str):
    """A version is there when every byte of it is verified, or not at all."""
    fact = ring_end.publish(3, corrupt=file)
    mirror = open_mirror("w0")
    with pytest.raises(WeightsUnusable, match=r"version 3: .*sha256"):
        mirror.fetch(PolicyVersion(3), fact.manifest)
    assert list((tmp_path / "w0").glob("v*")) == []
    assert mirror.held() == []


def test_a_manifest_of_another_version_is_refused(ring_end: RingEnd, open_mirror: OpenMirror):
    """What is announced as version 5 must call itself version 5."""
    fact = ring_end.publish(4)
    mirror = open_mirror("w0")
    with pytest.raises(WeightsUnusable, match="is of version 4"):
        mirror.fetch(PolicyVersion(5), fact.manifest)


def test_copies_of_dead_workers_are_removed_and_those_of_living_ones_are_not(
    ring_end: RingEnd, tmp_path: Path, open_mirror: OpenMirror
):
    """A folder belongs to the process that holds its lock; nobody else's files are touched."""
    fact = ring_end.publish(0)
    dead, living = (open_mirror(name) for name in ("dead", "living"))
    folders = [mirror.fetch(PolicyVersion(0), fact.manifest).folder for mirror in (dead, living)]
    (tmp_path / "something-else").mkdir()
    (tmp_path / "something-else" / "v1").touch()
    dead._lock.close()  # as the end of its process does
    open_mirror("new")
    assert [folder.exists() for folder in folders] == [False, True]
    assert (tmp_path / "something-else" / "v1").exists()


def test_an_orderly_end_leaves_no_copies(ring_end: RingEnd, open_mirror: OpenMirror):
    """A closed mirror has removed what it fetched."""
    mirror = open_mirror("w0")
    folder = mirror.fetch(PolicyVersion(0), ring_end.publish(0).manifest).folder
    mirror.close()
    assert not folder.exists()


def test_two_workers_of_one_id_do_not_share_a_folder(ring_end: RingEnd, open_mirror: OpenMirror):
    """The second one is told to choose another id."""
    first = open_mirror("w0")
    with pytest.raises(ConfigError, match=r"another worker with the same worker\.id is alive"):
        open_mirror("w0")
    assert first.held() == []
