"""List the versions of a run and why each is kept; export one as a model folder or a PEFT adapter (`penstock weights`)."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.console import connections
from penstock.console.connections import NamedRun
from penstock.console.live.run_view import RunView
from penstock.console.live.watcher import read_run
from penstock.console.terminal import one_line, print_table
from penstock.protocol import blob_keys, logs, streams
from penstock.protocol.errors import BlobMissing, ConfigError, SignatureRefused, WireError
from penstock.protocol.facts import Head, KeptVersions, decode
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.weights.export import export_adapter, export_version
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.manifest_chain import stored_chain
from penstock.protocol.weights.version_reader import UNUSABLE, WeightReader

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import TrustedKeys  # its library is imported where keys are configured


Row = dict[str, Any]

NOT_KEPT: Row = {"best": None, "milestone": False, "for": []}
NOTHING_KEPT = KeptVersions()


def reasons(manifests: Mapping[str, VersionManifest], kept: KeptVersions) -> dict[int, Row]:
    """Return why versions are kept, by version: as one of the best, as a milestone, for versions assembled from them."""
    by_version: dict[int, Row] = {}

    def of(version: int) -> Row:
        return by_version.setdefault(version, {**NOT_KEPT, "for": []})

    for rank, kept_version in enumerate(kept.best, start=1):
        of(kept_version.version)["best"] = {"rank": rank, "score": kept_version.score, "measure": kept_version.measure}
    for kept_version in kept.milestones:
        of(kept_version.version)["milestone"] = True
    for kept_version in sorted((*kept.best, *kept.milestones), key=lambda one: one.version):
        for manifest in stored_chain(kept_version.manifest, manifests):
            needed = manifest.base.version if manifest.base else manifest.version
            if needed != kept_version.version and kept_version.version not in of(needed)["for"]:
                of(needed)["for"].append(kept_version.version)
            if manifest.kind != "patch":
                break
    return by_version


def why(kept: Row) -> str:
    parts: list[str] = []
    if (best := kept["best"]) is not None:
        place = "best" if best["rank"] == 1 else f"best no. {best['rank']}"
        parts.append(place if best["score"] is None else f"{place}: {best['score']:.3f} ({best['measure']})")
    parts += ["milestone"] if kept["milestone"] else []
    parts += [f"for {', '.join(map(str, kept['for']))}"] if kept["for"] else []
    return ", ".join(parts)


def stored_text(manifests: Iterable[VersionManifest], kept: KeptVersions) -> str:
    ranges: list[list[int]] = []
    for version in sorted({manifest.version for manifest in manifests}):
        if ranges and version == ranges[-1][-1] + 1:
            ranges[-1][1:] = [version]
        else:
            ranges.append([version])
    more = [f"best {entry.version}" for entry in kept.best] + [
        f"milestone {milestone.version}" for milestone in kept.milestones
    ]
    text = ", ".join("-".join(map(str, entry)) for entry in ranges) or "none"
    return f"stored: {text}" + (f" ({', '.join(more)})" if more else "")


def print_versions(run: NamedRun, *, as_json: bool) -> int:
    rows = stored_versions(run)
    if as_json:
        print(json_text.dumps(rows))
    elif not rows:
        print(f"run {run} has no weights in the object store")
    else:
        numbers, wide = ("version", "parent", "changed", "bytes", "seconds"), ("kept", "served by")
        columns = ("version", "parent", "kind", "changed", "bytes", "seconds", *wide)
        print_table(columns, map(_cells, rows), right=numbers, wide=wide)
        print(f"next: penstock weights export {run} --version {rows[-1]['version']} --to FOLDER")
        if any(row["kept"]["best"] for row in rows):
            print(f"next: penstock weights export {run} --best --to FOLDER")
    return 0


def stored_versions(run: NamedRun) -> list[Row]:
    logs.configure("weights", level="error")
    settings = run.settings
    with Bus.connect(settings.nats, name="weights", deadline_s=5.0) as bus:
        view = read_run(bus, run.id)
        head, kept = _head_and_kept(bus, run.id)
        return list_versions(reachable(_manifests(Blobs(settings.s3), run.id), head, kept), view, head, kept)


def export(
    run: NamedRun, version: int | None, folder: Path, *, adapter: bool = False, trusted_keys_file: Path | None = None
) -> int:
    """Write one version as a model folder, or unmerged with ``adapter``; return the exit code.

    Without a ``version`` the one with the best evaluation. Manifests must be signed by a key of ``trusted_keys_file``;
    without one, by one of the file that ``PENSTOCK_WORKER__TRUSTED_KEYS_FILE`` names, if it is set. Raises PenstockError.
    """
    settings = run.settings
    trusted_keys = connections.trusted_keys(trusted_keys_file, run.environ, run.folder / connections.STORE)
    logs.configure("weights", level="error")
    blobs = Blobs(settings.s3)
    with Bus.connect(settings.nats, name="weights", deadline_s=5.0) as bus:
        head, kept = _head_and_kept(bus, run.id)
    manifests = reachable(_manifests(blobs, run.id, trusted_keys), head, kept)
    if version is None:
        version = _best(run.id, kept)
    candidates = [(m, key) for key, m in manifests.items() if m.version == version]
    if not candidates:
        raise ConfigError(
            f"run {run} has no version {version} in the object store; {stored_text(manifests.values(), kept)}; "
            f"see: penstock weights {run}"
        )
    write = export_adapter if adapter else export_version
    problems = []
    for manifest, _ in sorted(
        candidates, key=lambda one: one[0].kind
    ):  # full snapshots ("anchor") before chains of patches
        reader = WeightReader(blobs, run.id, trusted_keys=trusted_keys)
        try:
            num_bytes = write(manifest, folder, reader=reader, blobs=blobs)
        except FileExistsError as err:
            raise ConfigError(str(err)) from None
        except UNUSABLE as err:
            problems.append(str(err))
            continue
        print(f"{folder}: version {version} of run {run}, {num_bytes} bytes read, root {manifest.state_root[:16]}…")
        return 0
    raise ConfigError(f"version {version} of run {run} cannot be read: {'; '.join(problems)}")


def reachable(
    manifests: Mapping[str, VersionManifest], head: Head | None, kept: KeptVersions = NOTHING_KEPT
) -> dict[str, VersionManifest]:
    """Return the manifests reachable from the head and the kept versions, and other manifests of the same weights.

    A trainer that was killed before it moved the head, or whose lease had expired, leaves a manifest under a number
    that another trainer then used; that manifest is not part of the run.
    """
    known: set[tuple[int, str]] = set()
    for start in (
        head and head.manifest,
        *(stored_version.manifest for stored_version in (*kept.best, *kept.milestones)),
    ):
        for manifest in stored_chain(start, manifests):
            for stored_version in (manifest, manifest.anchor, manifest.base):
                if stored_version is not None:
                    known.add((stored_version.version, stored_version.state_root))
    return {key: m for key, m in manifests.items() if (m.version, m.state_root) in known}


def list_versions(
    manifests: Mapping[str, VersionManifest], view: RunView, head: Head | None, kept: KeptVersions = NOTHING_KEPT
) -> list[Row]:
    """Describe every stored version, oldest first; a patch that also has a full snapshot has ``anchor`` true.

    ``manifests`` are those of `reachable`. A model stored only as the base of adapters is listed with them.
    """
    reasons_of = reasons(manifests, kept)
    announced = {m.version for m in manifests.values() if m.version in view.published or m.version in reasons_of}
    listed = announced | {m.base.version for m in manifests.values() if m.base and m.version in announced}
    serving: dict[int, list[str]] = {}
    for worker, at in view.serving().items():
        serving.setdefault(at, []).append(worker)
    rows: dict[int, Row] = {}
    for manifest in sorted(manifests.values(), key=lambda m: (m.version, m.kind == "patch")):
        version = manifest.version
        if version not in listed:
            continue
        announcement = view.publications.get(version)
        row = rows.setdefault(version, {"version": version, "anchor": False})
        row |= {
            "step": manifest.step,
            "kind": manifest.kind,
            "parent": manifest.parent.version if manifest.parent else None,
            "base": manifest.base.version if manifest.base else None,
            "density": manifest.density,
            "bytes": manifest.num_bytes,
            "seconds": announcement.publish_s if announcement else None,
            "head": head is not None and head.version == version,
            "served_by": serving.get(version, []),
            "state_root": manifest.state_root,
            "kept": reasons_of.get(version, NOT_KEPT),
        }
        row["anchor"] |= manifest.kind == "anchor"
    return [rows[version] for version in sorted(rows)]


def _head_and_kept(bus: Bus, run: str) -> tuple[Head | None, KeptVersions]:
    head, kept = (connections.stored_state(bus, run, key) for key in (streams.HEAD_KEY, streams.KEPT_KEY))
    return decode(head, Head) if head else None, decode(kept, KeptVersions) if kept else NOTHING_KEPT


def _best(run: str, kept: KeptVersions) -> int:
    if not kept.best:
        raise ConfigError(
            f"run {run} has no evaluated version: name one with --version (see: penstock weights {run}); a run keeps the "
            "best one with data.eval and trainer.keep_best = 1"
        )
    return kept.best[0].version


def _manifests(blobs: Blobs, run: str, trusted_keys: TrustedKeys | None = None) -> dict[str, VersionManifest]:
    """Return the stored manifests by key; what cannot be read, is of another run, or no trusted key has signed, is left out and named."""
    manifests, unreadable = {}, list[str]()
    for stat in blobs.list(blob_keys.all_weights_prefix(run)):
        if stat.key.endswith("/manifest.json"):
            try:
                data = blobs.get_unverified(stat.key)
                if trusted_keys is not None:
                    trusted_keys.verify(data, stat.key)
                manifest = VersionManifest.from_json(data)
                if manifest.run_id == run:
                    manifests[stat.key] = manifest
                else:
                    unreadable.append(f"{stat.key}: it is of run {manifest.run_id}")
            except BlobMissing:
                continue  # removed meanwhile
            except (WireError, SignatureRefused) as err:
                unreadable.append(str(err) if isinstance(err, SignatureRefused) else f"{stat.key}: {err}")
    if unreadable:
        text = f"{len(unreadable)} manifests are left out, because they cannot be read or trusted; the first: {unreadable[0]}"
        print(f"penstock: {one_line(text)}", file=sys.stderr)
    return manifests


def _cells(row: Row) -> tuple[object, ...]:
    version = f"{row['version']}{' head' if row['head'] else ''}"
    parent = "–" if row["parent"] is None else row["parent"]
    kind = row["kind"] + (" + full" if row["anchor"] and row["kind"] == "patch" else "")
    kind += "" if row["base"] is None else f" on {row['base']}"
    seconds = "–" if row["seconds"] is None else f"{row['seconds']:.3f}"
    texts = (why(row["kept"]), ", ".join(row["served_by"]))
    return version, parent, kind, f"{row['density']:.2%}", f"{row['bytes']:,}", seconds, *texts
