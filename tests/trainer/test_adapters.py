"""Adapters published: the base once, then factors alone; what a later life finds; what is mended; what may be collected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deploy.quickstart_task import write_model
from protocol import blob_keys, subjects
from protocol.adapter_format import AdapterConfig, published_name
from protocol.facts import BlobRef, WeightsPublished, WeightsRefused
from protocol.transport.blobs import Blobs
from protocol.transport.bus import Bus
from protocol.versions import PolicyVersion
from protocol.weight_export import export_adapter, export_version
from protocol.weight_reader import WeightReader
from protocol.weights import VersionManifest
from tests.servers import wait_for
from tests.trainer.test_publish import head_of, manifest_of
from tests.trainer.test_retire import GRACE_S, beat, retirement, versions
from tests.weights_source import NEVER
from trainer import adapter
from trainer.adapter import Lora
from trainer.anchors import answer_is_due
from trainer.doors import Doors
from trainer.errors import PublicationFailed
from trainer.publish import Publisher
from trainer.snapshot import Base, Snapshot, Weights
from trainer.version_writer import Written

CONFIG = AdapterConfig(r=2, lora_alpha=6.0, target_modules=("q",))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for config and tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture
def doors(bus: Bus, blobs: Blobs, ring_streams: str) -> Doors:
    """A bootstrapped run."""
    return Doors(ring_streams, bus, blobs)


def a_base(seed: int = 0) -> Base:
    generator = torch.Generator().manual_seed(seed)
    return Base.of({"q.weight": torch.randn((8, 4), generator=generator), "norm": torch.ones(4)}, CONFIG)


def factors(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    names = {"A": (2, 4), "B": (8, 2)}
    return {f"base_model.model.q.lora_{x}.weight": torch.randn(s, generator=generator) for x, s in names.items()}


def publish(publisher: Publisher, version: int, base: Base, *, whole: bool = False) -> None:
    number = PolicyVersion(version)
    weights = Weights(base.part) if whole else Weights.of(factors(version), base)
    publisher.submit(Snapshot(number, version, weights.part, "float32", must_publish=True, base=weights.base))
    publisher.wait_until_published(number, 20.0)
    publisher.unpin(number)


def head_manifest(doors: Doors) -> VersionManifest:
    return manifest_of(doors, head_of(doors).manifest)


def assert_served(doors: Doors, manifest: VersionManifest, base: Base, folder: Path) -> None:
    """The version merges to its base plus scale times its factors, and its PEFT folder holds exactly the factors."""
    reader = WeightReader(doors.blobs, doors.run_id)
    export_version(manifest, folder / "merged", reader=reader, blobs=doors.blobs)
    export_adapter(manifest, folder / "peft", reader=reader, blobs=doors.blobs)
    found = load_file(folder / "merged" / "model-00001-of-00001.safetensors")
    own = factors(manifest.version)
    down, up = own["base_model.model.q.lora_A.weight"], own["base_model.model.q.lora_B.weight"]
    torch.testing.assert_close(found["q.weight"], base.tensors["q.weight"] + 3.0 * up @ down)
    assert torch.equal(found["norm"], base.tensors["norm"])
    stored = load_file(folder / "peft" / "adapter_model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in own.items())
    assert AdapterConfig.from_json((folder / "peft" / "adapter_config.json").read_bytes()) == CONFIG


def test_the_base_is_published_once_and_then_adapters_alone(doors: Doors, model_folder: Path, tmp_path: Path) -> None:
    """Version 0 is the model; each later version is a few bytes upon it, and is the head by the same move as any other."""
    publisher, base = Publisher(doors, model_folder=model_folder), a_base()
    publish(publisher, 0, base, whole=True)
    publish(publisher, 1, base)
    publish(publisher, 2, base)
    publisher.close()
    manifest = head_manifest(doors)
    assert (manifest.version, manifest.kind, manifest.parent.version if manifest.parent else None) == (2, "adapter", 1)
    assert manifest.base is not None
    assert (manifest.base.version, manifest.base.state_root) == (0, base.root)
    assert manifest.state_root == Weights.of(factors(2), base).root()
    assert [file.name for file in manifest.model_files] == ["adapter_config.json"]
    assert manifest.num_words == 2 * 4 + 8 * 2
    assert_served(doors, manifest, base, tmp_path)


def test_a_later_life_finds_the_base_and_stores_nothing_twice(doors: Doors, model_folder: Path) -> None:
    """It goes on upon the base of the life before; weights that are the head's own are announced, not published."""
    base = a_base()
    first = Publisher(doors, model_folder=model_folder)
    publish(first, 0, base, whole=True)
    publish(first, 1, base)
    first.close()
    before = versions(doors)
    second = Publisher(doors, model_folder=model_folder, epoch=1)
    assert not second.resume(Weights.of(factors(5), a_base()), "float32")
    assert second.resume(Weights.of(factors(1), a_base()), "float32")
    assert second.has_base(a_base())
    assert not second.has_base(a_base(seed=1))
    publish(second, 2, a_base())
    second.close()
    assert versions(doors) - before == {2}
    assert head_manifest(doors).epoch == 1


