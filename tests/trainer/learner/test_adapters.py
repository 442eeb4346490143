"""Publishing adapters: the base once, then factors alone; later sessions, repairs and garbage collection."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.servers import wait_for
from tests.trainer.publishing.test_publish import head_of, manifest_of
from tests.trainer.publishing.test_weight_gc import GRACE_S, beat, collector, versions
from tests.weights_source import NEVER, adapter_base
from torch import Tensor

from penstock.protocol import blob_keys, subjects
from penstock.protocol.facts import WeightsPublished, WeightsRefused
from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterConfig, factor_names
from penstock.protocol.weights.export import export_adapter, export_version
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.version_reader import WeightReader
from penstock.trainer.connections import Connections
from penstock.trainer.errors import PublicationFailed, UnsupportedModel
from penstock.trainer.learner import adapter
from penstock.trainer.learner.adapter import Lora
from penstock.trainer.publishing.publish import Publisher, republication_is_due
from penstock.trainer.publishing.version_writer import Written
from penstock.trainer.publishing.weight_buckets import AdapterBase, AdapterWeights, ModelWeights, Snapshot

CONFIG = AdapterConfig(r=2, lora_alpha=6.0, target_modules=("q",))


def test_published_adapters_are_loaded_into_a_model(tmp_path: Path) -> None:
    """As they were written, on the same layers; those of another rank, or of other layers, are refused."""

    def adapted(seed: int, **changes: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            OrderedDict(a=torch.nn.Linear(4, 4, bias=False), b=torch.nn.Linear(4, 4, bias=False))
        )
        adapter.attach(module, Lora(**{"rank": 2, "alpha": 6.0, "targets": ("a",), "seed": seed, **changes}))
        return module

    trained, begun = adapted(1), adapted(2)
    written = adapter.config(trained)
    assert written is not None
    tensors = {}
    for name, (down, up, _) in adapter.factors(trained).items():
        torch.nn.init.normal_(up)
        tensors |= dict(zip(factor_names(name.removesuffix(".base_layer.weight")), (down, up), strict=True))
    save_file({name: tensor.detach() for name, tensor in tensors.items()}, tmp_path / ADAPTER_WEIGHTS)
    (tmp_path / ADAPTER_CONFIG).write_bytes(written.to_json())
    given = torch.randn(3, 4)
    assert not torch.equal(begun(given), trained(given))
    adapter.load(begun, tmp_path)
    assert torch.equal(begun(given), trained(given))
    name = factor_names("a")[1]
    for changes, refused in (
        ({"rank": 3, "alpha": 9.0}, r"a\.lora_A\.weight has shape \(2, 4\), expected \(3, 4\)"),
        ({"alpha": 2.0}, "of rank 2 and alpha 6, and model.lora makes others"),
        ({"targets": ("b",)}, r"2 tensors are missing, such as base_model\.model\.b\.lora_A"),
        ({"targets": ("a", "b")}, "2 tensors are missing"),
    ):
        with pytest.raises(UnsupportedModel, match=refused):
            adapter.load(adapted(1, **changes), tmp_path)
    save_file(
        {n: t.detach() + (torch.nan if n == name else 0.0) for n, t in tensors.items()}, tmp_path / ADAPTER_WEIGHTS
    )
    with pytest.raises(UnsupportedModel, match=f"{name} has a value that is not finite"):
        adapter.load(begun, tmp_path)


def a_base(seed: int = 0) -> AdapterBase:
    generator = torch.Generator().manual_seed(seed)
    return adapter_base({"q.weight": torch.randn((8, 4), generator=generator), "norm": torch.ones(4)}, CONFIG)


def factors(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    names = {"A": (2, 4), "B": (8, 2)}
    return {f"base_model.model.q.lora_{x}.weight": torch.randn(s, generator=generator) for x, s in names.items()}


def publish(publisher: Publisher, version: int, base: AdapterBase, *, whole: bool = False) -> None:
    number = PolicyVersion(version)
    weights = ModelWeights(base.buckets) if whole else AdapterWeights.of(factors(version), base)
    publisher.submit(Snapshot(number, version, weights, "float32", must_publish=True))
    publisher.wait_until_published(number, 180.0)
    publisher.unpin(number)


def head_manifest(connections: Connections) -> VersionManifest:
    return manifest_of(connections, head_of(connections).manifest)


def assert_served(connections: Connections, manifest: VersionManifest, base: AdapterBase, folder: Path) -> None:
    """Assert that the version merges to base plus scale times factors, and that its PEFT folder holds its factors."""
    reader = WeightReader(connections.blobs, connections.run_id)
    export_version(manifest, folder / "merged", reader=reader, blobs=connections.blobs)
    export_adapter(manifest, folder / "peft", reader=reader, blobs=connections.blobs)
    found = load_file(folder / "merged" / "model-00001-of-00001.safetensors")
    own = factors(manifest.version)
    down, up = own["base_model.model.q.lora_A.weight"], own["base_model.model.q.lora_B.weight"]
    torch.testing.assert_close(found["q.weight"], base.buckets.tensors()["q.weight"] + 3.0 * up @ down)
    assert torch.equal(found["norm"], base.buckets.tensors()["norm"])
    stored = load_file(folder / "peft" / "adapter_model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in own.items())
    assert AdapterConfig.from_json((folder / "peft" / "adapter_config.json").read_bytes()) == CONFIG


def test_the_base_is_published_once_and_then_adapters_alone(
    connections: Connections, model_folder: Path, tmp_path: Path
) -> None:
    """Version 0 is the model; each later version is a small adapter on it, and becomes the head as any version does."""
    publisher, base = Publisher(connections, model_folder=model_folder), a_base()
    publish(publisher, 0, base, whole=True)
    publish(publisher, 1, base)
    publish(publisher, 2, base)
    publisher.close()
    manifest = head_manifest(connections)
    assert (manifest.version, manifest.kind, manifest.parent.version if manifest.parent else None) == (2, "adapter", 1)
    assert manifest.base is not None
    assert (manifest.base.version, manifest.base.state_root) == (0, base.root)
    assert manifest.state_root == AdapterWeights.of(factors(2), base).root()
    assert [file.name for file in manifest.model_files] == ["adapter_config.json"]
    assert manifest.num_words == 2 * 4 + 8 * 2
    assert_served(connections, manifest, base, tmp_path)


def test_a_later_session_finds_the_base_and_stores_nothing_twice(connections: Connections, model_folder: Path) -> None:
    """It uses the base of the session before; weights that equal the head's are announced, not published."""
    base = a_base()
    first = Publisher(connections, model_folder=model_folder)
    publish(first, 0, base, whole=True)
    publish(first, 1, base)
    first.close()
    before = versions(connections)
    second = Publisher(connections, model_folder=model_folder, epoch=1)
    assert not second.versions.resume(AdapterWeights.of(factors(5), a_base()), "float32")
    assert second.versions.resume(AdapterWeights.of(factors(1), a_base()), "float32")
    assert second.versions.missing_base(AdapterWeights.of(factors(1), a_base())) is None
    assert second.versions.missing_base(AdapterWeights.of(factors(1), a_base(seed=1))) is not None
    publish(second, 2, a_base())
    second.close()
    assert versions(connections) - before == {2}
    assert head_manifest(connections).epoch == 1


