"""The whole record of a run: all chapters from the first to the last, checked to be consecutive.

`protocol/record/lineage.py` defines a chapter. Replay, rescoring and lineage read a run through this.
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
    RecordedSession,
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
    """A whole record; ``chapters`` are sorted, the oldest first."""

    run_id: str
    end: BlobRef  # the last chapter
    chapters: tuple[LineageChapter, ...]

    @classmethod
    def read(cls, run_id: str, last: BlobRef, fetch: Callable[[BlobRef], bytes]) -> StoredRecord:
        """Read a record back from its last chapter.

        Args:
            run_id: The run it must belong to.
            last: The chapter that the newest checkpoint references, see `end_of_record`.
            fetch: Returns a verified object (`Blobs.get`).

        Raises:
            BlobMissing, BlobCorrupt: A chapter is missing or altered.
            WireError: An object is no chapter.
            RecordBroken: Chapters, steps or versions are not consecutive, or a group has no pack.
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
        raise RecordBroken(
            f"run {self.run_id} has no version {version} in its record, which ends with version {self.last_version}; "
            "versions that a crash rolled back are in no record"
        )

    def uses_of(self, group_id: str) -> tuple[Use, ...]:
        return tuple(Use(step, group) for step in self.steps for group in step.groups if group.group_id == group_id)

    def _check(self) -> None:
        version: int | None = None
        num_steps, epochs = 0, set[int]()
        for number, chapter in enumerate(self.chapters, start=1):
            if chapter.run_id != self.run_id or chapter.number != number:
                raise RecordBroken(
                    f"the record of run {self.run_id} has, in place of chapter {number}, chapter {chapter.number} of "
                    f"run {chapter.run_id}"
                )
            for session in chapter.lives:
                if version is not None and session.parent_version != version:
                    raise RecordBroken(
                        f"run {self.run_id}: the session of epoch {session.epoch} continues version {session.parent_version}, "
                        f"but the session before it ended with {version}"
                    )
                version = session.version
                epochs.add(session.epoch)
            for step in chapter.steps:
                num_steps += 1
                if (step.step, step.trained_version) != (num_steps, version) or step.epoch not in epochs:
                    raise RecordBroken(
                        f"run {self.run_id}, chapter {number}: expected step {num_steps} on version {version}, got step "
                        f"{step.step} of epoch {step.epoch} on version {step.trained_version}"
                    )
                version = step.made_version
                unnamed = [group.group_id for group in step.groups if group.pack >= len(step.packs)]
                if unnamed:
                    raise RecordBroken(
                        f"run {self.run_id}, chapter {number}: step {step.step} names no pack for group {unnamed[0]}"
                    )
            if chapter.version != version:
                raise RecordBroken(
                    f"run {self.run_id}: chapter {number} states that it ends with version {chapter.version}, its steps end "
                    f"with {version}"
                )


def end_of_record(run_id: str, folder: Path, pointer: Callable[[], bytes | None]) -> BlobRef:
    """Return the last committed chapter: of the newest checkpoint on this machine, else the one that NATS references.

    Args:
        run_id: The run.
        folder: Its folder on this machine; it may be missing.
        pointer: Reads the key ``checkpoint`` of the run's state bucket; called only when there is no checkpoint here.

    Raises:
        RecordBroken: No checkpoint was committed, or one cannot be read.
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
