"""The local copies of adapters: a base model that is fetched once, and one verified folder in PEFT's format for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.rollout_service.trainer_side import ADAPTER, TrainerSide

from penstock.protocol.facts import WeightsPublished
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.errors import WeightsUnusable
from penstock.rollout_service.weights.mirror import Mirror, MirroredVersion


@pytest.fixture
def mirror(blobs: Blobs, trainer_side: TrainerSide, tmp_path: Path) -> Iterator[Mirror]:
    opened = Mirror(blobs, tmp_path / "copies", trainer_side.run_id)
    yield opened
    opened.close()


def fetch(mirror: Mirror, fact: WeightsPublished, *, keep: tuple[int, ...] = ()) -> MirroredVersion:
    used = [PolicyVersion(version) for version in keep]
    return mirror.fetch(PolicyVersion(fact.version), fact.manifest, keep=used, newest=True)


def assert_is(mirrored: MirroredVersion, trainer_side: TrainerSide, fact: WeightsPublished) -> None:
    """The folder holds exactly the factors that were published, its base exactly the model."""
    stored = load_file(mirrored.folder / "adapter_model.safetensors")
    expected = trainer_side.factors(fact.version)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    assert (mirrored.folder / "adapter_config.json").read_bytes() == ADAPTER.to_json()
    assert mirrored.base is not None
    (shard,) = mirrored.base.folder.glob("*.safetensors")
    assert all(torch.equal(tensor, trainer_side.tensors(0)[name]) for name, tensor in load_file(shard).items())
    assert (mirrored.model_folder / "config.json").exists()


def test_a_base_is_fetched_once_and_then_only_adapters(trainer_side: TrainerSide, mirror: Mirror) -> None:
    """A late joiner reads the model and the newest adapter, then only adapters; `trim` removes old ones."""
    trainer_side.publish(0)
    facts = [trainer_side.publish_adapter(version) for version in (1, 2, 3)]
    first = fetch(mirror, facts[1])
    assert_is(first, trainer_side, facts[1])
    assert first.base is not None
    second = fetch(mirror, facts[2], keep=(0, 2))
    assert_is(second, trainer_side, facts[2])
    assert second.base is not None
    assert second.base.folder == first.base.folder
    assert second.num_bytes == facts[2].num_bytes < 0.2 * first.num_bytes
    assert fetch(mirror, facts[2], keep=(0, 2)).num_bytes == 0
    assert mirror.held() == [0, 2, 3]
    mirror.trim([PolicyVersion(0), PolicyVersion(3)])
    assert mirror.held() == [0, 3]
    assert not first.folder.exists()


def test_a_restarted_worker_keeps_the_base_and_fetches_the_adapter_again(
    trainer_side: TrainerSide, blobs: Blobs, tmp_path: Path
) -> None:
    """Adapters of a killed worker, torn or not, are not reused; the model is hashed, and read from the disk."""
    trainer_side.publish(0)
    fact = trainer_side.publish_adapter(1)
    killed = Mirror(blobs, tmp_path / "w0", trainer_side.run_id)
    folder = fetch(killed, fact).folder
    (folder / "adapter_model.safetensors").write_bytes(b"torn")
    killed._cache.unlock()  # as the kernel does when a process is killed
    mirror = Mirror(blobs, tmp_path / "w0", trainer_side.run_id)
    again = fetch(mirror, fact)
    assert_is(again, trainer_side, fact)
    assert again.num_bytes == fact.num_bytes
    mirror.close()
    assert not list((tmp_path / "w0").glob("*/*"))


@pytest.mark.parametrize("end", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_corrupt_adapter_makes_no_folder(trainer_side: TrainerSide, mirror: Mirror, end: str) -> None:
    """A changed bit of the factors or of the configuration is refused; the trainer's answer is accepted."""
    trainer_side.publish(0)
    fact = trainer_side.publish_adapter(1, corrupt=end)
    with pytest.raises(WeightsUnusable, match=r"version 1: .*sha256"):
        fetch(mirror, fact)
    assert mirror.held() == [0]
    answer = trainer_side.source.answer()
    assert answer.manifest != fact.manifest
    assert_is(fetch(mirror, answer), trainer_side, answer)


def test_an_adapter_without_its_base_is_refused(trainer_side: TrainerSide, blobs: Blobs, mirror: Mirror) -> None:
    """An adapter whose model was deleted is refused; the trainer's answer has the model again."""
    base = trainer_side.publish(0)
    fact = trainer_side.publish_adapter(1)
    deleted = [
        s.key for s in blobs.list(f"runs/{trainer_side.run_id}/weights/v00000000/") if s.key != base.manifest.key
    ]
    blobs.delete(deleted)
    with pytest.raises(WeightsUnusable, match="version 1"):
        fetch(mirror, fact)
    answer = trainer_side.source.answer()
    assert_is(fetch(mirror, answer), trainer_side, answer)
