"""What is stored of a run, read back whole: its record, and its groups with other rewards.

`protocol/record/lineage.py` defines a chapter. Replay, rescoring and lineage read a run through `StoredRecord`, which
checks that all chapters from the first to the last are consecutive.

`penstock rescore` writes a rescored input, the trainer reads it (``data.from_run``). It has an id like a run's, and all
its objects are below ``runs/<id>/``: copies of the packs, byte for byte, pieces with the groups and their new rewards
in the order in which the source run trained them, and last the input itself, whose key contains its sha256. A run that
trains on it writes a marker there: its record references these packs, and it has no separate copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from penstock.protocol import blob_keys
from penstock.protocol.errors import MalformedFact, RecordBroken
from penstock.protocol.facts import Fact, decode
from penstock.protocol.groups import BlobRef, Count, Finite, Identifier
from penstock.protocol.record.checkpoint_state import committed
from penstock.protocol.record.lineage import (
    CheckpointCommitted,
    LineageChapter,
    RecordedGroup,
    RecordedSession,
    RecordedStep,
    chapters,
)
from penstock.protocol.transport.blobs import Blobs


@dataclass(frozen=True, slots=True)
class Use:
    step: RecordedStep
    group: RecordedGroup


@dataclass(frozen=True, slots=True)
class StoredRecord:
    run_id: str
    end: BlobRef  # the last chapter
    chapters: tuple[LineageChapter, ...]

    @classmethod
    def read(cls, run_id: str, last: BlobRef, fetch: Callable[[BlobRef], bytes]) -> StoredRecord:
        """Read a run's record back from its last chapter, which the newest checkpoint references (`end_of_record`).

        ``fetch`` returns a verified object (`Blobs.get`). Raises BlobMissing or BlobCorrupt for a chapter, WireError
        for an object that is none, RecordBroken if chapters, steps or versions have gaps, or a group has no pack.
        """
        record = cls(run_id, last, tuple(chapters(last, fetch))[::-1])
        record._check()
        return record

    @property
    def sessions(self) -> tuple[RecordedSession, ...]:
        return tuple(session for chapter in self.chapters for session in chapter.lives)

    @property
    def steps(self) -> tuple[RecordedStep, ...]:
        return tuple(step for chapter in self.chapters for step in chapter.steps)

    @property
    def last_version(self) -> int:
        return self.chapters[-1].version

    def session_of(self, step: RecordedStep) -> RecordedSession:
        return next(session for session in self.sessions if session.epoch == step.epoch)

    def maker_of(self, version: int) -> RecordedStep | RecordedSession:
        """Return the step that made a version, or the trainer session that published it without a step.

        Raises RecordBroken for a version that is not in the record.
        """
        for session in self.sessions:
            if session.version == version and session.parent_version != version:
                return session
        for step in self.steps:
            if step.made_version == version:
                return step
        if (session := self.rolled_back_by(version)) is not None:
            steps = [str(step.step) for step in self.steps if version in dict(step.ages)]
            raise RecordBroken(
                f"version {version} of run {self.run_id} is of a session that was rolled back: version "
                f"{session.version} has the weights of {session.parent_version or 'the initial model'} again. Groups "
                f"that it sampled are in the steps: {', '.join(steps) or 'none'}"
            )
        raise RecordBroken(
            f"run {self.run_id} has no version {version} in its record, which ends with version {self.last_version}"
        )

    def rolled_back_by(self, version: int) -> RecordedSession | None:
        """Return the session that went on from an earlier version, and left this one out of the record, or None."""
        return next((s for s in self.sessions if (s.parent_version or 0) < version < s.version), None)

    def uses_of(self, group_id: str) -> tuple[Use, ...]:
        return tuple(Use(step, group) for step in self.steps for group in step.groups if group.group_id == group_id)

    def _check(self) -> None:
        version: int | None = None
        num_steps, epochs = 0, set[int]()
        for number, chapter in enumerate(self.chapters, start=1):
            if chapter.run_id != self.run_id or chapter.number != number:
                raise RecordBroken(
                    f"run {self.run_id}: in place of chapter {number}, chapter {chapter.number} of run {chapter.run_id}"
                )
            for session in chapter.lives:
                if version is not None and session.parent_version != version:
                    raise RecordBroken(
                        f"run {self.run_id}: the session of epoch {session.epoch} continues version "
                        f"{session.parent_version}, but the session before it ended with {version}"
                    )
                version = session.version
                epochs.add(session.epoch)
            for step in chapter.steps:
                num_steps += 1
                if (step.step, step.trained_version) != (num_steps, version) or step.epoch not in epochs:
                    raise RecordBroken(
                        f"run {self.run_id}, chapter {number}: expected step {num_steps} on version {version}, got "
                        f"step {step.step} of epoch {step.epoch} on version {step.trained_version}"
                    )
                version = step.made_version
                unnamed = [group.group_id for group in step.groups if group.pack >= len(step.packs)]
                if unnamed:
                    raise RecordBroken(
                        f"run {self.run_id}, chapter {number}: step {step.step} names no pack for group {unnamed[0]}"
                    )
            if chapter.version != version:
                raise RecordBroken(
                    f"run {self.run_id}: chapter {number} is of version {chapter.version}, its steps end with {version}"
                )


def end_of_record(run_id: str, folder: Path, pointer: Callable[[], bytes | None]) -> BlobRef:
    """Return the last committed chapter: of the newest checkpoint on this machine, else the one that NATS references.

    ``folder`` may be missing. ``pointer`` reads the key ``checkpoint`` of the run's state bucket; it is called only
    when there is no checkpoint here. Raises RecordBroken if no checkpoint was committed, or one cannot be read.
    """
    try:
        checkpoints = committed(folder / "checkpoints")
    except (OSError, MalformedFact) as err:
        raise RecordBroken(f"a checkpoint below {folder} is not readable: {err}") from None
    if checkpoints:
        return checkpoints[-1][1].record
    value = pointer()
    known = decode(value, CheckpointCommitted) if value is not None else None
    if known is None or known.record is None:
        raise RecordBroken(
            f"run {run_id} has committed no checkpoint yet, and so has no record; its trainer writes both every "
            "trainer.checkpoint_every steps and at its end"
        )
    return known.record


class RescoredPiece(Fact):
    schema_tag = "rescored_piece.v1"
    packs: tuple[BlobRef, ...]
    groups: Annotated[tuple[RecordedGroup, ...], Field(min_length=1)]


class RescoredInput(Fact):
    schema_tag = "rescored_input.v1"
    run_id: Identifier  # of the input
    source: Identifier  # the run it was made from
    source_record: BlobRef  # its last chapter
    source_version: Count  # at the end of that
    reward: str | None  # name of the reward that scored; None: the stored rewards and parts
    weights: dict[str, Finite] = Field(default={})  # of parts; none: the reward as scored
    temperature: Annotated[float, Field(gt=0)]  # that every group was sampled at
    pieces: Annotated[tuple[BlobRef, ...], Field(min_length=1)]
    num_groups: Count
    left_out: dict[Identifier, str] = Field(default={})  # groups without a score, and why


def find_input(name: str, blobs: Blobs) -> tuple[RescoredInput, str]:
    """Return an input by its id, and its sha256.

    Raises RecordBroken when there is none, BlobCorrupt for an altered one.
    """
    prefix = blob_keys.rescored_prefix(name)
    stats = [stat for stat in blobs.list(prefix) if blob_keys.rescored_sha256(name, stat.key)]
    if len(stats) != 1:
        raise RecordBroken(
            f"{len(stats)} rescored inputs are called {name} in bucket {blobs.bucket}; make one with: "
            f"penstock rescore RUN --reward NAME --into {name}"
        )
    sha256 = blob_keys.rescored_sha256(name, stats[0].key)
    data = blobs.get(BlobRef(key=stats[0].key, size_bytes=stats[0].size_bytes, sha256=sha256))
    return decode(data, RescoredInput), sha256


def pieces_of_input(of: RescoredInput, blobs: Blobs) -> Iterator[RescoredPiece]:
    for reference in of.pieces:
        yield decode(blobs.get(reference), RescoredPiece)


def mark_use_of_input(name: str, run_id: str, blobs: Blobs) -> None:
    key = blob_keys.input_users_prefix(name) + run_id
    if not blobs.exists(key):
        blobs.put(key, b"")


def users_of_input(name: str, blobs: Blobs) -> list[str]:
    """Return the other runs that train on this input and still have a record."""
    prefix = blob_keys.input_users_prefix(name)
    marked = sorted(stat.key.removeprefix(prefix) for stat in blobs.list(prefix))
    return [run for run in marked if run != name and any(blobs.list(blob_keys.lineage_prefix(run)))]


def packs_of_input(name: str, blobs: Blobs) -> set[str]:
    if not any(blob_keys.rescored_sha256(name, stat.key) for stat in blobs.list(blob_keys.rescored_prefix(name))):
        return set()
    return {pack.key for piece in pieces_of_input(find_input(name, blobs)[0], blobs) for pack in piece.packs}