def test_another_base_is_stored_and_never_becomes_the_head(
    connections: Connections, model_folder: Path, tmp_path: Path
) -> None:
    """As after a change of the published dtype: adapters are applied to the new base, which is not announced itself."""
    heard: list[int] = []
    subject = subjects.weights_published(connections.run_id)
    connections.bus.tail(
        f"{connections.run_id}-weights", subject, WeightsPublished, lambda fact: heard.append(fact.version)
    ).wait()
    publisher, base, other = Publisher(connections, model_folder=model_folder), a_base(), a_base(seed=1)
    publish(publisher, 0, base, whole=True)
    publish(publisher, 1, base)
    publisher.close()
    later = Publisher(connections, model_folder=model_folder, epoch=1)
    with pytest.raises(PublicationFailed, match="is not published"):
        publish(later, 2, other)
    later = Publisher(connections, model_folder=model_folder, epoch=1)
    later.versions.store_base(other, PolicyVersion(3), 1, "float32")
    publish(later, 4, other)
    later.close()
    wait_for(lambda: 4 in heard, "the announcement")
    assert heard == [0, 1, 4]
    assert_served(connections, head_manifest(connections), other, tmp_path)


def test_whole_models_and_adapters_may_follow_one_another(connections: Connections, model_folder: Path) -> None:
    """A session that publishes merged models continues after one that published adapters, and the reverse."""
    base = a_base()
    publisher = Publisher(connections, model_folder=model_folder, policy=NEVER)
    publish(publisher, 0, base, whole=True)
    publish(publisher, 1, base)
    publish(publisher, 2, a_base(seed=2), whole=True)
    publish(publisher, 3, a_base(seed=3), whole=True)
    publisher.close()
    kinds = {m.version: m.kind for m in _manifests(connections)}
    assert kinds == {0: "anchor", 1: "adapter", 2: "anchor", 3: "patch"}
    later = Publisher(connections, model_folder=model_folder, epoch=1)
    assert later.versions.missing_base(AdapterWeights.of(factors(6), base)) is base
    later.versions.store_base(base, PolicyVersion(5), 3, "float32")
    publish(later, 6, base)
    later.close()
    assert head_manifest(connections).parent == _written(connections, 3).as_ancestor