def test_another_base_is_stored_beside_and_becomes_no_head(doors: Doors, model_folder: Path, tmp_path: Path) -> None:
    """After a change of the published dtype, say: adapters go on upon the new model; nobody is told of it by itself."""
    heard: list[int] = []
    subject = subjects.weights_published(doors.run_id)
    doors.bus.tail(f"{doors.run_id}-weights", subject, WeightsPublished, lambda fact: heard.append(fact.version)).wait()
    publisher, base, other = Publisher(doors, model_folder=model_folder), a_base(), a_base(seed=1)
    publish(publisher, 0, base, whole=True)
    publish(publisher, 1, base)
    publisher.close()
    later = Publisher(doors, model_folder=model_folder, epoch=1)
    with pytest.raises(PublicationFailed, match="is not published"):
        publish(later, 2, other)
    later = Publisher(doors, model_folder=model_folder, epoch=1)
    later.lay_base(other, PolicyVersion(3), 1, "float32")
    publish(later, 4, other)
    later.close()
    wait_for(lambda: 4 in heard, "the announcement")
    assert heard == [0, 1, 4]
    assert_served(doors, head_manifest(doors), other, tmp_path)


def test_whole_models_and_adapters_may_follow_one_another(doors: Doors, model_folder: Path) -> None:
    """A life that publishes merged models goes on after one that did not, and the other way round."""
    base = a_base()
    publisher = Publisher(doors, model_folder=model_folder, policy=NEVER)
    publish(publisher, 0, base, whole=True)
    publish(publisher, 1, base)
    publish(publisher, 2, a_base(seed=2), whole=True)
    publish(publisher, 3, a_base(seed=3), whole=True)
    publisher.close()
    kinds = {m.version: m.kind for m in _manifests(doors)}
    assert kinds == {0: "anchor", 1: "adapter", 2: "anchor", 3: "patch"}
    later = Publisher(doors, model_folder=model_folder, epoch=1)
    assert not later.has_base(base)
    later.lay_base(base, PolicyVersion(5), 3, "float32")
    publish(later, 6, base)
    later.close()
    assert head_manifest(doors).parent == _written(doors, 3).as_ancestor


def test_a_refused_adapter_is_published_again_with_a_base_that_is_whole(
    doors: Doors, model_folder: Path, tmp_path: Path
) -> None:
    """One worker is enough. What was damaged of the base is stored again under its own number; the state is the same."""
    publisher, base = Publisher(doors, model_folder=model_folder), a_base()
    publish(publisher, 0, base, whole=True)
    publish(publisher, 1, base)
    before = head_of(doors)
    root = head_manifest(doors).state_root
    shard = _written(doors, 0).manifest.objects[0]
    doors.blobs.delete([shard.key])
    refuse(doors, before.manifest)
    wait_for(lambda: head_of(doors).manifest != before.manifest, "the answer")
    answer = head_manifest(doors)
    assert (answer.version, answer.kind, answer.state_root) == (1, "adapter", root)
    assert answer.base is not None
    assert answer.base.version == 0
    assert_served(doors, answer, base, tmp_path)
    publish(publisher, 2, base)
    assert head_manifest(doors).base == answer.base
    publisher.close()


