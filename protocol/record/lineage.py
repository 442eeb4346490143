"""The record of a run: which groups, in which order, made which version, and what became of all others.

Every checkpoint writes one *chapter*: everything since the checkpoint before it, as one immutable object
(`blob_keys.lineage_chapter`, MessagePack like a fact). A chapter names its parent by key, size and sha256;
the checkpoint's ``state.json`` names the last one, and so does `CheckpointCommitted` in the state bucket
under ``checkpoint``. Only what can be reached from there is true: steps that a crash rolled back are in
chapters that no checkpoint names, or in none.

```
state.json ──record──▶ chapter 3 ──parent──▶ chapter 2 ──parent──▶ chapter 1
                        steps 21-30            steps 11-20            steps 1-10
```

Ids: a training group is ``e<epoch>.p<prompt>.a<attempt>``, an evaluated one ``eval.v<version>.p<prompt>``.
In every split and at every chapter: issued = used + dropped (by reason) + in flight, by id and in number. A group
whose dead letter was sent again is ``revived``: dropped no longer, and to be closed once more.

To train a recorded step again (replay): fetch ``packs``, read each group's ``scored.generated.row_group``
from its pack, keep the order of ``groups``, train at ``trained_version`` with the settings of the life that
``epoch`` names; the result must have ``weights_digest``. To score again: the same packs, other rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

from pydantic import Field

from penstock.protocol.facts import BlobRef, Count, Fact, Finite, Identifier, ScoredGroup, Sha256, Split, Wire, decode


class RecordedGroup(Wire):
    """One group as it was trained: ``scored`` has lengths, versions, row group, rewards and who gave them."""

    prompt: Count  # number of the prompt in the training data
    pack: Count  # number in the step's list of packs
    scored: ScoredGroup
    use: Annotated[int, Field(ge=1)] = 1  # above 1: trained again by design, and closed by its first use

    @property
    def group_id(self) -> str:
        """Id of the group."""
        return self.scored.generated.group_id

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all its trajectories."""
        return sum(self.scored.generated.completion_tokens)


class RecordedStep(Wire):
    """One optimizer step: ``groups`` in the order they were used made ``made_version`` of ``trained_version``."""

    epoch: Count  # of the life that took it
    step: Count  # number of the step, from 1
    trained_version: Count  # the parent: what the groups' staleness was measured against
    made_version: Count
    weights_digest: Sha256  # of ``made_version``, see `protocol/weights/digest.py`
    packs: tuple[BlobRef, ...]
    groups: Annotated[tuple[RecordedGroup, ...], Field(min_length=1)]
    skipped: dict[str, Count] = Field(default={})  # trajectories that filters left out of the loss, by reason


class RecordedLife(Wire):
    """A trainer process that led the run, from the version it began with.

    ``version`` has the weights of ``parent_version`` under a new number when an earlier life had published
    beyond its last checkpoint; without a parent it is the model that the run started from.
    """

    epoch: Count  # of its lease, grows with every life
    holder: Identifier
    at: Finite  # seconds since 1970, by the trainer's clock; for people only
    step: Count  # steps done when it began
    version: Count
    parent_version: Count | None
    weights_digest: Sha256
    config: BlobRef  # all settings with their origin, JSON, secrets masked
    environment: dict[str, str] = Field(
        default={}
    )  # libraries and machine, as `trainer/recovery/environment_fingerprint.py` names them


class DroppedGroup(Wire):
    """An issued group that was closed without being used; ``num_tokens`` is 0 when none are known."""

    group_id: Identifier
    split: Split
    reason: Identifier
    num_tokens: Count


class EvaluatedGroup(Wire):
    """A held-out group that is part of an evaluation."""

    group_id: Identifier
    num_tokens: Count


class SplitTotals(Wire):
    """What became of a split's groups and of their sampled tokens since the run began.

    ``used`` is trained or, of held-out groups, evaluated. ``refused`` counts deliveries that were not used
    because the group was closed already or never issued: they are no groups of the equation.
    """

    issued: Count = 0
    used: Count = 0
    used_tokens: Count = 0
    dropped: dict[str, Count] = Field(default={})
    dropped_tokens: dict[str, Count] = Field(default={})
    refused: dict[str, Count] = Field(default={})
    refused_tokens: dict[str, Count] = Field(default={})
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
    epoch: Count  # of the life that wrote it
    step: Count  # steps done at its end
    version: Count  # of the weights at its end
    weights_digest: Sha256  # of these
    lives: tuple[RecordedLife, ...] = ()
    steps: tuple[RecordedStep, ...] = ()
    issued: dict[Split, tuple[Identifier, ...]] = Field(default={})
    revived: tuple[Identifier, ...] = ()  # training groups that an earlier chapter dropped as dead: open again
    dropped: tuple[DroppedGroup, ...] = ()
    evaluated: tuple[EvaluatedGroup, ...] = ()
    account: AccountState


class CheckpointCommitted(Fact):
    """In the state bucket under ``checkpoint``: the newest committed checkpoint and the end of its record.

    ``epoch`` is that of the trainer that holds the run: who takes it over writes this again under its own. All
    else is None until something is committed.
    """

    schema_tag = "checkpoint_committed.v1"
    epoch: Count
    step: Count | None = None
    version: Count | None = None
    chapter: Count | None = None  # number of the last chapter
    record: BlobRef | None = None  # the last chapter
    state_sha256: Sha256 | None = None  # of the bytes of state.json


def chapters(last: BlobRef | None, fetch: Callable[[BlobRef], bytes]) -> Iterator[LineageChapter]:
    """Read a record from its last chapter back to its first.

    Args:
        last: What the checkpoint names; None: nothing is recorded.
        fetch: Returns a verified object (`Blobs.get`).

    Raises:
        BlobMissing, BlobCorrupt: A chapter is gone or altered.
        WireError: A chapter is not one.
    """
    while last is not None:
        chapter = decode(fetch(last), LineageChapter)
        yield chapter
        last = chapter.parent
