"""`penstock weights`: list the versions of a run, export one as a model folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.console.record import recorded_run as recorded
from tests.weights_source import WeightsSource, adapter_base
from transformers import AutoModelForCausalLM

from penstock.console.connections import NamedRun
from penstock.console.tools.weights import export, print_versions
from penstock.deploy.certificates import signing_key
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import KeptVersion
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import AdapterConfig, published_name
from penstock.protocol.weights.signature import SigningKey
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.rank_publisher import PublishCoordinator, RankPublisher
from penstock.trainer.publishing.version_writer import Content, Label, VersionWriter
from penstock.trainer.publishing.weight_buckets import ModelWeights, copy_to_buckets
from penstock.trainer.publishing.weight_gc import Retention, WeightGc
from penstock.trainer.publishing.weight_retention import KeepRule

State = dict[str, torch.Tensor]
Listed = Callable[[], tuple[list[dict[str, Any]], str]]


@pytest.fixture
def run(typed: list[str], run_streams: str) -> NamedRun:
    return NamedRun(run_streams, typed, {})


@pytest.fixture
def listed(run: NamedRun, capsys: pytest.CaptureFixture[str]) -> Listed:
    """List the versions of the run: as rows, and as printed with what is on stderr."""

    def print_both() -> tuple[list[dict[str, Any]], str]:
        assert print_versions(run, as_json=True) == 0
        rows = json.loads(capsys.readouterr().out)
        assert print_versions(run, as_json=False) == 0
        return rows, "".join(capsys.readouterr())

    return print_both


def loaded(folder: Path) -> State:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def assert_same(folder: Path, expected: State) -> None:
    state = loaded(folder)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.fixture
def states(bus: Bus, blobs: Blobs, run_streams: str, tmp_path: Path) -> list[State]:
    """The published weights of versions 0 to 3: a full snapshot and three patches."""
    folder = tmp_path / "model"
    write_model(folder, seed=0)
    source = WeightsSource(bus, blobs, run_streams, folder, bucket_bytes=100_000)
    states = [load_file(folder / "model.safetensors")]
    source.publish(0, states[0])
    for version in range(1, 4):
        state = {name: tensor.clone() for name, tensor in states[-1].items()}
        for tensor in state.values():
            tensor.view(-1)[version::100] += 0.5
        states.append(state)
        source.publish(version, state)
    return states


def test_versions_are_listed(bus: Bus, run: NamedRun, states: list[State], listed: Listed) -> None:
    """Each with parent, kind, density, bytes, seconds and the workers that serve it; the head is marked."""
    announced = recorded.event("weights", 1.0, version=3, publish_s=0.25)
    recorded.Services(bus, run.id).say(recorded.applied("w0", 2), announced)
    rows, printed = listed()
    assert [(row["version"], row["parent"], row["kind"]) for row in rows] == [
        (0, None, "anchor"), (1, 0, "patch"), (2, 1, "patch"), (3, 2, "patch"),
    ]  # fmt: skip
    assert [row["head"] for row in rows] == [False, False, False, True]
    assert [row["served_by"] for row in rows] == [[], [], ["w0"], []]
    assert rows[3]["seconds"] == 0.25
    assert 0.005 < rows[3]["density"] < 0.02
    assert rows[3]["bytes"] < 0.1 * rows[0]["bytes"]
    assert f"penstock weights export {run} --version 3" in printed


def test_a_version_is_exported_as_a_model_folder(run: NamedRun, states: list[State], tmp_path: Path) -> None:
    """Full snapshot and patches become a folder that transformers loads, bit for bit the published weights."""
    assert export(run, 2, tmp_path / "v2") == 0
    assert_same(tmp_path / "v2", states[2])
    for version, message in ((2, "exists; name another folder"), (9, "has no version 9")):
        with pytest.raises(ConfigError, match=message):
            export(run, version, tmp_path / f"v{version}")


def test_kept_versions_are_listed_with_the_reason_and_the_best_one_is_exported(
    bus: Bus, run: NamedRun, states: list[State], tmp_path: Path, listed: Listed, blobs: Blobs
) -> None:
    """They stay listed and exportable when the chain from the head no longer reaches them; a deleted one is answered with what is stored."""
    with pytest.raises(ConfigError, match="has no evaluated version: name one with --version"):
        export(run, None, tmp_path / "none")
    gc = WeightGc(
        Connections(run.id, bus, blobs), Retention(2, 0.0, 1e9, KeepRule(1, 2, 1)), pinned=list, holder="test"
    )
    gc.kept.add_result(KeptVersion(version=1, step=1, measure="gsm8k ≥ 1", score=0.75))
    gc.sweep(0.0)
    [manifest] = [s.key for s in blobs.list(f"runs/{run}/weights/v00000002/") if "manifest" in s.key]
    blobs.delete([manifest])  # as a sweep with a higher floor does
    rows, printed = listed()
    kept = {row["version"]: row["kept"] for row in rows}
    assert kept[1] == {"best": {"rank": 1, "score": 0.75, "measure": "gsm8k ≥ 1"}, "milestone": False, "for": []}
    assert kept[0]["for"] == [1]
    assert sorted(kept) == [0, 1, 3]
    assert "best: 0.750 (gsm8k ≥ 1)" in " ".join(printed.split())
    assert f"penstock weights export {run} --best" in printed
    assert export(run, None, tmp_path / "best") == 0
    assert_same(tmp_path / "best", states[1])
    stored = r"has no version 2 in the object store; stored: 0-1, 3 \(best 1, milestone 2\)"
    with pytest.raises(ConfigError, match=stored):
        export(run, 2, tmp_path / "gone")


def test_adapters_are_listed_with_their_base_and_exported_either_way(
    bus: Bus, blobs: Blobs, run: NamedRun, tmp_path: Path, listed: Listed
) -> None:
    """An adapter names its base; it becomes a merged model that transformers loads, or a folder for PEFT."""
    folder = tmp_path / "model"
    write_model(folder, seed=0)
    source = WeightsSource(bus, blobs, run.id, folder)
    config = AdapterConfig(r=2, lora_alpha=4.0, target_modules=("q_proj",))
    base = adapter_base(load_file(folder / "model.safetensors"), config)
    source.publish(0, base.buckets.tensors())
    layer = "model.layers.0.self_attn.q_proj"
    layers = [name.removesuffix(".weight") for name in base.buckets.names if name.endswith("q_proj.weight")]
    sizes = {"lora_A": (2, 64), "lora_B": (128, 2)}
    factors = {
        published_name(f"{one}.{part}.weight"): torch.randn(size) for one in layers for part, size in sizes.items()
    }
    source.publish(1, factors, base=base)
    rows, printed = listed()
    assert [(row["version"], row["parent"], row["kind"], row["base"]) for row in rows] == [
        (0, None, "anchor", None), (1, 0, "adapter", 0),
    ]  # fmt: skip
    assert rows[1]["bytes"] < 0.05 * rows[0]["bytes"]
    assert "adapter on 0" in printed
    assert export(run, 1, tmp_path / "merged") == 0
    down, up = (factors[published_name(f"{layer}.{part}.weight")] for part in sizes)
    merged = base.buckets.tensors()[f"{layer}.weight"] + 2.0 * up @ down
    torch.testing.assert_close(loaded(tmp_path / "merged")[f"{layer}.weight"], merged, rtol=1e-5, atol=1e-6)
    assert export(run, 1, tmp_path / "adapter", adapter=True) == 0
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in factors.items())
    with pytest.raises(ConfigError, match="is not an adapter; export it as a model"):
        export(run, 0, tmp_path / "none", adapter=True)


def test_a_version_that_a_killed_trainer_left_is_ignored(
    bus: Bus, run: NamedRun, blobs: Blobs, states: list[State], tmp_path: Path, listed: Listed
) -> None:
    """A version under a number that has another version in the head's chain is neither listed nor exported."""
    connections, buckets = Connections(run.id, bus, blobs), copy_to_buckets(states[3])
    coordinator = PublishCoordinator(RankPublisher(blobs, run.id))
    coordinator.own.hold(buckets)
    stored = coordinator.store_whole(buckets.copy_id, PolicyVersion(2))
    content = Content(buckets.layout, (), stored, ModelWeights(buckets).root())
    label = Label(PolicyVersion(2), 2, 0)
    VersionWriter(connections, tmp_path / "model").write("anchor", label, content, parent=None)
    assert [(row["kind"], row["anchor"]) for row in listed()[0]] == [("anchor", True), *[("patch", False)] * 3]
    assert export(run, 2, tmp_path / "v2") == 0
    assert_same(tmp_path / "v2", states[2])


