"""Verify how manifests continue one another, and plan the cheapest way from a mirror's version to the head.

    a mirror asks:   step = plan_catch_up(head, fetched, held)
    while it gets:   FetchManifest(ref)    fetch that object, put it into `fetched`, ask again
    in the end:      CatchUp(anchor, patches)     nothing, patches, a full snapshot, or a full snapshot and patches

An adapter is always whole: its plan is itself. Its base is another version, with a separate plan.

Every link is verified: hash of the parent's manifest, state, layout, epochs, bases. Pure: the caller fetches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.protocol.errors import ChainBroken
from penstock.protocol.groups import BlobRef
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.protocol.weights.manifest import Ancestor, AnchorRef, BucketState, VersionManifest

MAX_HOPS = 256  # manifests walked back; regular full snapshots keep chains far shorter


@dataclass(frozen=True, slots=True)
class Held:
    version: PolicyVersion
    state_root: str


@dataclass(frozen=True, slots=True)
class FetchManifest:
    ref: BlobRef
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The changes that bring a mirror to ``target``: first the full snapshot, if any, then patches, oldest first."""

    target: VersionManifest
    anchor: VersionManifest | None
    patches: tuple[VersionManifest, ...]

    @property
    def num_bytes(self) -> int:
        return sum(m.num_bytes for m in self.manifests)

    @property
    def manifests(self) -> tuple[VersionManifest, ...]:
        return self.patches if self.anchor is None else (self.anchor, *self.patches)

    def changes_of(self, bucket: int) -> tuple[tuple[VersionManifest, BucketState], ...]:
        """Return the changes of one bucket in order, without versions that leave it unchanged.

        Applied in one pass: the later wins, and only the result is compared, with the target's ``new_xxh3``.
        """
        steps = ((manifest, manifest.buckets[bucket]) for manifest in self.manifests)
        return tuple((manifest, state) for manifest, state in steps if state.codec != "none")


def stored_chain(start: BlobRef | None, manifests: Mapping[str, VersionManifest]) -> Iterator[VersionManifest]:
    """Yield a version's manifest and its parents, as far as ``manifests`` has them, by key; nothing is verified."""
    while start is not None and (manifest := manifests.get(start.key)) is not None:
        yield manifest
        start = None if manifest.parent is None else manifest.parent.manifest


def plan_catch_up(
    head: VersionManifest, fetched: Mapping[str, VersionManifest], held: Held | None, *, max_hops: int = MAX_HOPS
) -> FetchManifest | CatchUp:
    """Return the next manifest to fetch, or the plan with the fewest bytes from ``held`` to ``head``.

    ``fetched`` are manifests by the sha256 of their bytes, verified against it by the caller; ``held`` is the mirror's
    version, None for an empty one, or one that must be rebuilt. Beyond ``max_hops`` parents only the full snapshot is
    considered. Raises ChainBroken when a manifest differs from what its child states.
    """
    if held == Held(PolicyVersion(head.version), head.state_root):
        return CatchUp(head, None, ())
    patches: list[VersionManifest] = []  # newest first
    anchored: CatchUp | None = None  # the way over the head's anchor, once it is known
    manifest = head
    while len(patches) < max_hops and manifest.kind == "patch":
        patches.append(manifest)
        parent, anchor = _ancestors(manifest)[0], _ancestors(head)[1]
        if held == Held(PolicyVersion(parent.version), parent.state_root):
            way = CatchUp(head, None, tuple(reversed(patches)))
            return way if anchored is None or way.num_bytes < anchored.num_bytes else anchored
        if anchored is None and parent.version == anchor.version:
            ancestor = fetched.get(anchor.manifest.sha256)
            if ancestor is None:
                return FetchManifest(anchor.manifest, PolicyVersion(anchor.version))
            verify_anchor(manifest, anchor, ancestor)
            anchored = CatchUp(head, ancestor, tuple(reversed(patches)))
        if anchored is not None and not _may_be_cheaper(patches, parent, held, anchored):
            return anchored
        ancestor = fetched.get(parent.manifest.sha256)
        if ancestor is None:
            return FetchManifest(parent.manifest, PolicyVersion(parent.version))
        verify_link(manifest, ancestor)
        manifest = ancestor
    if anchored is None and manifest.kind != "patch":
        anchored = CatchUp(head, manifest, tuple(reversed(patches)))
    if anchored is None:
        raise ChainBroken(f"version {head.version}: no full snapshot within {max_hops} parents; publish one")
    return anchored


def verify_link(child: VersionManifest, parent: VersionManifest) -> None:
    named = _ancestors(child)[0]
    _same(child, "parent", (named.version, named.state_root), (parent.version, parent.state_root))
    if child.epoch < parent.epoch:
        raise ChainBroken(f"version {child.version}: lease {child.epoch} after its parent's {parent.epoch}")
    _same_ground(child, parent)


def verify_anchor(first: VersionManifest, named: Ancestor, anchor: VersionManifest) -> None:
    expected = ("anchor", named.version, named.state_root)
    _same(first, "anchor", expected, (anchor.kind, anchor.version, anchor.state_root))
    _same_ground(first, anchor)


def verify_base(adapter: VersionManifest, base: VersionManifest) -> None:
    assert adapter.base is not None
    named = ("anchor", adapter.run_id, adapter.base.version, adapter.base.state_root)
    _same(adapter, "base", named, (base.kind, base.run_id, base.version, base.state_root))


def _ancestors(patch: VersionManifest) -> tuple[Ancestor, AnchorRef]:
    assert patch.parent is not None
    assert patch.anchor is not None
    return patch.parent, patch.anchor


def _may_be_cheaper(
    patches: Sequence[VersionManifest], reached: Ancestor, held: Held | None, anchored: CatchUp
) -> bool:
    if held is None or not is_newer(PolicyVersion(reached.version), held.version):
        return False
    return sum(patch.num_bytes for patch in patches) < anchored.num_bytes


def _same(child: VersionManifest, what: str, expected: object, got: object) -> None:
    if expected != got:
        raise ChainBroken(f"version {child.version}: its {what} should be {expected}, got {got}")


def _same_ground(child: VersionManifest, base: VersionManifest) -> None:
    _same(child, "run and layout", (child.run_id, child.layout_id), (base.run_id, base.layout_id))
    _same(child, "number of buckets", len(child.buckets), len(base.buckets))
    for number, (now, before) in enumerate(zip(child.buckets, base.buckets, strict=True)):
        expected, got = (now.num_words, now.base_xxh3), (before.num_words, before.new_xxh3)
        _same(child, f"bucket {number} of version {base.version}", expected, got)
