"""Why versions of a run are kept, as rows and as text; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.protocol.facts import KeptVersions
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.manifest_chain import stored_chain

Row = dict[str, Any]

NOT_KEPT: Row = {"best": None, "milestone": False, "for": []}


def reasons(manifests: Mapping[str, VersionManifest], kept: KeptVersions) -> dict[int, Row]:
    """Return why versions are kept, by version: as one of the best, as a milestone, for versions assembled from them."""
    found: dict[int, Row] = {}

    def of(version: int) -> Row:
        return found.setdefault(version, {**NOT_KEPT, "for": []})

    for rank, one in enumerate(kept.best, start=1):
        of(one.version)["best"] = {"rank": rank, "score": one.score, "measure": one.measure}
    for one in kept.milestones:
        of(one.version)["milestone"] = True
    for one in sorted((*kept.best, *kept.milestones), key=lambda one: one.version):
        for manifest in stored_chain(one.manifest, manifests):
            needed = manifest.base.version if manifest.base else manifest.version
            if needed != one.version and one.version not in of(needed)["for"]:
                of(needed)["for"].append(one.version)
            if manifest.kind != "patch":
                break
    return found


def why(kept: Row) -> str:
    """Return the reasons of one row as people read them."""
    parts: list[str] = []
    if (best := kept["best"]) is not None:
        place = "best" if best["rank"] == 1 else f"best no. {best['rank']}"
        parts.append(place if best["score"] is None else f"{place}: {best['score']:.3f} ({best['measure']})")
    parts += ["milestone"] if kept["milestone"] else []
    parts += [f"for {', '.join(map(str, kept['for']))}"] if kept["for"] else []
    return ", ".join(parts)


def stored_text(manifests: Iterable[VersionManifest], kept: KeptVersions) -> str:
    """Return the stored versions in ranges, and which are the best and the milestones."""
    ranges: list[list[int]] = []
    for version in sorted({manifest.version for manifest in manifests}):
        if ranges and version == ranges[-1][-1] + 1:
            ranges[-1][1:] = [version]
        else:
            ranges.append([version])
    more = [f"best {one.version}" for one in kept.best] + [f"milestone {one.version}" for one in kept.milestones]
    text = ", ".join("-".join(map(str, one)) for one in ranges) or "none"
    return f"stored: {text}" + (f" ({', '.join(more)})" if more else "")