def test_answers_end_where_they_do_not_help() -> None:
    """What one worker refuses again is its own trouble, and what all refuse three times is not mended by a fourth."""
    assert answer_is_due("adapter", {"w0"}, 0)
    assert answer_is_due("patch", {"w0"}, 0)
    assert not answer_is_due("anchor", {"w0"}, 0)
    assert not answer_is_due("adapter", {"w0"}, 1)
    assert answer_is_due("adapter", {"w0", "w1"}, 2)
    assert not answer_is_due("adapter", {"w0", "w1"}, 3)


def test_old_adapters_are_collected_and_their_base_is_not(doors: Doors, model_folder: Path, tmp_path: Path) -> None:
    """The base stays for the adapters that are kept; a worker or an evaluation at an older adapter keeps that one."""
    publisher, base = Publisher(doors, model_folder=model_folder), a_base()
    publish(publisher, 0, base, whole=True)
    for version in range(1, 10):
        publish(publisher, version, base)
    publisher.close()
    beat(doors, needs=0)  # a worker that holds nothing but the base
    assert retirement(doors, pinned=(0, 5)).sweep(0.0) == 5
    beat(doors, needs=4)
    collector = retirement(doors)
    assert collector.sweep(0.0) == 5  # said before, and never taken back
    beat(doors, needs=9)
    assert collector.sweep(0.0) == 8
    collector.sweep(GRACE_S)
    assert versions(doors) == {0, 8, 9}
    assert_served(doors, head_manifest(doors), base, tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_reads_what_is_published(model_folder: Path, tmp_path: Path) -> None:
    """The folder is PEFT's own format: upon the base, its model computes what the trained module computes."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def model() -> Any:
        return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    trained = model()
    adapter.attach(trained, Lora(rank=3, alpha=8.0, targets=("q_proj", "down_proj")))
    found = {}
    for name, (down, up, _) in adapter.factors(trained).items():
        torch.nn.init.normal_(up, std=0.5)
        layer = name.removesuffix(".base_layer.weight")
        found[published_name(f"{layer}.lora_A.weight")] = down.detach()
        found[published_name(f"{layer}.lora_B.weight")] = up.detach()
    config = adapter.config(trained)
    assert config is not None
    save_file(found, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes(config.to_json())
    served = PeftModel.from_pretrained(model(), str(tmp_path))
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        plain, expected, got = (one(input_ids=ids).logits for one in (model(), trained, served))
    torch.testing.assert_close(got, expected)
    assert (got - plain).abs().max() > 0.1


def refuse(doors: Doors, manifest: BlobRef) -> None:
    fact = WeightsRefused(
        run_id=doors.run_id, worker_id="w0", version=1, manifest=manifest, serving=None, reason="an object is gone"
    )
    doors.bus.publish(subjects.weights_refused(doors.run_id), fact, msg_id="refusal").wait()


def _manifests(doors: Doors) -> list[VersionManifest]:
    keys = [stat.key for stat in doors.blobs.list(blob_keys.all_weights_prefix(doors.run_id))]
    return [VersionManifest.from_json(doors.blobs.get_unverified(key)) for key in keys if key.endswith("manifest.json")]


def _written(doors: Doors, version: int) -> Written:
    manifest = head_manifest(doors)
    reference = head_of(doors).manifest
    while manifest.version != version:
        assert manifest.parent is not None
        reference = manifest.parent.manifest
        manifest = manifest_of(doors, reference)
    return Written(manifest, reference)