def test_only_what_a_trusted_key_has_signed_is_exported(
    bus: Bus, blobs: Blobs, run: NamedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key file of the option or of the environment is used; a version of another key is as good as not stored."""
    write_model(tmp_path / "model", seed=0)
    private, public = signing_key(tmp_path / "own")
    source = WeightsSource(bus, blobs, run.id, tmp_path / "model", signing_key=SigningKey.from_file(private, "x"))
    source.publish(0, load_file(tmp_path / "model" / "model.safetensors"))
    assert export(run, 0, tmp_path / "v0", trusted_keys_file=public) == 0
    _, stranger = signing_key(tmp_path / "other")
    for option, environ in ((stranger, {}), (None, {"PENSTOCK_WORKER__TRUSTED_KEYS_FILE": str(stranger)})):
        with pytest.raises(ConfigError, match="has no version 0"):
            export(replace(run, environ=environ), 0, tmp_path / "no", trusted_keys_file=option)
        assert "cannot be read or trusted; the first: runs/" in capsys.readouterr().err


def test_a_manifest_of_another_run_is_left_out(
    run: NamedRun, blobs: Blobs, states: list[State], listed: Listed
) -> None:
    prefix = f"runs/{run}/weights/v00000003/"
    [own] = [stat.key for stat in blobs.list(prefix) if stat.key.endswith("/manifest.json")]
    document = json.loads(blobs.get_unverified(own)) | {"run_id": "other", "step": 99}
    blobs.put(f"{prefix}zz/manifest.json", json.dumps(document).encode())
    rows, printed = listed()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert f"{prefix}zz/manifest.json: it is of run other" in printed


def test_a_version_whose_objects_are_damaged_is_not_exported(
    run: NamedRun, blobs: Blobs, states: list[State], tmp_path: Path
) -> None:
    [pack] = [stat.key for stat in blobs.list(f"runs/{run}/weights/v00000001/") if stat.key.endswith(".pack")]
    blobs.put(pack, b"x" * 100)
    with pytest.raises(ConfigError, match=r"version 2 .* cannot be read"):
        export(run, 2, tmp_path / "v2")
    assert not list(tmp_path.glob("v2*"))
