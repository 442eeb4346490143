"""The adapter to torch.distributed for the trainer's messages between ranks: orders, sums, barriers.

Rank 0 sends orders and the others follow. An order is MessagePack bytes (nothing is unpickled), broadcast over gloo even
if gradients use NCCL. DeepSpeed's communication is separate.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import msgpack
import torch
import torch.distributed as dist

from penstock.trainer.errors import RankUnresponsive

T = TypeVar("T")

_ANSWER_DEADLINE_S = 1800.0  # of one rank to one question; a rank that exited is detected at once
_DEADLINE = timedelta(days=1)  # followers wait while rank 0 collects; rank 0 has the deadlines with error messages
_SEE_LOGS = "see its log, then start the trainer again"


class Ranks:
    """The processes that train together; a single process is a world of size 1."""

    def __init__(self) -> None:
        """Join the world that torchrun describes in the environment; without torchrun, a world of size 1."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))  # of those on this host
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if self.num_ranks > 1:
            dist.init_process_group(backend, timeout=_DEADLINE)
        else:  # DeepSpeed requires these variables; a store in this process needs no launcher and no port
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def broadcast(self, order: Any) -> Any:
        """Return rank 0's ``order`` (MessagePack types only) on every rank; followers pass None."""
        if self.num_ranks == 1:
            return order
        data = msgpack.packb(order, use_bin_type=True) if self.is_leader else b""
        assert data is not None
        size = torch.tensor([len(data)], dtype=torch.int64)
        dist.broadcast(size, src=0)
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if not self.is_leader:
            buffer = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(buffer, src=0)
        return order if self.is_leader else msgpack.unpackb(buffer.numpy().tobytes(), raw=False)

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data`` on rank 0, in the order of ranks; nothing on the others."""
        if self.num_ranks == 1:
            return [data]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64))
        longest = max(int(size) for size in sizes)
        mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0") or b"\0"), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(self.num_ranks)] if self.is_leader else None
        dist.gather(mine, gathered, dst=0)
        return [t[: int(size)].numpy().tobytes() for t, size in zip(gathered or [], sizes, strict=False)]

    def subgroup(self, size: int, stride: int = 1, *, deadline: timedelta = _DEADLINE) -> RankSubgroup:
        """Return the group of ``size`` ranks, each ``stride`` after the one before, that this one is in; called on all ranks, in the same order.

        ``deadline`` is that of one collective.
        """
        rank_group = None
        for block in range(0, self.num_ranks, size * stride):
            for first in range(block, block + stride):
                members = list(range(first, first + size * stride, stride))
                group = dist.new_group(members, timeout=deadline)
                if self.rank in members:
                    rank_group = RankSubgroup(group, members.index(self.rank), size)
        assert rank_group is not None
        return rank_group

    def channel(self) -> RankChannel:
        """Open a channel of questions and answers for threads; called on all ranks, in the same order."""
        return RankChannel(self.rank, self.num_ranks)

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def maximum(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        if self.num_ranks > 1:
            dist.all_reduce(torch.zeros(1))

    def leave(self, exit_code: int) -> None:
        """Close the process group, and exit the process unless it is the only rank.

        With several ranks the interpreter's teardown crashed in one of five runs with ZeRO-3 (rank 1 aborted after
        correct training), so the process exits here, after a barrier and with everything flushed.
        """
        if self.num_ranks == 1:
            dist.destroy_process_group()
            return
        if exit_code == 0:
            self.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.num_ranks == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=operation)
        return tensor.tolist()


class RankSubgroup:
    def __init__(self, group: Any, index: int, size: int) -> None:
        self._group = group
        self.index = index  # of this rank
        self.size = size

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        """Send ``parts[n]`` to rank n of the group, and return what each sent to this one, [size, …] as ``parts``."""
        sent = parts.contiguous()
        # `empty_like` could keep other strides.
        received = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
        dist.all_to_all_single(received, sent, group=self._group)
        return received

    def exchange_bytes(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send ``parts[n]``, none empty, to rank n of the group, and return what each sent to this one."""
        own_sizes = [len(part) for part in parts]
        sizes = self.exchange(torch.tensor(own_sizes)).tolist()
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, sizes, own_sizes, group=self._group)
        return [part.numpy().tobytes() for part in received.split(sizes)]

    def gather(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the ``values`` of all ranks, of one shape, next to each other in dimension ``dim``."""
        sent = values.contiguous()
        parts = [torch.empty(sent.shape, dtype=sent.dtype, device=sent.device) for _ in range(self.size)]
        dist.all_gather(parts, sent, group=self._group)
        return torch.cat(parts, dim=dim)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up contiguous ``values`` over the group, in place, and return them."""
        dist.all_reduce(values, group=self._group)
        return values


class RankChannel:
    """Questions from rank 0 to the other ranks and their answers, over a separate process group.

    Bytes only, point to point, so that a rank that exits or does not answer is identified. One question at a time.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._group: Any = dist.new_group(backend="gloo", timeout=_DEADLINE) if num_ranks > 1 else None
        self._lock = threading.Lock()
        self._broken: RankUnresponsive | None = None  # after it, a late answer would be read for a later question

    def ask(
        self, question: bytes, local_call: Callable[[], T], *, deadline_s: float = _ANSWER_DEADLINE_S
    ) -> tuple[T, list[bytes]]:
        """Send a question, call ``local_call``, and return its result with the others' answers (rank 0).

        All answers are awaited, even if ``local_call`` raises. Raises RankUnresponsive for a rank that exited, or has not
        answered for ``deadline_s``.
        """
        others = range(1, self._num_ranks)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            try:
                for rank in others:
                    self._send(question, rank, timedelta(seconds=deadline_s))
                try:
                    mine = local_call()
                finally:
                    answers = [self._receive(rank, timedelta(seconds=deadline_s)) for rank in others]
            except RankUnresponsive as err:
                self._broken = err
                raise
        return mine, answers

    def listen(self, answer: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(RankUnresponsive):
            while True:
                self.answer_one(answer)

    def answer_one(self, answer: Callable[[bytes], bytes], *, deadline_s: float | None = None) -> bytes:
        """Answer rank 0's next question, and return it; raises RankUnresponsive after ``deadline_s``."""
        question = self._receive(0, _DEADLINE if deadline_s is None else timedelta(seconds=deadline_s))
        self._send(answer(question), 0, _DEADLINE if deadline_s is None else timedelta(seconds=deadline_s))
        return question

    def _send(self, data: bytes, rank: int, deadline: timedelta) -> None:
        tensors = [torch.tensor([len(data)], dtype=torch.int64)]
        if data:  # an empty tensor is not sent
            tensors.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        for tensor in tensors:  # gloo sends when the other process says that it is ready
            self._wait(dist.isend, tensor, rank, deadline)

    def _receive(self, rank: int, deadline: timedelta) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        self._wait(dist.irecv, size, rank, deadline)
        data = torch.empty(int(size), dtype=torch.uint8)
        if len(data):
            self._wait(dist.irecv, data, rank, deadline)
        return data.numpy().tobytes()

    def _wait(self, transfer: Callable[..., Any], tensor: torch.Tensor, rank: int, deadline: timedelta) -> None:
        try:
            work = transfer(tensor, rank, group=self._group)
            assert work is not None
            work.wait(deadline)
        except RuntimeError as err:
            raise RankUnresponsive(
                f"rank {rank} of {self._num_ranks} has exited, or did not answer for {deadline.total_seconds():.0f} s "
                f"({err}); {_SEE_LOGS}"
            ) from None
