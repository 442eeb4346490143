"""Describes problems with the input of a replay: changed settings, missing packs, different figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.protocol import blob_keys
from penstock.protocol.config.run_file import config_document, load
from penstock.protocol.errors import BlobMissing, SignatureRefused, WireError
from penstock.protocol.files import read_regular
from penstock.protocol.record.lineage import RecordedStep
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.manifest import VersionManifest
from penstock.trainer.recovery.resume_checks import Flat, differences, flat
from penstock.trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import TrustedKeys  # its library is imported where keys are named

_SHOWN_IDS = 4


def config_findings(path: Path, recorded: Flat) -> list[str]:
    """Return one line for every setting in which ``config.json`` differs from the record of the last session.

    Empty if the file does not exist.
    """
    if not path.is_file():
        return []
    try:
        here = flat(json.loads(read_regular(path))["settings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        return [f"{path} does not hold the settings of a run ({type(err).__name__}: {err})"]
    return [f"{path}: {line}" for line in differences(recorded, here, ignoring={"run.dir"})]


def drift(run_files: Sequence[Path], recorded: Flat) -> list[str]:
    """Return one line for every setting of run files that differs from the run's last session.

    Raises ConfigError for run files that the trainer would refuse.
    """
    if not run_files:
        return []
    loaded = load(TrainerSettings, files=run_files)
    now = flat(config_document(loaded)["settings"])
    given = {key: value for key, value in now.items() if loaded.origins[key].startswith(tuple(map(str, run_files)))}
    return [
        f"{loaded.origins[key]}: {line}"
        for key in sorted(given)
        for line in differences({key: recorded.get(key)}, {key: given[key]}, ignoring={"run.dir"})
    ]


def missing_packs(steps: Sequence[RecordedStep], blobs: Blobs) -> list[str]:
    """Return one line for every pack that is not in the object store, with the groups that need it."""
    packs = {pack.key: pack for step in steps for pack in step.packs}
    stored: set[str] = set()
    for owner in sorted({blob_keys.owner_of_pack(key) for key in packs}):
        stored |= {found.key for found in blobs.list(blob_keys.groups_prefix(owner))}
    return [f"pack {key} is not in the object store: {_groups_of(key, steps)}" for key in packs if key not in stored]


def signed_versions(
    run_id: str, roots: Mapping[int, str], blobs: Blobs, trusted_keys: TrustedKeys
) -> tuple[int, list[str]]:
    """Return how many of the replayed versions (their roots, by number) are stored as a trusted key has signed them.

    Also one line for every version of which manifests are stored, but none with a trusted signature and this root. A
    version that retention has removed counts as neither. A trainer that was killed leaves manifests under a number that
    another version then got: one that fits suffices.
    """
    num_signed, findings = 0, list[str]()
    for version, root in roots.items():
        stored = blobs.list(blob_keys.weights_prefix(run_id, PolicyVersion(version)))
        keys = [stat.key for stat in stored if stat.key.endswith("/manifest.json")]
        problems = [_signature_problem(run_id, version, root, key, blobs, trusted_keys) for key in keys]
        if "" in problems:
            num_signed += 1
        elif problems:
            findings.append(f"version {version}: no stored manifest is trusted; {'; '.join(problems[:_SHOWN_IDS])}")
    return num_signed, findings


def _signature_problem(run_id: str, version: int, root: str, key: str, blobs: Blobs, trusted_keys: TrustedKeys) -> str:
    """Return why a stored manifest is not the one that a trusted key has signed for a version; "" when it is."""
    try:
        data = blobs.get_unverified(key)
        trusted_keys.verify(data, key)
        manifest = VersionManifest.from_json(data)
    except (BlobMissing, SignatureRefused, WireError) as err:
        return str(err)
    if (manifest.run_id, manifest.version, manifest.state_root) != (run_id, version, root):
        return (
            f"{key}: signed for version {manifest.version} of run {manifest.run_id} with root "
            f"{manifest.state_root[:16]}…, replayed {root[:16]}…"
        )
    return ""


def _groups_of(key: str, steps: Sequence[RecordedStep]) -> str:
    uses = [(s.step, g.group_id) for s in steps for g in s.groups if s.packs[g.pack].key == key]
    ids = [group_id for _, group_id in uses]
    more = f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else ""
    return f"step {uses[0][0]} needs its groups {', '.join(ids[:_SHOWN_IDS])}{more}"


def other_updates(step: RecordedStep, made: Sequence[Sequence[int]], left_out: Sequence[int] = ()) -> list[str]:
    """Return one line for the first optimizer step of a step that was replayed on other groups than the record has.

    Also one if others were ``left_out`` as outliers than the record says.
    """
    for number, (recorded, replayed) in enumerate(zip_longest(step.updates, made), start=1):
        if recorded != replayed:
            before, after = ("none" if places is None else f"groups {list(places)}" for places in (recorded, replayed))
            return [
                f"step {step.step}, optimizer step {number}: replayed {after}, recorded {before}; restore the record"
            ]
    if tuple(left_out) != step.left_out:
        return [
            f"step {step.step}: the replay left out the optimizer steps {list(left_out)} as outliers, recorded {list(step.left_out)}; "
            "restore the record"
        ]
    return []


def figure_differences(metrics: Path, step: int | None, replayed: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one line for every figure of a step that differs in ``metrics.jsonl``; none if it has no such step.

    A file that cannot be read has none: it only explains a difference, and an audit reports its damage.
    """
    try:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    except (OSError, ValueError, RecursionError):
        return ()
    steps = [row for row in rows if isinstance(row, dict) and row.get("kind") == "step"]
    recorded = next((row for row in steps if row.get("step") == step), {})
    return tuple(
        f"{name}: recorded {recorded[name]}, replayed {value}"
        for name, value in replayed.items()
        if name in recorded and recorded[name] != value
    )
