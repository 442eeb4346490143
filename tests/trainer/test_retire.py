"""Garbage: what nobody can need goes, in two acts; what a living worker, an evaluation or a late joiner needs stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deploy.quickstart_task import write_model
from protocol import blob_keys, streams
from protocol.facts import Heartbeat, RetirementFloor, decode, encode
from protocol.transport.blobs import Blobs
from protocol.transport.bus import Bus
from protocol.versions import PolicyVersion
from protocol.weight_reader import WeightReader
from protocol.weight_retention import AnchorPolicy
from tests.trainer.test_publish import assert_head_is, tensors
from tests.weights_source import WeightsSource, read_version
from trainer.doors import Doors
from trainer.head import read_head
from trainer.retire import Retention, Retirement

GRACE_S = 100.0


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder for config and tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "model"
    write_model(folder, seed=0)
    return folder


@pytest.fixture
def doors(bus: Bus, blobs: Blobs, ring_streams: str, model_folder: Path) -> Doors:
    """A run with versions 0 to 12 and anchors of 0, 3, 6, 9 and 12."""
    source = WeightsSource(bus, blobs, ring_streams, model_folder, policy=AnchorPolicy(1e9, 3))
    for version in range(14):
        source.publish(version, tensors(version))
    return Doors(ring_streams, bus, blobs)


def retirement(doors: Doors, *, pinned: tuple[int, ...] = (), orphan_s: float = 1e9) -> Retirement:
    versions = [PolicyVersion(version) for version in pinned]
    return Retirement(doors, Retention(2, GRACE_S, orphan_s), pinned=lambda: versions, holder="test")


def versions(doors: Doors, ending: str = "") -> set[int]:
    prefix = blob_keys.all_weights_prefix(doors.run_id)
    stored = [stat.key for stat in doors.blobs.list(prefix) if stat.key.endswith(ending)]
    return {blob_keys.version_of_weights(doors.run_id, key) for key in stored}


def beat(doors: Doors, needs: int) -> None:
    fact = Heartbeat(role="rollout", service_id="w0", at=0.0, state="", needs_version=needs)
    live = doors.bus.key_value(streams.live_bucket(doors.run_id).bucket).wait()
    live.put(streams.heartbeat_key("rollout", "w0"), encode(fact)).wait()


def test_manifests_go_first_and_objects_after_the_grace_period(doors: Doors) -> None:
    """Below the anchor before the newest nothing is kept: no new reader may start, then the bytes go."""
    collector = retirement(doors)
    assert collector.sweep(0.0) == 9
    floor = doors.bus.key_value(streams.state_bucket(doors.run_id).bucket).wait().get(streams.FLOOR_KEY).wait()
    assert floor is not None
    assert decode(floor.value, RetirementFloor).version == 9
    assert versions(doors, "manifest.json") == set(range(9, 14))
    assert versions(doors) == set(range(14))
    collector.sweep(GRACE_S - 1)
    assert versions(doors) == set(range(14))
    collector.sweep(GRACE_S)
    assert versions(doors) == set(range(9, 14))
    assert_head_is(doors, 13)


def test_what_a_worker_or_an_evaluation_needs_stays(doors: Doors) -> None:
    """The floor is the anchor below the oldest version that anybody alive still reads."""
    beat(doors, needs=7)
    assert retirement(doors).sweep(0.0) == 6
    assert retirement(doors, pinned=(4,)).sweep(0.0) == 6  # what is gone is gone: the floor only rises
    assert versions(doors, "manifest.json") == set(range(6, 14))


def test_a_pinned_version_stays(doors: Doors) -> None:
    """An evaluation's version can be put together as long as it is pinned, from the anchor that it names."""
    head = read_head(doors.bus.key_value(streams.state_bucket(doors.run_id).bucket).wait())
    assert head is not None
    plan_to = WeightReader(doors.blobs, doors.run_id)
    manifest = plan_to.manifest(head.manifest, PolicyVersion(13))
    while manifest.version > 6:
        assert manifest.parent is not None
        reference = manifest.parent.manifest
        manifest = plan_to.manifest(reference, PolicyVersion(manifest.parent.version))
    collector = retirement(doors, pinned=(6,))
    assert collector.sweep(0.0) == 3  # version 6 is a patch from anchor 3, and has an anchor beside it
    collector.sweep(GRACE_S)
    assert versions(doors) == set(range(3, 14))
    found = read_version(doors.blobs, doors.run_id, 6, reference)
    assert torch.equal(found["a"], tensors(6)["a"])


def test_orphans_go_when_they_are_old(doors: Doors) -> None:
    """A pack that no manifest names goes after a while, not before; nothing that is named goes."""
    key = blob_keys.weights_pack(doors.run_id, PolicyVersion(13), "deadbeef", rank=0)
    doors.blobs.put(key, b"segments of a publisher that was killed")
    before = versions(doors)
    retirement(doors, orphan_s=1e9).sweep(0.0)
    assert doors.blobs.exists(key)
    retirement(doors, orphan_s=0.0).sweep(0.0)
    assert not doors.blobs.exists(key)
    assert versions(doors) == before
    assert_head_is(doors, 13)


def test_one_collects(doors: Doors) -> None:
    """The right to collect is a lease: while one has it nobody else sweeps."""
    first, second = retirement(doors), Retirement(doors, Retention(2, 0.0, 0.0), pinned=list, holder="other")
    assert first._has_lease()
    assert not second._has_lease()
    assert first._has_lease()
