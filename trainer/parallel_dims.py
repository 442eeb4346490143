"""How the ranks share the work of a run: who computes which rows, who sums, who publishes, who writes files.

Today there is one dimension, data parallel: every rank computes its own rows with a whole model. Learner and
publishing ask here and never compare rank numbers themselves, so another layout changes this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Share:
    """One of ``count`` shares of some work; the default is all of it."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """The part of this rank in the work of all."""

    ranks: Ranks

    @property
    def rows(self) -> Share:
        """The share of a step's rows that this rank computes; DeepSpeed averages gradients over all shares."""
        return Share(self.ranks.rank, self.ranks.num_ranks)

    @property
    def buckets(self) -> Share:
        """The share of a model's weight buckets that this rank copies, compares and stores."""
        return Share(self.ranks.rank, self.ranks.num_ranks)

    @property
    def writes_files(self) -> bool:
        """True on the one rank that writes whole models to disk, and adapters to the object store."""
        return self.ranks.is_leader

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum over all shares of the rows; collective."""
        return self.ranks.sum(values)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of all shares of the rows on rank 0, in their order; nothing on the others; collective."""
        return self.ranks.gather(data)

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over all shares of the rows; collective."""
        return self.ranks.maximum(values)