def test_a_refused_adapter_is_published_again_with_an_intact_base(
    connections: Connections, model_folder: Path, tmp_path: Path
) -> None:
    """One refusal suffices. A damaged base is stored again under its own number; the state root is the same."""
    publisher, base = Publisher(connections, model_folder=model_folder), a_base()
    publish(publisher, 0, base, whole=True)
    publish(publisher, 1, base)
    before = head_of(connections)
    root = head_manifest(connections).state_root
    shard = _written(connections, 0).manifest.objects[0]
    connections.blobs.delete([shard.key])
    refuse(connections, before.manifest)
    wait_for(lambda: head_of(connections).manifest != before.manifest, "the answer")
    answer = head_manifest(connections)
    assert (answer.version, answer.kind, answer.state_root) == (1, "adapter", root)
    assert answer.base is not None
    assert answer.base.version == 0
    assert_served(connections, answer, base, tmp_path)
    publish(publisher, 2, base)
    assert head_manifest(connections).base == answer.base
    publisher.close()


def test_republications_end_where_they_do_not_help() -> None:
    """A version that one worker refuses twice, or that all refuse three times, is not published again."""
    assert republication_is_due("adapter", {"w0"}, 0)
    assert republication_is_due("patch", {"w0"}, 0)
    assert not republication_is_due("anchor", {"w0"}, 0)
    assert not republication_is_due("adapter", {"w0"}, 1)
    assert republication_is_due("adapter", {"w0", "w1"}, 2)
    assert not republication_is_due("adapter", {"w0", "w1"}, 3)


def test_old_adapters_are_collected_and_their_base_is_kept(
    connections: Connections, model_folder: Path, tmp_path: Path
) -> None:
    publisher, base = Publisher(connections, model_folder=model_folder), a_base()
    publish(publisher, 0, base, whole=True)
    for version in range(1, 10):
        publish(publisher, version, base)
    publisher.close()
    beat(connections, needs=0)  # a worker that holds only the base
    assert collector(connections, pinned=(0, 5)).sweep(0.0) == 5
    beat(connections, needs=4)
    gc = collector(connections)
    assert gc.sweep(0.0) == 5  # the floor never falls
    beat(connections, needs=9)
    assert gc.sweep(0.0) == 8
    gc.sweep(GRACE_S)
    assert versions(connections) == {0, 8, 9}
    assert_served(connections, head_manifest(connections), base, tmp_path)


def refuse(connections: Connections, manifest: BlobRef) -> None:
    fact = WeightsRefused(
        run_id=connections.run_id,
        worker_id="w0",
        version=1,
        manifest=manifest,
        serving=None,
        reason="an object is gone",
    )
    connections.bus.publish(subjects.weights_refused(connections.run_id), fact, msg_id="refusal").wait()


def _manifests(connections: Connections) -> list[VersionManifest]:
    keys = [stat.key for stat in connections.blobs.list(blob_keys.all_weights_prefix(connections.run_id))]
    return [
        VersionManifest.from_json(connections.blobs.get_unverified(key))
        for key in keys
        if key.endswith("manifest.json")
    ]


def _written(connections: Connections, version: int) -> Written:
    manifest = head_manifest(connections)
    reference = head_of(connections).manifest
    while manifest.version != version:
        assert manifest.parent is not None
        reference = manifest.parent.manifest
        manifest = manifest_of(connections, reference)
    return Written(manifest, reference)


def test_a_score_is_no_target() -> None:
    """A reward model's score is trained whole: as a target of adapters it is refused, before anything is changed."""
    model = torch.nn.ModuleDict({"score": torch.nn.Linear(2, 1)})
    with pytest.raises(UnsupportedModel, match="score is trained whole, beside the adapters; leave it out"):
        adapter.attach(model, Lora(2, 4.0, targets=("q_proj", "model.score")), head="score")
    assert isinstance(model["score"], torch.nn.Linear)
