"""Digests of what a step trained: the trainer reports them with the step, and an audit compares the record with them.

They are in the step's event, in NATS, and in its line of `metrics.jsonl`, on the trainer's disk. The record is in the
object store: whoever changes it there, with all hashes of its chapters, does not change these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from penstock.protocol.facts import BlobRef, Count, ScoredGroup, Sha256, Wire

STEP_DIGEST = "groups_digest"  # key of the step's event and line that holds a `StepDigest`
GROUP_DIGITS = 8  # of each group's digest: they find the group that differs, ``sha256`` proves that one does
MAX_LISTED = 2048  # groups; in a larger step only ``sha256`` is reported, so that its event fits into a message


class StepDigest(Wire):
    """What a step trained, in order: ``groups`` has the first `GROUP_DIGITS` hex digits of each `group_digest`."""

    epoch: Count  # of the trainer session that made the step
    sha256: Sha256  # of number, versions and the groups' digests
    groups: Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=GROUP_DIGITS * MAX_LISTED)]

    def listed(self) -> list[str]:
        """Return the digits of each group; empty when the step has too many groups."""
        return [self.groups[at : at + GROUP_DIGITS] for at in range(0, len(self.groups), GROUP_DIGITS)]


def group_digest(scored: ScoredGroup, pack: BlobRef, use: int) -> str:
    """Return the sha256 of a trained group: id, rewards, parts, lengths, versions, its pack and the number of its use.

    Fields at their default are left out, so that a field that is added later does not change the digest of an old group.
    """
    return _sha256([scored.model_dump(exclude_defaults=True), pack.sha256, pack.size_bytes, use])


def step_digest(epoch: int, step: int, trained_version: int, made_version: int, groups: Sequence[str]) -> StepDigest:
    """Return the digest of a step from those of its groups, in their order."""
    listed = groups if len(groups) <= MAX_LISTED else ()
    return StepDigest(
        epoch=epoch,
        sha256=_sha256([epoch, step, trained_version, made_version, list(groups)]),
        groups="".join(digest[:GROUP_DIGITS] for digest in listed),
    )


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
