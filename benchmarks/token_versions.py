"""Check that every token of a run was sampled by the version recorded for it: stored packs against stored weights.

    python -m penstock.deploy.stored RUN_FOLDER/store -- python -m benchmarks.token_versions RUN [--groups 200] [--kept-cache]

The run must still have its versions (``trainer.keep_versions`` of more than its steps). Of a sample of its groups, each
token's log-probability is recomputed by transformers, from the weights of the version recorded for the token, and
again from those of the version before, which shows how large the error of a wrong label would be. ``--kept-cache`` is for
``worker.update_mode = "in_place"``: in this mode tokens after an update are computed from keys and values of older weights, so
in a sequence with an update only the tokens before it are checked, and sequences of one version that read an older prefix
are counted. Prints one JSON object; the exit code is 1 if a checked token is further than 1e-4 nats from its own
version.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.contracts.tiny_model import Dense

from penstock.deploy.bootstrap import ConnectionSettings
from penstock.protocol import blob_keys
from penstock.protocol.config.run_file import load
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.protocol.weights.export import export_version
from penstock.protocol.weights.manifest import VersionManifest
from penstock.protocol.weights.version_reader import WeightReader

TOLERANCE = 1e-4  # nats, float32 against float32


class Versions:
    """The dense forward of each version of a run, created on first use."""

    def __init__(self, blobs: Blobs, run_id: str, scratch: Path) -> None:
        self._blobs, self._run_id, self._scratch = blobs, run_id, scratch
        self._manifests: dict[int, VersionManifest] = {}
        for stat in blobs.list(blob_keys.all_weights_prefix(run_id)):
            if stat.key.endswith("/manifest.json"):
                manifest = VersionManifest.from_json(blobs.get_unverified(stat.key))
                self._manifests.setdefault(manifest.version, manifest)
        self._dense: dict[int, Dense] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._manifests

    def __getitem__(self, version: int) -> Dense:
        if version not in self._dense:
            self._dense[version] = Dense(self.folder(version))
        return self._dense[version]

    def folder(self, version: int) -> Path:
        """Return a version as a model folder, exported on first use."""
        folder = self._scratch / f"v{version}"
        if not folder.exists():
            reader = WeightReader(self._blobs, self._run_id)
            export_version(self._manifests[version], folder, reader=reader, blobs=self._blobs)
        return folder


def stored_groups(blobs: Blobs, run_id: str, oldest_version: int) -> list[Group]:
    prefix = blob_keys.group_pack(run_id, PolicyVersion(oldest_version), "", "").rpartition("/")[0] + "/"
    return [group for stat in blobs.list(prefix) for group in group_pack.decode(blobs.get_unverified(stat.key))]


def sampled_groups(blobs: Blobs, run_id: str, num_groups: int) -> list[Group]:
    """Return a sample of the training groups of a run: whole packs, from its whole length."""
    keys = sorted(stat.key for stat in blobs.list(blob_keys.groups_prefix(run_id)))
    random.Random(0).shuffle(keys)
    groups: list[Group] = []
    for key in keys:
        if len(groups) >= num_groups:
            break
        groups += [group for group in group_pack.decode(blobs.get_unverified(key)) if group.split == "train"]
    return groups


def gaps(row: Trajectory, run: VersionRun, dense: Dense) -> np.ndarray:
    """Return |reported - computed| of a run's tokens, in nats."""
    tokens = row.token_ids.tolist()[: run.end]
    computed = dense.of_completion(tokens[: run.start], tokens[run.start :])
    return np.abs(row.behaviour_logprobs[run.start : run.end] - np.array(computed))


def check(groups: Sequence[Group], versions: Versions, *, kept_cache: bool) -> dict[str, Any]:
    """Compare every token with its own version and with the version before."""
    own: list[np.ndarray] = []
    before: list[np.ndarray] = []
    spans: Counter[int] = Counter()
    over_older_keys = 0
    for row in _rows(groups):
        spans[len(row.version_runs)] += 1
        for run in row.version_runs[:1] if kept_cache else row.version_runs:
            off = gaps(row, run, versions[run.version])
            if kept_cache and len(row.version_runs) == 1 and off.max() > TOLERANCE:
                over_older_keys += 1
                continue
            own.append(off)
            if run.version - 1 in versions:
                before.append(gaps(row, run, versions[run.version - 1]))
    num_tokens = sum(row.num_completion_tokens for row in _rows(groups))
    off, wrong = np.concatenate(own), np.concatenate(before)
    return {
        "groups": len(groups),
        "samples": sum(spans.values()),
        "samples_by_number_of_versions": dict(sorted(spans.items())),
        "samples_over_an_older_prefix": over_older_keys,
        "tokens_judged": len(off),
        "tokens_not_judged": num_tokens - len(off),
        "versions": len({run.version for row in _rows(groups) for run in row.version_runs}),
        "own_version": {"mean": float(off.mean()), "max": float(off.max()), "beyond": int((off > TOLERANCE).sum())},
        "version_before": {"mean": float(wrong.mean()), "share_beyond": float((wrong > TOLERANCE).mean())},
    }


def _rows(groups: Sequence[Group]) -> Iterator[Trajectory]:
    return (row for group in groups for row in group.trajectories)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--kept-cache", action="store_true")
    options = parser.parse_args()
    blobs = Blobs(load(ConnectionSettings, overrides=[f"run.id={options.run}"], environ=os.environ).settings.s3)
    with tempfile.TemporaryDirectory() as scratch:
        groups = sampled_groups(blobs, options.run, options.groups)
        found = check(groups, Versions(blobs, options.run, Path(scratch)), kept_cache=options.kept_cache)
    print(json.dumps(found, indent=1))
    return 1 if found["own_version"]["beyond"] else 0


if __name__ == "__main__":
    sys.exit(main())
