"""Which versions' objects may go, and when the next anchor is due. Pure rules; whoever holds the lease acts.

A late joiner starts from an anchor and follows the chain to the head. So everything from a *floor* on is
kept: the floor is an anchor, old enough for the head, for the anchor before it (a reader may be half way
through it), and for every version that a living worker holds or fetches. Adapters are whole, so each may be the
floor; the models that they sit upon stay, however old they are. Deletion comes in two acts: a
version below the floor is *retired* (no new plan may start there), and its objects go after a grace period
longer than any catch-up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.protocol.versions import PolicyVersion, is_newer

KEEP_ANCHORS = 2


@dataclass(frozen=True, slots=True)
class AnchorPolicy:
    """When to write an anchor: patches since the last have grown to a share of it, or are many.

    Both bound what a late joiner reads: at most ``1 + max_ratio`` anchors, at most ``max_versions`` patches.
    """

    max_ratio: float = 0.5
    max_versions: int = 64

    def is_due(self, *, patch_bytes: int, anchor_bytes: int, num_versions: int) -> bool:
        """Say whether an anchor is due, given what was published since the last one."""
        return num_versions >= self.max_versions or patch_bytes > self.max_ratio * anchor_bytes


def retirement_floor(
    anchors: Iterable[PolicyVersion], *, head: PolicyVersion, needed: Iterable[PolicyVersion]
) -> PolicyVersion | None:
    """Return the oldest version that must stay; None when nothing may go.

    Args:
        anchors: Versions that have an anchor, or are adapters.
        head: The newest complete version.
        needed: Versions that living workers hold or fetch, or that an evaluation is pinned to.
    """
    known = sorted(anchor for anchor in anchors if not is_newer(anchor, head))
    if not known:
        return None
    floors = [known[-KEEP_ANCHORS] if len(known) >= KEEP_ANCHORS else known[0]]
    for version in needed:
        below = [anchor for anchor in known if not is_newer(anchor, version)]
        floors.append(below[-1] if below else known[0])
    return min(floors)


def retired(
    versions: Iterable[PolicyVersion], floor: PolicyVersion | None, bases: Collection[PolicyVersion] = ()
) -> set[PolicyVersion]:
    """Return the versions below the floor: their manifests go at once, their objects after the grace period.

    ``bases`` are the models that adapters from the floor on sit upon.
    """
    if floor is None:
        return set()
    return {version for version in versions if is_newer(floor, version) and version not in bases}


def expired(retired_at: Mapping[PolicyVersion, float], *, now: float, grace_s: float) -> set[PolicyVersion]:
    """Return the retired versions whose objects may go; times in seconds of one clock."""
    return {version for version, since in retired_at.items() if now - since >= grace_s}


def orphans(ages_s: Mapping[str, float], named: Collection[str], *, min_age_s: float) -> set[str]:
    """Return the keys of objects that no manifest names and that no publication can still be writing.

    Args:
        ages_s: Key -> age in seconds of every stored object of weights, manifests included.
        named: Keys of all manifests that are kept, and of everything they reference.
        min_age_s: Longer than any publication takes from its first object to its manifest.
    """
    return {key for key, age_s in ages_s.items() if key not in named and age_s >= min_age_s}
