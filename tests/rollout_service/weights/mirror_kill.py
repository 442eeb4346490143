"""A worker's mirror in a separate process, which kills itself with SIGKILL at a point of a fetch.

Its arguments: the point; settings, folder, run, versions and manifests as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.weights import mirror_slot
from penstock.rollout_service.weights.mirror import Mirror

POINTS = ("journal", "half a bucket", "some buckets", "all buckets", "state")


def _kill_this_process(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(mirror: Mirror, point: str) -> None:
    reader: Any = mirror._reader
    bring, count = reader.bring, [0]

    def killing(plan: Any, number: int, raw: Any) -> None:
        if point == "half a bucket":
            before = raw.copy()
            bring(plan, number, raw)
            raw[raw.size // 2 :] = before[raw.size // 2 :]
            _kill_this_process()
        bring(plan, number, raw)
        count[0] += 1
        if point == "some buckets" and count[0] == 2:
            _kill_this_process()

    reader.bring = killing
    write = mirror_slot.Slot._write

    def writing(slot: Any, state: Any) -> None:
        if point == "all buckets" and state.becoming is None:
            _kill_this_process()
        write(slot, state)
        if point == ("journal" if state.becoming is not None else "state"):
            _kill_this_process()

    mirror_slot.Slot._write = writing


def main() -> None:
    """Fetch all versions, the last one with the kill armed."""
    point, given = sys.argv[1:]
    arguments = json.loads(given)
    mirror = Mirror(Blobs(S3Settings.model_validate(arguments["s3"])), Path(arguments["folder"]), arguments["run_id"])
    *before, last = arguments["versions"]
    for version, manifest in before:
        mirror.fetch(PolicyVersion(version), BlobRef.model_validate(manifest), keep=[PolicyVersion(version - 1)])
    arm(mirror, point)
    version, manifest = last
    mirror.fetch(PolicyVersion(version), BlobRef.model_validate(manifest), keep=[PolicyVersion(version - 1)])
