"""The door to torch.distributed for what our own ranks tell each other: orders, sums, barriers.

Rank 0 decides, the others follow: an order is MessagePack bytes (nothing is unpickled), broadcast
over gloo also where the gradients travel over NCCL. DeepSpeed's own communication is DeepSpeed's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgpack
import torch
import torch.distributed as dist

_DEADLINE = timedelta(days=1)  # followers wait while rank 0 collects; rank 0 has the deadlines that speak


class Ranks:
    """The processes that train together; one process is a world of its own."""

    def __init__(self) -> None:
        """Join the world that torchrun describes in the environment, or be alone."""
        self.rank = int(os.environ.get("RANK", "0"))
        self.num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if self.num_ranks > 1:
            dist.init_process_group(backend, timeout=_DEADLINE)
        else:  # no launcher, no port: DeepSpeed wants these to be set, and a store in this process serves
            os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    @property
    def is_leader(self) -> bool:
        """Whether this process decides."""
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

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up vectors of figures over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Take the element-wise maximum over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.num_ranks > 1:
            dist.all_reduce(torch.zeros(1))

    def leave(self, exit_code: int) -> None:
        """End the process group.

        With several ranks the interpreter's own teardown crashed in one of five runs with ZeRO-3
        (rank 1 aborted after correct training), so the process ends here, after a barrier and with
        everything flushed; alone it returns.
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
