"""Which versions' objects can be deleted, and when the next full snapshot is due. Pure rules; `weight_gc` applies them.

A worker that joins late starts from a full snapshot and follows the chain to the head. So everything from a *floor*
on is kept. The floor is a full snapshot, old enough for the head, for the full snapshot before it (a reader may have
read half of it), and for every version that a live worker holds or fetches. Adapters are whole, so each can be the
floor; their bases are kept, however old they are. Deletion has two steps: a version below the floor is *retired*
(no new plan can start there), and its objects are deleted after a grace period longer than any catch-up.

Below the floor the best evaluated versions and the milestones are kept too, each with the full snapshot and the patches,
or the base, that it is assembled from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.protocol.facts import KeptVersion
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.protocol.weights.manifest import VersionManifest

KEEP_FULL_SNAPSHOTS = 2


@dataclass(frozen=True, slots=True)
class FullSnapshotPolicy:
    """When to write a full snapshot: the patches since the last one reach a share of its size, or a number.

    Both bound what a late worker reads: at most ``1 + max_ratio`` times a full snapshot, ``max_versions`` patches.
    """

    max_ratio: float = 0.5
    max_versions: int = 64

    def is_due(self, *, patch_bytes: int, full_bytes: int, num_versions: int) -> bool:
        return num_versions >= self.max_versions or patch_bytes > self.max_ratio * full_bytes


def retirement_floor(
    starts: Iterable[PolicyVersion], *, head: PolicyVersion, needed: Iterable[PolicyVersion]
) -> PolicyVersion | None:
    """Return the oldest version to keep; None: delete none. ``starts`` are full snapshots and adapters."""
    known = sorted(start for start in starts if not is_newer(start, head))
    if not known:
        return None
    floors = [known[-KEEP_FULL_SNAPSHOTS] if len(known) >= KEEP_FULL_SNAPSHOTS else known[0]]
    for version in needed:
        below = [start for start in known if not is_newer(start, version)]
        floors.append(below[-1] if below else known[0])
    return min(floors)


def retired(
    versions: Iterable[PolicyVersion], floor: PolicyVersion, kept: Collection[PolicyVersion] = ()
) -> set[PolicyVersion]:
    """Return the versions below the floor: their manifests are deleted at once, their objects after the grace period.

    ``kept`` are the bases of adapters from the floor on, and what the kept versions are assembled from.
    """
    return {version for version in versions if is_newer(floor, version) and version not in kept}


@dataclass(frozen=True, slots=True)
class KeepRule:
    best: int = 0
    milestone_every: int = 1
    milestones: int = 0


def best_versions(evaluated: Iterable[KeptVersion], *, measure: str, most: int) -> tuple[KeptVersion, ...]:
    """Return the ``most`` evaluated versions with the highest scores, best first; of equal ones the newest.

    Scores of another measure than ``measure``, that of the newest evaluation, cannot be compared with it and come last.
    """
    by_version = {kept.version: kept for kept in evaluated}  # a repeated evaluation replaces the earlier one
    ranked = sorted(by_version.values(), key=lambda one: (one.measure == measure, one.score, one.version), reverse=True)
    return tuple(ranked[:most])


def milestone_versions(stored: Iterable[PolicyVersion], rule: KeepRule) -> list[PolicyVersion]:
    """Return the first version of every ``milestone_every``; that is doubled while there would be too many."""
    known, every = sorted(stored), rule.milestone_every
    if not known or not rule.milestones:
        return []
    while known[-1] // every > rule.milestones:
        every *= 2
    first: dict[int, PolicyVersion] = {}
    for version in known:
        first.setdefault(version // every, version)
    return [version for number, version in first.items() if number > 0]


def assembled_from(kept: Iterable[KeptVersion], manifests: Mapping[str, VersionManifest]) -> set[PolicyVersion]:
    whole = {(m.version, m.state_root) for m in manifests.values() if m.kind == "anchor"}
    versions: set[PolicyVersion] = set()
    for kept_version in kept:
        manifest = None if kept_version.manifest is None else manifests.get(kept_version.manifest.key)
        start = None if manifest is None else manifest.start
        while manifest is not None:
            versions.add(PolicyVersion(manifest.version))
            if manifest.base is not None:
                versions.add(PolicyVersion(manifest.base.version))
            if (manifest.version, manifest.state_root) in whole or manifest.version == start or manifest.parent is None:
                break
            manifest = manifests.get(manifest.parent.manifest.key)
    return versions


def expired(retired_at: Mapping[PolicyVersion, float], *, now: float, grace_s: float) -> set[PolicyVersion]:
    return {version for version, since in retired_at.items() if now - since >= grace_s}


def orphans(ages_s: Mapping[str, float], named: Collection[str], *, min_age_s: float) -> set[str]:
    """Return the stored keys that no kept manifest names, older than ``min_age_s``: no publication is writing them."""
    return {key for key, age_s in ages_s.items() if key not in named and age_s >= min_age_s}
