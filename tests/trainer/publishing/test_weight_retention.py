"""What of the published weights may go: never what a reader needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.versions import PolicyVersion
from penstock.trainer.publishing.weight_retention import AnchorPolicy, expired, orphans, retired, retirement_floor

V = PolicyVersion
VERSIONS = st.integers(0, 60).map(PolicyVersion)


@given(st.sets(VERSIONS, min_size=1), VERSIONS, st.lists(VERSIONS, max_size=4))
def test_nothing_that_is_needed_lies_below_the_floor(
    anchors: set[PolicyVersion], head: PolicyVersion, needed: list[PolicyVersion]
):
    """The head and every needed version keep the anchor they start from, and the floor is itself an anchor."""
    floor = retirement_floor(anchors, head=head, needed=needed)
    if floor is None:
        assert all(anchor > head for anchor in anchors)
        return
    assert floor in anchors
    gone = retired([V(v) for v in range(61)], floor)
    for version in [head, *needed]:
        start = max((a for a in anchors if a <= min(version, head)), default=None)
        assert start is None or not gone & {V(v) for v in range(start, 61)}


def test_the_last_two_anchors_stay():
    """A reader may be half way through the older of two; a worker far behind, or a pin, keeps more."""
    anchors = [V(0), V(10), V(20), V(30)]
    assert retirement_floor(anchors, head=V(34), needed=[]) == 20
    assert retirement_floor(anchors, head=V(34), needed=[V(33), V(15)]) == 10
    assert retirement_floor(anchors, head=V(25), needed=[]) == 10
    assert retirement_floor([], head=V(3), needed=[]) is None
    assert retired([V(19), V(20)], None) == set()


def test_objects_outlive_their_manifest_by_the_grace_period():
    """Retired is not deleted: a plan made a moment ago can still be carried out."""
    assert expired({V(1): 100.0, V(2): 160.0}, now=200.0, grace_s=60.0) == {1}


def test_orphans_are_old_and_named_by_nobody():
    """Neither what a manifest names nor what a publication may still be writing is an orphan."""
    ages = {"named": 9e9, "young": 10.0, "lost": 4000.0}
    assert orphans(ages, {"named"}, min_age_s=3600.0) == {"lost"}


def test_an_anchor_is_due_by_bytes_or_by_number():
    """Half an anchor of patches, or 64 of them."""
    policy = AnchorPolicy()
    assert not policy.is_due(patch_bytes=50, anchor_bytes=100, num_versions=63)
    assert policy.is_due(patch_bytes=51, anchor_bytes=100, num_versions=1)
    assert policy.is_due(patch_bytes=0, anchor_bytes=100, num_versions=64)
