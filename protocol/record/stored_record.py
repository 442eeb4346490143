"""The record of a run as one story: every chapter from the first to the last, checked to follow on one another.

`protocol/record/lineage.py` says what a chapter holds. Whoever replays, scores again or asks where a version comes from
begins here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.protocol.errors import MalformedFact, RecordBroken
from penstock.protocol.facts import BlobRef, decode
from penstock.protocol.record.checkpoint_state import committed
from penstock.protocol.record.lineage import (
    CheckpointCommitted,
    LineageChapter,
    RecordedGroup,
    RecordedLife,
    RecordedStep,
    chapters,
)


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a group in training: the step it was part of."""

    step: RecordedStep
    group: RecordedGroup


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A whole record; ``told`` are its chapters, the oldest first."""

    run_id: str
    end: BlobRef  # the last chapter
    told: tuple[LineageChapter, ...]

    @classmethod
    def read(cls, run_id: str, last: BlobRef, fetch: Callable[[BlobRef], bytes]) -> StoredRecord:
        """Read a record back from its last chapter.

        Args:
            run_id: The run it must belong to.
            last: What the newest checkpoint names, see `end_of_record`.
            fetch: Returns a verified object (`Blobs.get`).

        Raises:
            BlobMissing, BlobCorrupt: A chapter is gone or altered.
            WireError: A chapter is not one.
            RecordBroken: Chapters, steps or versions do not follow on one another.
        """
        record = cls(run_id, last, tuple(chapters(last, fetch))[::-1])
        record._check()
        return record

    @property
    def lives(self) -> tuple[RecordedLife, ...]:
        """Every life of a trainer that committed something, in order."""
        return tuple(life for chapter in self.told for life in chapter.lives)

    @property
    def steps(self) -> tuple[RecordedStep, ...]:
        """Every optimizer step that counts, in order."""
        return tuple(step for chapter in self.told for step in chapter.steps)

    @property
    def last_version(self) -> int:
        """The version at the end."""
        return self.told[-1].version

    def life_of(self, step: RecordedStep) -> RecordedLife:
        """Return the life that took a step."""
        return next(life for life in self.lives if life.epoch == step.epoch)

    def maker_of(self, version: int) -> RecordedStep | RecordedLife:
        """Return the step that made a version, or the life that published it without a step.

        Raises RecordBroken for a version that is not in the record.
        """
        for life in self.lives:
            if life.version == version and life.parent_version != version:
                return life
        for step in self.steps:
            if step.made_version == version:
                return step
        raise RecordBroken(
            f"run {self.run_id} has no version {version} in its record, which ends with version {self.last_version}; "
            "versions that a crash rolled back are in no record"
        )

    def uses_of(self, group_id: str) -> tuple[Use, ...]:
        """Return every step that a group was trained in."""
        return tuple(Use(step, group) for step in self.steps for group in step.groups if group.group_id == group_id)

    def _check(self) -> None:
        version: int | None = None
        num_steps, epochs = 0, set[int]()
        for number, chapter in enumerate(self.told, start=1):
            if chapter.run_id != self.run_id or chapter.number != number:
                raise RecordBroken(
                    f"the record of run {self.run_id} has, in place of chapter {number}, chapter {chapter.number} of "
                    f"run {chapter.run_id}"
                )
            for life in chapter.lives:
                if version is not None and life.parent_version != version:
                    raise RecordBroken(
                        f"run {self.run_id}: the life of epoch {life.epoch} goes on from version {life.parent_version}, "
                        f"and the one before it ended with {version}"
                    )
                version = life.version
                epochs.add(life.epoch)
            for step in chapter.steps:
                num_steps += 1
                if (step.step, step.trained_version) != (num_steps, version) or step.epoch not in epochs:
                    raise RecordBroken(
                        f"run {self.run_id}, chapter {number}: expected step {num_steps} on version {version}, got step "
                        f"{step.step} of epoch {step.epoch} on version {step.trained_version}"
                    )
                version = step.made_version
            if chapter.version != version:
                raise RecordBroken(
                    f"run {self.run_id}: chapter {number} says it ends with version {chapter.version}, its steps end "
                    f"with {version}"
                )


def end_of_record(run_id: str, folder: Path, pointer: Callable[[], bytes | None]) -> BlobRef:
    """Return the last chapter that counts: the one of the newest checkpoint here, else the one that NATS names.

    Args:
        run_id: The run.
        folder: Its folder on this machine; it need not be there.
        pointer: Reads the key ``checkpoint`` of the run's state bucket; asked only without a checkpoint here.

    Raises:
        RecordBroken: Nothing was committed, or a checkpoint cannot be read.
    """
    try:
        found = committed(folder / "checkpoints")
    except (OSError, MalformedFact) as err:
        raise RecordBroken(f"a checkpoint below {folder} is not readable: {err}") from None
    if found:
        return found[-1][1].record
    value = pointer()
    known = decode(value, CheckpointCommitted) if value is not None else None
    if known is None or known.record is None:
        raise RecordBroken(
            f"run {run_id} has committed no checkpoint yet, and so has no record; its trainer writes both every "
            "trainer.checkpoint_every steps and at its end"
        )
    return known.record
