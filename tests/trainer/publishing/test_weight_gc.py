"""Garbage collection deletes in two steps, and keeps what a live worker, an evaluation or a late worker needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.trainer.publishing.test_publish import assert_head_is, tensors
from tests.weights_source import WeightsSource, read_version

from penstock.protocol import blob_keys, streams
from penstock.protocol.errors import BusUnreachable
from penstock.protocol.facts import Heartbeat, KeptVersion, RetirementFloor, decode, encode
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.version_reader import WeightReader
from penstock.trainer.connections import Connections
from penstock.trainer.publishing.publication import read_head
from penstock.trainer.publishing.weight_gc import Retention, WeightGc, holds_lease
from penstock.trainer.publishing.weight_retention import FullSnapshotPolicy, KeepRule

GRACE_S = 100.0


@pytest.fixture
def connections(bus: Bus, blobs: Blobs, run_streams: str, model_folder: Path) -> Connections:
    """A run with versions 0 to 13 and full snapshots of 0, 3, 6, 9 and 12."""
    source = WeightsSource(bus, blobs, run_streams, model_folder, policy=FullSnapshotPolicy(1e9, 3))
    for version in range(14):
        source.publish(version, tensors(version))
    return Connections(run_streams, bus, blobs)


def collector(
    connections: Connections, *, pinned: tuple[int, ...] = (), orphan_s: float = 1e9, keep: KeepRule | None = None
) -> WeightGc:
    versions = [PolicyVersion(version) for version in pinned]
    retention = Retention(2, GRACE_S, orphan_s, keep or KeepRule())
    return WeightGc(connections, retention, pinned=lambda: versions, holder="test")


def evaluated(version: int, score: float) -> KeptVersion:
    return KeptVersion(version=version, step=version, measure="m", score=score)


def assert_readable(connections: Connections, kept: KeptVersion) -> None:
    assert kept.manifest is not None
    found = read_version(connections.blobs, connections.run_id, kept.version, kept.manifest)
    assert torch.equal(found["a"], tensors(kept.version)["a"])


def versions(connections: Connections, ending: str = "") -> set[int]:
    prefix = blob_keys.all_weights_prefix(connections.run_id)
    stored = [stat.key for stat in connections.blobs.list(prefix) if stat.key.endswith(ending)]
    return {blob_keys.version_of_weights(connections.run_id, key) for key in stored}


def beat(connections: Connections, needs: int) -> None:
    fact = Heartbeat(role="rollout", service_id="w0", at=0.0, state="", needs_version=needs)
    live = connections.bus.key_value(streams.live_bucket(connections.run_id).bucket).wait()
    live.put(streams.heartbeat_key("rollout", "w0"), encode(fact)).wait()


def test_manifests_are_deleted_first_and_objects_after_the_grace_period(connections: Connections) -> None:
    """Nothing is kept below the full snapshot before the newest: manifests are deleted immediately, objects later."""
    gc = collector(connections)
    assert gc.sweep(0.0) == 9
    floor = (
        connections.bus.key_value(streams.state_bucket(connections.run_id).bucket).wait().get(streams.FLOOR_KEY).wait()
    )
    assert floor is not None
    assert decode(floor.value, RetirementFloor).version == 9
    assert versions(connections, "manifest.json") == set(range(9, 14))
    assert versions(connections) == set(range(14))
    gc.sweep(GRACE_S - 1)
    assert versions(connections) == set(range(14))
    gc.sweep(GRACE_S)
    assert versions(connections) == set(range(9, 14))
    assert_head_is(connections, 13)


def test_a_finished_run_leaves_only_what_is_kept(connections: Connections) -> None:
    """At the exit there is no grace period; what a worker still needs stays, and an unfinished run deletes nothing."""
    with collector(connections):
        pass
    assert versions(connections) == set(range(14))
    with collector(connections) as gc:
        gc.run_is_finished()
    assert versions(connections) == versions(connections, "manifest.json") == {*range(9, 14)}
    assert_head_is(connections, 13)


def test_what_a_worker_or_an_evaluation_needs_is_kept(connections: Connections) -> None:
    """The floor is the full snapshot below the oldest version that a live worker still reads."""
    beat(connections, needs=7)
    assert collector(connections).sweep(0.0) == 6
    assert collector(connections, pinned=(4,)).sweep(0.0) == 6  # deleted already: the floor only rises
    assert versions(connections, "manifest.json") == set(range(6, 14))


def test_a_pinned_version_is_kept(connections: Connections) -> None:
    head = read_head(connections.bus.key_value(streams.state_bucket(connections.run_id).bucket).wait())
    assert head is not None
    plan_to = WeightReader(connections.blobs, connections.run_id)
    manifest = plan_to.manifest(head.manifest, PolicyVersion(13))
    while manifest.version > 6:
        assert manifest.parent is not None
        reference = manifest.parent.manifest
        manifest = plan_to.manifest(reference, PolicyVersion(manifest.parent.version))
    gc = collector(connections, pinned=(6,))
    assert gc.sweep(0.0) == 3  # version 6 is a patch from full snapshot 3, and has a full snapshot of its own
    gc.sweep(GRACE_S)
    assert versions(connections) == set(range(3, 14))
    found = read_version(connections.blobs, connections.run_id, 6, reference)
    assert torch.equal(found["a"], tensors(6)["a"])


def test_orphans_are_deleted_when_they_are_old(connections: Connections) -> None:
    """A pack that no manifest names is deleted after a minimum age; nothing that a manifest names is."""
    key = blob_keys.weights_pack(connections.run_id, PolicyVersion(13), "deadbeef", rank=0)
    connections.blobs.put(key, b"segments of a publisher that was killed")
    before = versions(connections)
    collector(connections, orphan_s=1e9).sweep(0.0)
    assert connections.blobs.exists(key)
    collector(connections, orphan_s=0.0).sweep(0.0)
    assert not connections.blobs.exists(key)
    assert versions(connections) == before
    assert_head_is(connections, 13)


def test_one_process_collects(connections: Connections) -> None:
    """The right to collect is a lease: while one process holds it, no other takes it."""
    first, second = (collector(connections), WeightGc(connections, Retention(2, 0.0, 0.0), pinned=list, holder="other"))
    assert holds_lease(first._leases, streams.GARBAGE_LEASE, first._holder)
    assert not holds_lease(second._leases, streams.GARBAGE_LEASE, second._holder)
    assert holds_lease(first._leases, streams.GARBAGE_LEASE, first._holder)


def test_the_best_version_stays_readable_below_the_floor(connections: Connections) -> None:
    """With the full snapshot and the patches before it; a later evaluation that is better takes its place.

    It is recorded when its evaluation ends, before any sweep: the process that sweeps is another one.
    """
    killed, gc = (collector(connections, keep=KeepRule(best=1)) for _ in range(2))
    killed.kept.add_result(evaluated(5, 0.4))
    killed.kept.add_result(evaluated(8, 0.3))
    assert gc.sweep(0.0) == 9  # it does not lower the floor
    gc.sweep(GRACE_S)
    assert versions(connections) == {3, 4, 5, *range(9, 14)}
    [best] = gc.kept.read().best
    assert_readable(connections, best)
    gc.kept.add_result(evaluated(13, 0.4))
    gc.sweep(2 * GRACE_S)
    gc.sweep(3 * GRACE_S)
    assert versions(connections) == set(range(9, 14))


def test_an_evaluation_that_nats_did_not_take_pins_its_version(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept in memory until the next sweep records it, before that sweep deletes anything."""
    gc = collector(connections, keep=KeepRule(best=1))

    def unreachable(*_: object) -> None:
        raise BusUnreachable("no answer")

    with monkeypatch.context() as away:
        away.setattr(gc.kept._state, "swap", unreachable)
        gc.kept.add_result(evaluated(4, 0.4))
        assert gc.kept.unwritten() == {4}
        with pytest.raises(BusUnreachable):
            gc.sweep(0.0)
        assert versions(connections) == set(range(14))
    gc.sweep(0.0)
    assert gc.kept.unwritten() == set()
    assert [one.version for one in gc.kept.read().best] == [4]
    assert 4 in versions(connections, "manifest.json")


def test_milestones_stay_readable_below_the_floor(connections: Connections) -> None:
    gc = collector(connections, keep=KeepRule(milestone_every=4, milestones=3))
    for now in (0.0, GRACE_S):
        gc.sweep(now)
    kept = gc.kept.read().milestones
    assert [one.version for one in kept] == [4, 8, 12]
    assert versions(connections) == {3, 4, 6, 7, 8, *range(9, 14)}
    for one in kept:
        assert_readable(connections, one)


def test_without_the_right_to_record_versions_the_rest_is_collected(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three sweeps that could not write: nothing pins the floor for ever."""
    keep = KeepRule(best=1, milestone_every=4, milestones=3)
    collector(connections, keep=keep).kept.add_result(evaluated(4, 0.4))
    gc = collector(connections, keep=keep)

    def refused(*_: object) -> None:
        raise BusUnreachable("permissions violation")

    monkeypatch.setattr(gc.kept._state, "swap", refused)
    gc.kept.add_result(evaluated(5, 0.9))
    for _ in range(2):
        with pytest.raises(BusUnreachable):
            gc.sweep(0.0)
    assert versions(connections, "manifest.json") == set(range(14))
    assert gc.sweep(0.0) == 9
    assert gc.kept.unwritten() == set()
