"""The commit of the ring machine: the trainer's own, over a folder in memory and objects in a dictionary.

`commit_everything`, `RunRecordWriter` and `checkpoint` are the real ones. What they ask the rest of a trainer for stands here:
an object store, a key in NATS and a lease that never fail, weights that are a number, and a collector whose
acknowledgements reach the broker later, if at all.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.protocol.facts import BlobRef, decode
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import LineageChapter
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.commit import CHECKPOINTS, commit_everything
from penstock.trainer.connections import Connections
from penstock.trainer.groups.delivery_tracker import DeliveryTracker
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.groups.ledger import Ledger
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.recovery import checkpoint
from penstock.trainer.recovery.run_record_writer import RunRecordWriter

RUN = "machine"


@functools.cache
def shelf() -> Path:
    """Where the folders of all machines lie until the process ends: in memory, where an fsync is free."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="ring-machine-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Objects:
    """An object store."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> BlobRef:
        self.stored[key] = data
        return BlobRef(key=key, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


@dataclass(slots=True)
class Hands:
    """Stands where the collector stands: what is settled, and what the newest checkpoint lets it acknowledge."""

    tracker: DeliveryTracker
    covered: Callable[[], list[int]]
    unheard: list[int] = field(default_factory=list)  # acknowledgements that the broker has not heard of yet

    def settled(self) -> list[int]:
        return self.covered()

    def acknowledge(self, sequences: Sequence[int]) -> None:
        self.unheard = list(sequences)


class Commits:
    """The checkpoints of one run, and the chapters they name; lives come and go."""

    def __init__(self, record_writer: type[RunRecordWriter]) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=shelf()))
        self.objects = Objects()
        self.lease = SimpleNamespace(epoch=0, confirm=lambda: None)
        self._type = record_writer
        self._record_writer: RunRecordWriter | None = None
        self._effects: dict[int, tuple[tuple[str, int], ...]] = {0: ()}  # groups and versions trained, by step
        self.step = 0

    def close(self) -> None:
        """Remove what is on the disk."""
        shutil.rmtree(self.folder)

    def newest(self) -> CheckpointState | None:
        """Read what a next life begins with."""
        found = checkpoint.newest(self.folder / CHECKPOINTS, RUN)
        return None if found is None else found[1]

    def effect(self, state: CheckpointState) -> tuple[tuple[str, int], ...]:
        """Return which groups the weights of a checkpoint were made of."""
        return self._effects[state.step]

    def begin(self, version: PolicyVersion) -> None:
        """Begin a life with the newest checkpoint, whose weights are now called ``version``."""
        state = self.newest()
        self.step = state.step if state else 0
        self.lease.epoch += 1
        connections = Connections(RUN, None, self.objects)  # type: ignore[arg-type]
        pointer: Any = SimpleNamespace(move=lambda _: None)
        self._record_writer = self._type(connections, pointer, epoch=self.lease.epoch, resumed=state)
        if state is not None:
            self._record_writer.point(state, b"")
        self._record_writer.weights(self._digest)
        self._record_writer.life(
            holder="machine", at=0.0, step=self.step, version=version,
            parent=state.version if state else None, config=b"{}",
        )  # fmt: skip

    def train(self, batch: Sequence[ReadyGroup], version: PolicyVersion, made: PolicyVersion, ledger: Ledger) -> None:
        """Enter a step."""
        assert self._record_writer is not None
        self.step += 1
        ids = [group.group_id for group in batch]
        self._effects[self.step] = (*self._effects[self.step - 1], *((group_id, version) for group_id in ids))
        uses = {group_id: ledger.uses(group_id) for group_id in ids}
        self._record_writer.step(self.step, version, made, batch, {}, uses)
        self._record_writer.weights(self._digest)

    def commit(self, issuer: Issuer, ledger: Ledger, version: PolicyVersion, hands: Hands) -> LineageChapter | None:
        """Commit everything; returns the chapter that it wrote, if it wrote one."""
        assert self._record_writer is not None
        before = self._record_writer.committed
        training: Any = SimpleNamespace(
            settings=SimpleNamespace(
                publishes_adapters=False,
                run=SimpleNamespace(id=RUN, folder=self.folder), trainer=SimpleNamespace(keep_checkpoints=1)
            ),
            rank_group=SimpleNamespace(save=lambda _: None),
            planner=SimpleNamespace(document=dict),
            recorder=SimpleNamespace(num_bytes=0),
            issuer=issuer, collector=hands, evaluator=None, ledger=ledger, lease=self.lease, version=version,
            record_writer=self._record_writer, num_steps_done=self.step, published_dtype="float32",
        )  # fmt: skip
        commit_everything(training)
        state = self._record_writer.committed
        if state is None or state is before:
            return None
        return decode(self.objects.stored[state.record.key], LineageChapter)

    def _digest(self) -> str:
        return hashlib.sha256(repr(self._effects[self.step]).encode()).hexdigest()
