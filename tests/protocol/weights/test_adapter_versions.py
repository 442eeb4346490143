"""Adapters as versions: their manifests, their names, and merging them into their base."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.protocol.weights.published_weights import ADAPTER_LAYOUT, PublishedWeights, held_of, random_state

from penstock.protocol.errors import ChainBroken, MalformedFact
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import AdapterConfig, adapter_digest
from penstock.protocol.weights.export import merge_into, read_factors
from penstock.protocol.weights.layout import TensorSpec, bucket_digests, build_layout
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.manifest_chain import Held, verify_base

RNG = np.random.default_rng(0)
RAW = RNG.standard_normal(ADAPTER_LAYOUT.num_words, np.float32)
RAW = (RAW.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)  # finite bfloat16


def an_adapter() -> tuple[PublishedWeights, VersionManifest, VersionManifest]:
    run = PublishedWeights()
    base = run.publish_anchor(random_state(RNG))
    return run, base, run.publish_adapter(RAW)


def test_an_adapter_is_read_alone_and_whole_from_any_version_of_a_mirror():
    """Its plan has one step, which fetches none of its base's bytes; a mirror that holds it fetches nothing."""
    run, base, adapter = an_adapter()
    for held in (None, held_of(base), Held(PolicyVersion(1), "0" * 64)):
        plan = run.plan(held)
        assert [m.version for m in plan.manifests] == [1]
        assert np.array_equal(run.carry_out(plan, [])[0], RAW)
    assert run.plan(held_of(adapter)).manifests == ()
    assert run.num_fetched == 0
    assert adapter.start == 1
    assert adapter.base is not None
    assert adapter.base.version == 0


def test_the_root_names_base_scale_and_factors():
    """Every change of the served weights changes the root: another model, another alpha, another bit of a factor."""
    _, base, adapter = an_adapter()
    assert adapter.base is not None
    digests = bucket_digests(ADAPTER_LAYOUT.buckets[0], RAW.data)
    config = adapter.model_files[0].blob.sha256
    roots = {
        adapter.state_root,
        adapter_digest("1" * 64, config, digests),
        adapter_digest(base.state_root, "1" * 64, digests),
        adapter_digest(base.state_root, config, [replace(digests[0], xxh3="1" * 32), digests[1]]),
        base.state_root,
    }
    assert adapter.root_of(digests) == adapter.state_root
    assert len(roots) == 5


def test_a_base_is_the_one_that_the_adapter_was_trained_on():
    """Another version, another state, another run, or a version that is no anchor is refused."""
    _, base, adapter = an_adapter()
    verify_base(adapter, base)
    for fields in ({"version": 7}, {"state_root": "0" * 64}, {"run_id": "other"}, {"kind": "patch"}):
        with pytest.raises(ChainBroken, match="base"):
            verify_base(adapter, base.model_copy(update=fields))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kind": "anchor"}, "an anchor is its own anchor"),
        ({"kind": "patch"}, "every bucket of a patch is a change"),
        ({"kind": "lora"}, "kind"),
        ({"anchor": None}, "every other kind needs one"),
        ({"model_files": []}, "adapter_config.json"),
        ({"buckets": []}, "one bucket, got 0"),
        ({"version": 0}, "cannot build on version 0"),
    ],
)
def test_a_manifest_of_an_adapter_that_contradicts_itself_is_refused(fields: dict, match: str):
    _, _, adapter = an_adapter()
    assert VersionManifest.from_json(adapter.to_json()) == adapter
    with pytest.raises(MalformedFact, match=match):
        VersionManifest.from_json(json.dumps(json.loads(adapter.to_json()) | fields).encode())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_merging_is_what_torch_computes(dtype: str):
    """W + alpha / r B A, summed in float32 and rounded once: to within one unit in the last place, other weights unchanged."""
    generator = torch.Generator().manual_seed(3)
    kind = getattr(torch, dtype)
    weight, down, up = (torch.randn(shape, generator=generator).to(kind) for shape in ((6, 5), (3, 5), (6, 3)))
    config = AdapterConfig(r=3, lora_alpha=8.0, target_modules=("q",))
    layout = build_layout([TensorSpec("q.weight", dtype, (6, 5)), TensorSpec("z", dtype, (4,))])
    names = {"base_model.model.q.lora_A.weight": down, "base_model.model.q.lora_B.weight": up}
    adapter = build_layout([TensorSpec(name, dtype, tuple(t.shape)) for name, t in names.items()])
    factors = read_factors(config, adapter, _bytes(down, up), layout)
    raw = _bytes(weight, torch.full((4,), torch.nan, dtype=kind))
    before = raw.copy()
    merge_into(raw, layout.buckets[0], factors, config.scale)
    found = torch.from_numpy(raw)[: weight.nbytes].view(kind).reshape(6, 5)
    expected = weight.float() + (8.0 / 3) * (up.float() @ down.float())
    torch.testing.assert_close(found, expected.to(kind), rtol=torch.finfo(kind).eps, atol=1e-6)
    assert not torch.equal(found, weight)
    assert np.array_equal(raw[weight.nbytes :], before[weight.nbytes :])


def test_bfloat16_is_rounded_as_torch_rounds():
    """Ties go to even, the largest becomes infinite, NaN is kept: bit for bit as torch."""
    bits = np.concatenate(
        [RNG.integers(0, 2**32, 4096, dtype=np.uint32), np.arange(0x7F7F8000, 0x7F808001, 0x4000, dtype=np.uint32)]
    )
    values = bits.view(np.float32)
    values = np.concatenate([values[np.isfinite(values)], np.float32([0.0, -0.0, 1.00390625, 1.01171875])])
    layout = build_layout([TensorSpec("q.weight", "bfloat16", (len(values), 1))])
    one = torch.ones((1, 1))
    adapter = build_layout(
        [
            TensorSpec(f"base_model.model.q.lora_{x}.weight", "float32", s)
            for x, s in (("A", (1, 1)), ("B", (len(values), 1)))
        ]
    )
    config = AdapterConfig(r=1, lora_alpha=1.0, target_modules=("q",))
    factors = read_factors(config, adapter, _bytes(one, torch.from_numpy(values.copy())), layout)
    raw = np.zeros(layout.num_bytes, np.uint8)
    merge_into(raw, layout.buckets[0], factors, config.scale)
    expected = (torch.zeros(len(values)) + torch.from_numpy(values.copy())).bfloat16()
    assert torch.equal(torch.from_numpy(raw).view(torch.bfloat16).view(torch.int16), expected.view(torch.int16))


def _bytes(*tensors: torch.Tensor) -> np.ndarray:
    return np.concatenate([t.contiguous().reshape(-1).view(torch.uint8).numpy() for t in tensors])
