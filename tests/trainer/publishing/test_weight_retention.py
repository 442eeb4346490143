"""Which published weights can be deleted: never those that a reader needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.facts import KeptVersion
from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import AnchorRef, VersionManifest
from penstock.trainer.publishing.weight_retention import (
    FullSnapshotPolicy,
    KeepRule,
    assembled_from,
    best_versions,
    milestone_versions,
    retired,
    retirement_floor,
)

V = PolicyVersion
VERSIONS = st.integers(0, 60).map(PolicyVersion)


@given(st.sets(VERSIONS, min_size=1), VERSIONS, st.lists(VERSIONS, max_size=4))
def test_no_needed_version_is_below_the_floor(
    starts: set[PolicyVersion], head: PolicyVersion, needed: list[PolicyVersion]
):
    """The head and every needed version keep the full snapshot they start from; the floor is itself one."""
    floor = retirement_floor(starts, head=head, needed=needed)
    if floor is None:
        assert all(start > head for start in starts)
        return
    assert floor in starts
    gone = retired([V(v) for v in range(61)], floor)
    for version in [head, *needed]:
        start = max((s for s in starts if s <= min(version, head)), default=None)
        assert start is None or not gone & {V(v) for v in range(start, 61)}


def test_the_last_two_full_snapshots_are_kept():
    """A reader may have read half of the older one; a worker far behind, or a pin, keeps more."""
    starts = [V(0), V(10), V(20), V(30)]
    assert retirement_floor(starts, head=V(34), needed=[]) == 20
    assert retirement_floor(starts, head=V(34), needed=[V(33), V(15)]) == 10
    assert retirement_floor(starts, head=V(25), needed=[]) == 10
    assert retirement_floor([], head=V(3), needed=[]) is None


def test_a_full_snapshot_is_due_by_bytes_or_by_number():
    policy = FullSnapshotPolicy()
    assert not policy.is_due(patch_bytes=50, full_bytes=100, num_versions=63)
    assert policy.is_due(patch_bytes=51, full_bytes=100, num_versions=1)
    assert policy.is_due(patch_bytes=0, full_bytes=100, num_versions=64)


def evaluated(version: int, score: float, measure: str = "m") -> KeptVersion:
    return KeptVersion(version=version, step=version, measure=measure, score=score)


def test_the_best_versions_have_the_highest_scores():
    """Of equal scores the newest is better; a repeated evaluation replaces the former; another measure comes last."""
    found = [evaluated(0, 0.2), evaluated(5, 0.9), evaluated(10, 0.4), evaluated(15, 0.4), evaluated(5, 0.1)]
    assert [best_version.version for best_version in best_versions(found, measure="m", most=3)] == [15, 10, 0]
    mixed = [evaluated(0, 7.0, "mean reward"), evaluated(5, 0.3), evaluated(10, 0.2)]
    assert [best_version.version for best_version in best_versions(mixed, measure="m", most=9)] == [5, 10, 0]
    assert best_versions(found, measure="m", most=0) == ()


@given(st.sets(st.integers(0, 3000).map(PolicyVersion)), st.integers(1, 40), st.integers(1, 6))
def test_milestones_are_few_and_spread_over_the_run(stored: set[PolicyVersion], every: int, most: int):
    """There are never more than allowed, and what is deleted in between never becomes one again."""
    rule, kept = KeepRule(milestone_every=every, milestones=most), set[PolicyVersion]()
    for newest in sorted(stored):  # only the last versions are stored beside the milestones
        recent = {version for version in stored if newest - 5 < version <= newest}
        found = milestone_versions(kept | recent, rule)
        assert len(found) <= most
        assert set(found) <= kept | recent
        kept = set(found)


def test_milestones_of_a_run():
    """One every ten versions, then every twenty, then forty; one that was not published is replaced by the next."""
    rule = KeepRule(milestone_every=10, milestones=3)
    assert milestone_versions(map(V, range(36)), rule) == [10, 20, 30]
    assert milestone_versions(map(V, range(41)), rule) == [20, 40]
    assert milestone_versions(map(V, range(131)), rule) == [40, 80, 120]
    assert milestone_versions([V(9), V(12), V(13), V(21)], rule) == [12, 21]
    assert milestone_versions([V(3)], KeepRule(milestone_every=1, milestones=0)) == []


def test_a_kept_adapter_keeps_its_base():
    manifest = BlobRef(key="v7/manifest.json", size_bytes=1, sha256="0" * 64)
    base = AnchorRef(version=2, manifest=manifest, state_root="0" * 64, num_bytes=1)
    adapter = VersionManifest.model_construct(kind="adapter", version=7, anchor=base, state_root="1" * 64, parent=None)
    kept = KeptVersion(version=7, step=7, manifest=manifest)
    assert assembled_from([kept], {manifest.key: adapter}) == {2, 7}
