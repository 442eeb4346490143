"""A checkpoint is written while training goes on: what is waited for, what an error does, what is held in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.servers import wait_for
from tests.trainer.recovery.machine_commit import CHECKPOINTS, RUN, Objects, committer

from penstock.protocol.errors import BlobStoreUnreachable, PenstockError
from penstock.protocol.record.checkpoint_state import committed
from penstock.protocol.record.lineage import AccountState
from penstock.protocol.versions import VersionTree
from penstock.trainer.commit import CommitThread
from penstock.trainer.connections import Connections
from penstock.trainer.errors import CheckpointError, LeaseLost
from penstock.trainer.groups.group_totals import Entries
from penstock.trainer.groups.issue import IssuerState
from penstock.trainer.learner.shard_files import CapturedState, CaptureSlot, CheckpointWriter
from penstock.trainer.recovery.run_record_writer import RunRecordWriter


def nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class HeldState:
    """Replaces a copy of the state: its writing waits for the test."""

    gate: threading.Event
    error: OSError | None

    def write(self, folder: Path) -> None:
        assert self.gate.wait(60.0)
        if self.error is not None:
            raise self.error
        (folder / "weights.bin").write_bytes(b"weights")


@dataclass
class Trainer:
    """The commit of a trainer of one rank, with everything but the checkpoint's own parts replaced."""

    folder: Path
    gate: threading.Event = field(default_factory=threading.Event)  # until it is set, no copy is written
    write_error: OSError | None = None
    store: Callable[[Path], None] = nothing  # of the copy in the object store
    confirm: Callable[[], None] = nothing
    moved: list[bytes] = field(default_factory=list)  # values of the key in NATS
    acknowledged: list[str] = field(default_factory=list)
    committed_s: list[float] = field(default_factory=list)
    num_copies: int = 0

    def __post_init__(self) -> None:
        connections = Connections(RUN, None, Objects())  # type: ignore[arg-type]
        pointer: Any = SimpleNamespace(move=self.moved.append)
        self.record = RunRecordWriter(connections, pointer, epoch=1, resumed=None)
        self.record.set_weights(lambda: "0" * 64)
        self.record.add_session(holder="t", at=0.0, step=0, version=0, parent=None, config=b"{}")
        slot = CaptureSlot()
        self.held: list[str] = []  # messages that a checkpoint taken now covers
        self.letters = 0

        def capture() -> None:
            self.num_copies += 1
            slot.put(HeldState(self.gate, self.write_error))  # type: ignore[arg-type]

        stored = SimpleNamespace(
            store=lambda folder: self.store(folder),  # noqa: PLW0108  a test replaces it
            mark_named=nothing,
            remove_local=nothing,
            prune=nothing,
        )
        self.committer = committer(
            self.folder, keep=2, record_writer=self.record, writer=CheckpointWriter(slot, None), stored=stored,
            learner=SimpleNamespace(capture=capture), issuer=SimpleNamespace(take_state=self._issued),
            collector=SimpleNamespace(
                versions=VersionTree(), settled=lambda: list(self.held), acknowledge=self.acknowledged.extend
            ),
            lease=SimpleNamespace(epoch=1, confirm=lambda: self.confirm()),  # noqa: PLW0108  likewise
            on_committed=self.committed_s.append, thread=CommitThread(deadline_s=30.0),
        )  # fmt: skip

    def checkpoint(self, step: int, *covers: str) -> None:
        """Begin a checkpoint of the state after ``step``, which covers these messages."""
        self.held = list(covers)
        self.letters += 1  # the state is another one
        digest = f"{step:064d}"
        self.record.set_weights(lambda: digest)
        self.committer.commit(step=step, version=step, weights_dtype="float32")  # type: ignore[arg-type]

    def newest_step(self) -> int | None:
        found = committed(self.folder / CHECKPOINTS)
        return found[-1][1].step if found else None

    def _issued(self) -> IssuerState:
        return IssuerState({}, (), {}, (), self.letters, Entries({}, (), (), (), (), AccountState()))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    """A trainer whose thread has ended after the test."""
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.gate.set()
    trainer.committer.thread.close()
    assert not trainer.committer.thread.is_busy


