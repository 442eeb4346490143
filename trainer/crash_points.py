"""Named points at which this process kills itself with SIGKILL, so that a test can crash it exactly there.

``trainer.kill_at = "committed"`` (or ``PENSTOCK_TRAINER__KILL_AT=committed:2``: the second time in this session;
``object_stored@1``: on rank 1, not on rank 0) arms one point. By default none is armed, and passing a point costs one
comparison.

    one of several optimizer steps ▸ [updated] ▸ …
    step ▸ copy in memory [captured] ▸ each shard [shard_written] ▸ [written] ▸ commit ▸ [committed] ▸ copy ▸ [copied] ▸ point ▸ [pointed] ▸ each file [removing] ▸ acknowledge train [acknowledging] eval ▸ [acknowledged]
         ▸ each object [object_stored] ▸ [shards_stored] ▸ manifest ▸ [manifest_stored] ▸ head ▸ [head_moved] ▸ announce ▸ [announced]
"""

from __future__ import annotations

import os
import signal
from enum import StrEnum

from penstock.protocol.errors import ConfigError


class CrashPoint(StrEnum):
    """A point between two actions: passed after the first and before the second."""

    STEPPED = "stepped"  # the optimizer step is made ▸ its groups are entered in the ledger
    RECORDED = "recorded"  # the chapter is in the object store ▸ the checkpoint is written
    CAPTURED = "captured"  # the state is copied in memory ▸ the first file of the checkpoint
    SHARD_WRITTEN = "shard_written"  # one of a rank's shards of a checkpoint ▸ its next, or the answer to rank 0
    WRITTEN = "written"  # every file of the checkpoint is on the disk ▸ the rename that commits it
    COMMITTED = "committed"  # the rename ▸ the copy in the object store, or the checkpoint key in NATS
    COPIED = "copied"  # the copy of the checkpoint in the object store ▸ the checkpoint key in NATS
    POINTED = "pointed"  # the checkpoint key ▸ the first acknowledgement
    REMOVING = "removing"  # one file of a checkpoint that the object store has is removed from the disk ▸ its next
    FETCHED = "fetched"  # one file of a checkpoint is fetched from the object store ▸ its next, or the load
    ACKNOWLEDGING = "acknowledging"  # half of the acknowledgements ▸ the others
    ACKNOWLEDGED = "acknowledged"  # the last acknowledgement ▸ the next step
    OBJECT_STORED = "object_stored"  # one of a rank's objects of a version ▸ its next, or the answer to rank 0
    SHARDS_STORED = "shards_stored"  # all objects of all ranks ▸ the manifest
    MANIFEST_STORED = "manifest_stored"  # its manifest ▸ the head
    HEAD_MOVED = "head_moved"  # the head ▸ the announcement
    ANCHOR_STORED = "anchor_stored"  # the buckets of a full snapshot of a version ▸ its manifest
    ANNOUNCED = "announced"  # the announcement ▸ tasks for that version
    UPDATED = "updated"  # an optimizer step of a batch that has several ▸ its next, or the end of the batch


class _Armed:
    point: CrashPoint | None = None
    times_left = 0


def arm(text: str, *, rank: int = 0) -> None:
    what, _, where = text.partition("@")
    name, _, times = what.partition(":")
    try:
        point = CrashPoint(name) if text else None
        _Armed.point = point if int(where or 0) == rank else None
        _Armed.times_left = int(times or 1)
    except ValueError:
        raise ConfigError(
            f"trainer.kill_at = {text!r}: expected one of {', '.join(CrashPoint)}, with :N for the N-th time "
            "and @R for rank R; set it to one of them, or leave it out"
        ) from None


def reach(point: CrashPoint) -> None:
    if _Armed.point is point:
        _Armed.times_left -= 1
        if _Armed.times_left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
