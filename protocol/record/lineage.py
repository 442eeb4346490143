"""The record of a run: which groups, in which order, made which version, and how all others were closed.

Every checkpoint writes one *chapter*: everything since the previous checkpoint, as one immutable object
(`blob_keys.lineage_chapter`, MessagePack like a fact). A chapter names its parent by key, size and sha256;
the checkpoint's ``state.json`` names the last one, and so does `CheckpointCommitted` in the state bucket
under ``checkpoint``. Only chapters that can be reached from there are part of the record: steps that a crash
rolled back are in chapters that no checkpoint references, or in none.

```
state.json ──record──▶ chapter 3 ──parent──▶ chapter 2 ──parent──▶ chapter 1
                        steps 21-30            steps 11-20            steps 1-10
```

Ids: a training group is ``e<epoch>.p<prompt>.a<attempt>``, an evaluated one ``eval.v<version>.p<prompt>``.
In every split and at every chapter: issued = used + dropped (by reason) + in flight, by id and in number. A group
whose dead letter was sent again is ``revived``: no longer dropped, and to be closed once more.

To train a recorded step again (replay): fetch ``packs``, read each group's ``scored.generated.row_group``
from its pack, keep the order of ``groups``, train at ``trained_version`` with the settings of the trainer session
of that ``epoch``; the result must have ``weights_digest``. To score again: the same packs, other rewards.

Digests of what a step trained: the trainer reports them with the step, and an audit compares the record with them.

They are in the step's event, in NATS, and in its line of `metrics.jsonl`, on the trainer's disk. The record is in the
object store: whoever changes it there, with all hashes of its chapters, does not change these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from penstock.protocol.facts import Fact, decode
from penstock.protocol.groups import (
    UNLESS_EMPTY,
    AbandonedCompletion,
    BlobRef,
    Count,
    Finite,
    Identifier,
    ScoredGroup,
    Sha256,
    Split,
    Wire,
)

STEP_DIGEST = "groups_digest"  # key of the step's event and line that holds a `StepDigest`
GROUP_DIGITS = 8  # of each group's digest: they find the group that differs, ``sha256`` proves that one does
MAX_LISTED = 2048  # groups; in a larger step only ``sha256`` is reported, so that its event fits into a message


class RecordedGroup(Wire):
    """One group as it was trained: ``scored`` has lengths, versions, row group, rewards and their scorer."""

    prompt: Count  # number of the prompt in the training data
    pack: Count  # number in the step's list of packs
    scored: ScoredGroup
    use: Annotated[int, Field(ge=1)] = 1  # above 1: trained again by design, and closed by its first use

    @property
    def group_id(self) -> str:
        return self.scored.generated.group_id

    @property
    def num_tokens(self) -> int:
        return sum(self.scored.generated.completion_tokens)


class RecordedStep(Wire):
    """One step: ``groups``, in the order of use, turned ``trained_version`` into ``made_version``.

    ``updates`` are its optimizer steps, of all passes in the order they were made, each with the places of its groups
    in ``groups``; empty: one optimizer step on all of them.
    """

    epoch: Count  # of the trainer session that made it
    step: Count  # number of the step, from 1
    trained_version: Count  # the parent; staleness of the groups was measured against it
    made_version: Count
    weights_digest: Sha256  # of ``made_version``, see `protocol/weights/layout.py`
    packs: tuple[BlobRef, ...]
    groups: Annotated[tuple[RecordedGroup, ...], Field(min_length=1)]
    skipped: dict[str, Count] = Field(default={})  # trajectories that filters left out of the loss, by reason
    updates: tuple[Annotated[tuple[Count, ...], Field(min_length=1)], ...] = ()
    left_out: tuple[Count, ...] = ()  # numbers of the optimizer steps, from 0, that were not made and changed nothing
    # (version, staleness) where that is not ``trained_version`` minus the version: a session was rolled back in between
    ages: Annotated[tuple[tuple[Count, Count], ...], UNLESS_EMPTY] = ()

    def staleness(self, group: RecordedGroup) -> int:
        generated, ages = group.scored.generated, dict(self.ages)
        return max(ages.get(v, self.trained_version - v) for v in (generated.oldest_version, generated.newest_version))

    @model_validator(mode="after")
    def _updates_are_of_its_groups(self) -> RecordedStep:
        for places in self.updates:
            if places != tuple(sorted(set(places))) or places[-1] >= len(self.groups):
                raise ValueError(
                    f"step {self.step}: an optimizer step on the groups {list(places[:8])}, expected ascending numbers "
                    f"{len(self.groups)}; restore the record"
                )
        if self.left_out != tuple(sorted(set(self.left_out))) or self.left_out[-1:] >= (max(1, len(self.updates)),):
            raise ValueError(
                f"step {self.step}: the optimizer steps {list(self.left_out[:8])} were left out, expected ascending "
                f"numbers below {max(1, len(self.updates))}; restore the record"
            )
        return self


class RecordedSession(Wire):
    """One session of the trainer, a process that held the run's lease, and the version it started from.

    The stored field of sessions is called ``lives``. ``version`` has the weights of ``parent_version`` under a
    new number when an earlier session had published beyond its checkpoint; without a parent the run's first model.
    """

    epoch: Count  # of its lease, grows with every session
    holder: Identifier
    at: Finite  # seconds since 1970, by the trainer's clock; for people only
    step: Count  # steps done when it started
    version: Count
    parent_version: Count | None
    weights_digest: Sha256
    config: BlobRef  # all settings with their origin, JSON, secrets masked
    # libraries and machine, as `trainer/recovery/run_record_writer.py` names them
    environment: dict[str, str] = Field(default={})


class DroppedGroup(Wire):
    """An issued group that was closed without being used; ``num_tokens`` is 0 when none are known.

    ``pack`` is the number of its pack in the chapter's ``closed_packs``; None: not recorded, or never verified.
    """

    group_id: Identifier
    split: Split
    reason: Identifier
    num_tokens: Count
    pack: Count | None = None
    # completions of it that were started and not kept
    abandoned: Annotated[tuple[AbandonedCompletion, ...], UNLESS_EMPTY] = ()


class EvaluatedGroup(Wire):
    """A held-out group that is part of an evaluation; ``pack`` as in `DroppedGroup`."""

    group_id: Identifier
    num_tokens: Count
    pack: Count | None = None


class SplitTotals(Wire):
    """Counts of a split's groups and sampled tokens since the start of the run, by how they were closed.

    ``used`` is trained or, of held-out groups, evaluated. ``refused`` counts deliveries that were not used
    because the group was closed already or never issued: they are not part of the equation. ``abandoned`` counts
    completions of the used and the dropped groups that were started and not kept, by reason (`AbandonedCompletion`).
    """

    issued: Count = 0
    used: Count = 0
    used_tokens: Count = 0
    dropped: dict[str, Count] = Field(default={})
    dropped_tokens: dict[str, Count] = Field(default={})
    refused: dict[str, Count] = Field(default={})
    refused_tokens: dict[str, Count] = Field(default={})
    abandoned: Annotated[dict[str, Count], UNLESS_EMPTY] = Field(default={})
    abandoned_tokens: Annotated[dict[str, Count], UNLESS_EMPTY] = Field(default={})
    in_flight: Count = 0


class AccountState(Wire):
    """All totals, and the ids that are issued and not closed, sorted."""

    totals: dict[Split, SplitTotals] = Field(default={})
    in_flight: dict[Split, tuple[Identifier, ...]] = Field(default={})


class LineageChapter(Fact):
    """Everything between two checkpoints, written by the trainer before the second one is committed."""

    schema_tag = "lineage_chapter.v1"
    run_id: Identifier
    number: Count  # from 1, without gaps
    parent: BlobRef | None  # None for the first
    epoch: Count  # of the trainer session that wrote it
    step: Count  # steps done at its end
    version: Count  # of the weights at its end
    weights_digest: Sha256  # of these
    lives: tuple[RecordedSession, ...] = ()  # trainer sessions that started
    steps: tuple[RecordedStep, ...] = ()
    issued: dict[Split, tuple[Identifier, ...]] = Field(default={})
    revived: tuple[Identifier, ...] = ()  # training groups that an earlier chapter dropped by a dead letter: open again
    dropped: tuple[DroppedGroup, ...] = ()
    evaluated: tuple[EvaluatedGroup, ...] = ()
    closed_packs: tuple[BlobRef, ...] = ()  # of dropped and evaluated groups; their retention is that of unused packs
    account: AccountState


class CheckpointCommitted(Fact):
    """In the state bucket under ``checkpoint``: the newest committed checkpoint and the end of its record.

    ``epoch`` is that of the trainer that holds the run; a trainer that takes it over writes this again under its
    own. All other fields are None until a checkpoint is committed.
    """

    schema_tag = "checkpoint_committed.v1"
    epoch: Count
    step: Count | None = None
    version: Count | None = None
    chapter: Count | None = None  # number of the last chapter
    record: BlobRef | None = None  # the last chapter
    state_sha256: Sha256 | None = None  # of the bytes of state.json


def chapters(last: BlobRef | None, fetch: Callable[[BlobRef], bytes]) -> Iterator[LineageChapter]:
    """Read a record from its last chapter (None: nothing is recorded) back to its first.

    ``fetch`` returns a verified object (`Blobs.get`). Raises BlobMissing, BlobCorrupt, or WireError for no chapter.
    """
    while last is not None:
        chapter = decode(fetch(last), LineageChapter)
        yield chapter
        last = chapter.parent


class StepDigest(Wire):
    """What a step trained, in order: ``groups`` has the first `GROUP_DIGITS` hex digits of each `group_digest`."""

    epoch: Count  # of the trainer session that made the step
    sha256: Sha256  # of number, versions and the groups' digests
    groups: Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=GROUP_DIGITS * MAX_LISTED)]

    def listed(self) -> list[str]:
        return [self.groups[at : at + GROUP_DIGITS] for at in range(0, len(self.groups), GROUP_DIGITS)]


def group_digest(scored: ScoredGroup, pack: BlobRef, use: int) -> str:
    """Return the sha256 of a trained group: id, rewards, parts, lengths, versions, its pack and the number of its use.

    Fields at their default are left out, so that a field added later changes no digest of an old group.
    """
    return _sha256([scored.model_dump(exclude_defaults=True), pack.sha256, pack.size_bytes, use])


def step_digest(epoch: int, step: int, trained_version: int, made_version: int, groups: Sequence[str]) -> StepDigest:
    listed = groups if len(groups) <= MAX_LISTED else ()
    return StepDigest(
        epoch=epoch,
        sha256=_sha256([epoch, step, trained_version, made_version, list(groups)]),
        groups="".join(digest[:GROUP_DIGITS] for digest in listed),
    )


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