def test_training_goes_on_and_the_next_checkpoint_waits(trainer: Trainer) -> None:
    """Nothing is named or acknowledged before the commit; the second copy is made after the first one is written."""
    thread = trainer.committer.thread
    trainer.checkpoint(1, "a")
    assert thread.is_busy
    assert (trainer.moved, trainer.acknowledged, trainer.newest_step()) == ([], [], None)
    second = threading.Thread(target=trainer.checkpoint, args=(2, "b"))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the second checkpoint did not wait for the first"
    assert trainer.num_copies == 1
    trainer.gate.set()
    second.join(30.0)
    thread.wait()
    assert (len(trainer.moved), trainer.acknowledged, trainer.newest_step()) == (2, ["a", "b"], 2)
    assert len(trainer.committed_s) == 2


def test_a_state_on_the_same_weights_copies_none(trainer: Trainer) -> None:
    """A checkpoint after the same step replaces ``state.json`` alone, however often: no copy is left over."""
    trainer.gate.set()
    for message in "abc":
        trainer.checkpoint(1, message)
    trainer.checkpoint(2)
    trainer.committer.thread.wait()
    assert trainer.acknowledged == ["a", "b", "c"]
    assert (trainer.num_copies, trainer.newest_step()) == (2, 2)


def full_disk(trainer: Trainer) -> None:
    trainer.write_error = OSError(28, "No space left on device")


def refused_store(trainer: Trainer) -> None:
    def refuse(_: Path) -> None:
        raise BlobStoreUnreachable("the object store does not answer")

    trainer.store = refuse


def lost_lease(trainer: Trainer) -> None:
    def refuse() -> None:
        raise LeaseLost("another trainer holds the run")

    trainer.confirm = refuse


@pytest.mark.parametrize(
    ("fails", "error", "words", "step"),
    [
        (full_disk, CheckpointError, r"step00000002 could not be written .*No space left.*start the trainer again", 1),
        (refused_store, BlobStoreUnreachable, "does not answer", 2),
        (lost_lease, LeaseLost, "another trainer holds the run", 1),
    ],
)
def test_an_error_of_the_thread_is_raised_with_its_cause_and_nothing_is_acknowledged(
    trainer: Trainer, fails: Callable[[Trainer], None], error: type[PenstockError], words: str, step: int
) -> None:
    """A full disk, a store that refuses, a lease lost: NATS names the checkpoint before, on every later look."""
    trainer.gate.set()
    trainer.checkpoint(1, "a")
    trainer.committer.thread.wait()
    trainer.gate.clear()
    fails(trainer)
    trainer.checkpoint(2, "b")
    trainer.committer.thread.check()  # the thread has not got there
    trainer.gate.set()
    wait_for(lambda: not trainer.committer.thread.is_busy, "the thread's end")
    for look in (trainer.committer.thread.check, trainer.committer.thread.wait, lambda: trainer.checkpoint(3, "c")):
        with pytest.raises(error, match=words):
            look()
    assert (len(trainer.moved), trainer.acknowledged) == (1, ["a"])
    assert trainer.newest_step() == step


def test_a_commit_without_an_end_is_an_error() -> None:
    gate, thread = threading.Event(), CommitThread(deadline_s=0.05)
    thread.start(lambda: bool(gate.wait(60.0)), step=7)  # type: ignore[arg-type,return-value]
    with pytest.raises(CheckpointError, match="the checkpoint after step 7 is not committed after 0 s"):
        thread.wait()
    gate.set()
    thread.close()


def test_a_rank_holds_one_copy() -> None:
    """A second one before the first is written is refused: the memory plan knows one."""
    slot = CaptureSlot()
    slot.put(CapturedState([]))
    with pytest.raises(CheckpointError, match="a copy of the state was never written"):
        slot.put(CapturedState([]))


def test_every_rank_that_cannot_write_is_named(tmp_path: Path) -> None:
    """Rank 0 wrote its own part: an error all the same, with each rank's reason."""
    slot = CaptureSlot()
    slot.put(CapturedState([]))
    answers = [b"=null", b"!OSError: full", b"!KeyError: 'w'"]
    channel = SimpleNamespace(ask=lambda _, own: (own(), answers))
    ranks: Any = SimpleNamespace(num_ranks=3, is_leader=True, channel=lambda: channel)
    with pytest.raises(OSError, match="rank 2: OSError: full; rank 3: KeyError: 'w'"):
        CheckpointWriter(slot, ranks).write(tmp_path)
