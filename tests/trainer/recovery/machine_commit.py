"""The commit of the state machine: the trainer's own, over a folder in memory and objects in a dictionary.

`Committer`, `RunRecordWriter` and `checkpoint` are the real ones. The other parts of a trainer are replaced here: an
object store, a key in NATS and a lease that never fail, weights that are a digest, a thread whose work is done when the
machine says so, and a collector whose acknowledgements reach the broker later, if at all.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.protocol.facts import decode
from penstock.protocol.groups import BlobRef
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import LineageChapter
from penstock.protocol.versions import PolicyVersion, VersionTree
from penstock.trainer.commit import Committer
from penstock.trainer.connections import Connections
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.recovery import checkpoint
from penstock.trainer.recovery.checkpoint import CHECKPOINTS
from penstock.trainer.recovery.run_record_writer import RunRecordWriter

RUN = "machine"


@functools.cache
def memory_folder() -> Path:
    """The parent of all machines' folders until the process exits: in memory, where an fsync costs nothing."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="trainer-machine-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Objects:
    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> BlobRef:
        self.stored[key] = data
        return BlobRef(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


@dataclass(slots=True)
class DelayedAcks:
    """Replaces the collector: settled groups, and the acknowledgements that the newest checkpoint allows."""

    tracker: Batcher
    covered: Callable[[], list[int]]
    unsent: list[int] = field(default_factory=list)  # acknowledgements that the broker has not received

    @property
    def versions(self) -> VersionTree:
        return self.tracker._groups.versions

    def settled(self) -> list[int]:
        return self.covered()

    def acknowledge(self, sequences: Sequence[int]) -> None:
        self.unsent = list(sequences)


class HeldCommit:
    """Replaces the thread of commits: what it was given is done when it is waited for."""

    def __init__(self) -> None:
        self._commit: Callable[[], None] | None = None

    def start(self, commit: Callable[[], None], *, step: int) -> None:
        assert self._commit is None, f"the commit after step {step} did not wait for the one before"
        self._commit = commit

    def wait(self) -> None:
        commit, self._commit = self._commit, None
        if commit is not None:
            commit()


def committer(folder: Path, *, keep: int, **parts: Any) -> Committer:
    """Return a committer of the run with these parts; the others are replaced by what has no effect."""
    run, trainer = SimpleNamespace(id=RUN, folder=folder), SimpleNamespace(keep_checkpoints=keep)
    settings: Any = SimpleNamespace(publishes_adapters=False, run=run, trainer=trainer)
    planner, events = SimpleNamespace(document=dict), SimpleNamespace(sync=lambda: 0)
    none: dict[str, Any] = {"evaluator": None, "stored": None, "on_committed": lambda _: None}
    return Committer(settings=settings, planner=planner, events=events, **{**none, **parts})


class Commits:
    """The checkpoints of one run, and the chapters they name, over many sessions."""

    def __init__(self, record_writer: type[RunRecordWriter]) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=memory_folder()))
        self.objects = Objects()
        self.lease = SimpleNamespace(epoch=0, confirm=lambda: None)
        self._type = record_writer
        self._record_writer: RunRecordWriter | None = None
        self._thread, self._has_copy = HeldCommit(), False
        self._effects: dict[int, tuple[tuple[str, int], ...]] = {0: ()}  # groups and versions trained, by step
        self.step = 0

    def close(self) -> None:
        shutil.rmtree(self.folder)

    def newest(self) -> CheckpointState | None:
        found = checkpoint.newest(self.folder / CHECKPOINTS, RUN)
        return None if found is None else found[1]

    def effect(self, state: CheckpointState) -> tuple[tuple[str, int], ...]:
        return self._effects[state.step]

    def begin(self, version: PolicyVersion) -> None:
        """Start a session from the newest checkpoint, whose weights now have number ``version``."""
        state = self.newest()
        self.step = state.step if state else 0
        self.lease.epoch += 1
        self._thread, self._has_copy = HeldCommit(), False  # a killed session leaves neither
        connections = Connections(RUN, None, self.objects)  # type: ignore[arg-type]
        pointer: Any = SimpleNamespace(move=lambda _: None)
        self._record_writer = self._type(connections, pointer, epoch=self.lease.epoch, resumed=state)
        if state is not None:
            self._record_writer.mark_committed(state, b"")
        self._record_writer.set_weights(self._digest)
        self._record_writer.add_session(
            holder="machine", at=0.0, step=self.step, version=version,
            parent=state.version if state else None, config=b"{}",
        )  # fmt: skip

    def train(
        self, batch: Sequence[ReadyGroup], version: PolicyVersion, made: PolicyVersion, uses: Mapping[str, int]
    ) -> None:
        assert self._record_writer is not None
        self.step += 1
        ids = [group.group_id for group in batch]
        self._effects[self.step] = (*self._effects[self.step - 1], *((group_id, version) for group_id in ids))
        self._record_writer.add_step(self.step, version, made, batch, {}, uses)
        self._record_writer.set_weights(self._digest)

    def commit(self, issuer: Issuer, version: PolicyVersion, acks: DelayedAcks) -> None:
        """Begin to commit everything; nothing else may be under way."""
        assert self._record_writer is not None
        committer(
            self.folder, keep=1, issuer=issuer, collector=acks, lease=self.lease, record_writer=self._record_writer,
            learner=SimpleNamespace(capture=self._copy), writer=SimpleNamespace(write=self._write), thread=self._thread,
        ).commit(step=self.step, version=version, weights_dtype="float32")  # fmt: skip

    def finish(self) -> LineageChapter | None:
        assert self._record_writer is not None
        before = self._record_writer.committed
        self._thread.wait()
        state = self._record_writer.committed
        if state is None or state is before:
            return None
        return decode(self.objects.stored[state.record.key], LineageChapter)

    def _copy(self) -> None:
        assert not self._has_copy, "a second copy of the state before the first is written"
        self._has_copy = True

    def _write(self, _: Path) -> None:
        assert self._has_copy, "a checkpoint without a copy of the state"
        self._has_copy = False

    def _digest(self) -> str:
        return hashlib.sha256(repr(self._effects[self.step]).encode()).hexdigest()
