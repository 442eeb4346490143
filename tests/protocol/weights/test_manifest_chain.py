"""Chains of versions: every verified path to the head ends at the same bytes, and no broken link is followed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.protocol.weights.published_weights import LAYOUT, PublishedWeights, changed_state, held_of, random_state

from penstock.protocol.errors import ChainBroken, MalformedFact
from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.manifest_chain import CatchUp, Held, plan_catch_up, verify_anchor, verify_link

DENSITIES = st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.9])


def a_run(num_patches: int, *, seed: int = 0, density: float = 0.02) -> tuple[PublishedWeights, list[VersionManifest]]:
    rng = np.random.default_rng(seed)
    run = PublishedWeights()
    manifests = [run.publish_anchor(random_state(rng))]
    manifests.extend(run.publish(changed_state(run.state, rng, density)) for _ in range(num_patches))
    return run, manifests


@given(st.integers(0, 2**32), st.lists(st.tuples(DENSITIES, st.sampled_from("pppaA")), min_size=1, max_size=8))
@examples(60)
def test_every_path_to_the_head_ends_at_the_same_bytes(seed: int, history: list[tuple[float, str]]):
    """From nothing, and from every version ever published, a mirror reaches exactly the trainer's bytes."""
    rng = np.random.default_rng(seed)
    run = PublishedWeights()
    versions = [(run.publish_anchor(random_state(rng)), run.state)]
    for density, kind in history:
        state = changed_state(run.state, rng, density)
        manifest = run.publish_anchor(state) if kind == "A" else run.publish(state)
        if kind == "a":
            run.add_anchor()
        versions.append((manifest, state))
    starts = [(None, []), *((held_of(manifest), state) for manifest, state in versions)]
    for held, state in starts:
        plan = run.plan(held)
        reached = run.carry_out(plan, state)
        assert all(np.array_equal(got, want) for got, want in zip(reached, run.state, strict=True))
        assert plan.num_bytes <= run.plan(None).num_bytes


def test_a_mirror_reads_what_it_lacks_and_no_other_manifest():
    """One behind a patch, one not behind, one behind a full snapshot; an empty one starts from the full snapshot."""
    run, manifests = a_run(5)
    plan = run.plan(held_of(manifests[-2]))
    assert (plan.anchor, [m.version for m in plan.patches], run.num_fetched) == (None, [5], 0)
    assert run.plan(held_of(manifests[-1])).manifests == ()
    assert [m.version for m in run.plan(None).manifests] == [0, 1, 2, 3, 4, 5]
    num_fetched = run.num_fetched
    run.publish_anchor(run.state)
    assert [m.version for m in run.plan(held_of(manifests[1])).manifests] == [6]
    assert run.num_fetched == num_fetched


def test_a_long_chain_of_patches_is_replaced_by_an_anchor():
    rng = np.random.default_rng(0)
    run = PublishedWeights()
    start = run.publish_anchor(random_state(rng))
    for _ in range(8):
        recent = run.publish(changed_state(run.state, rng, 0.4))
    run.add_anchor()
    for _ in range(2):
        run.publish(changed_state(run.state, rng, 0.02))
    far = run.plan(held_of(start))
    assert far.anchor is not None
    assert [m.version for m in far.manifests] == [8, 9, 10]
    assert [m.version for m in run.plan(held_of(recent)).manifests] == [9, 10]


def test_a_mirror_with_other_bytes_starts_from_the_anchor():
    """A parent with another root or from another trainer process is refused."""
    run, manifests = a_run(3)
    for held in (
        Held(PolicyVersion(2), "0" * 64),
        Held(PolicyVersion(3), "0" * 64),
        Held(PolicyVersion(99), manifests[1].state_root),
    ):
        plan = run.plan(held)
        assert plan.anchor is not None
        assert plan.anchor.version == 0


def test_a_chain_without_end_is_cut():
    """More parents than allowed without an anchor are an error with a fix."""
    run, _ = a_run(6)
    with pytest.raises(ChainBroken, match="no full snapshot within 4 parents; publish one"):
        run.plan(None, max_hops=4)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"version": 1}, "parent"),
        ({"state_root": "0" * 64}, "parent"),
        ({"epoch": 9}, "lease 1 after its parent's 9"),
        ({"run_id": "other"}, "run and layout"),
        ({"layout": BlobRef(key="l", size_bytes=1, sha256="1" * 64)}, "run and layout"),
        ({"buckets": ()}, "number of buckets"),
    ],
)
def test_a_link_that_does_not_fit_is_not_followed(fields: dict, match: str):
    """A parent of another version, state, lease, run, layout or size is refused."""
    _, manifests = a_run(3)
    verify_link(manifests[3], manifests[2])
    with pytest.raises(ChainBroken, match=match):
        verify_link(manifests[3], manifests[2].model_copy(update=fields))


def test_a_patch_on_another_base_is_not_followed():
    run, manifests = a_run(3)
    other = manifests[2].buckets[1].model_copy(update={"new_xxh3": "0" * 32})
    buckets = (manifests[2].buckets[0], other, *manifests[2].buckets[2:])
    with pytest.raises(ChainBroken, match="bucket 1 of version 2"):
        verify_link(manifests[3], manifests[2].model_copy(update={"buckets": buckets}))
    forged = manifests[2].model_copy(update={"buckets": buckets})
    head = manifests[3]
    assert head.parent is not None
    with pytest.raises(ChainBroken, match="bucket 1"):
        plan_catch_up(head, {head.parent.manifest.sha256: forged}, None)
    assert run.anchor is not None
    with pytest.raises(ChainBroken, match="anchor"):
        verify_anchor(manifests[1], run.anchor, manifests[1])


def test_a_manifest_contains_the_number_of_changes():
    """Density and bytes follow from the buckets; what is stored for a version is listed once."""
    run, (anchor, patch) = a_run(1)
    assert anchor.density == 1.0
    assert anchor.num_words == LAYOUT.num_words == patch.num_words
    assert 0 < patch.density < 0.1
    assert patch.num_bytes == len(run.objects["p1"])
    assert [blob.key for blob in patch.references()] == ["layout", "p1"]
    assert patch.layout_id == LAYOUT.layout_id
    assert isinstance(run.plan(None), CatchUp)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kind": "anchor"}, "every bucket of a patch is a change, and none of another kind"),
        ({"parent": None}, "a parent is needed"),
        ({"version": 0}, "cannot build on version 0"),
        ({"objects": ()}, "object 0 of 0"),
        ({"objects": ({"key": "p", "size_bytes": 3, "sha256": "0" * 64},)}, "of an object of 3"),
        ({"codec": "none"}, "has no stored bytes"),
        ({"stored": None}, "needs stored bytes"),
        ({"base_xxh3": None}, "a patch has a base"),
        ({"codec": "none", "stored": None}, "must be equal"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(fields: dict, match: str):
    """Kind, ancestors and ranges must agree, and codec, bytes, counts and hashes of a bucket; the field is named."""
    _, (_, patch) = a_run(1)
    assert VersionManifest.from_json(patch.to_json()) == patch
    wire = json.loads(patch.to_json())
    (wire["buckets"][0] if fields.keys() & wire["buckets"][0].keys() else wire).update(fields)
    with pytest.raises(MalformedFact, match=match):
        VersionManifest.from_json(json.dumps(wire).encode())
