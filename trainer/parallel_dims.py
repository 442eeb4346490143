"""How the ranks share the work of a run: who computes which rows and tokens, who sums, who publishes, who writes files.

Ranks that compute the same rows (`trainer/parallel_layout.py`) have the same losses and figures, which count once in every sum.
Learner and publishing ask here and never compare rank numbers themselves, so another layout changes this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.trainer.parallel_layout import ParallelLayout
from penstock.trainer.ranks import Ranks, RankSubgroup


@dataclass(frozen=True, slots=True)
class Share:
    """One of ``count`` shares of some work; the default is all of it."""

    index: int = 0
    count: int = 1


class ParallelDims:
    """The part of this rank in the work of all."""

    def __init__(self, ranks: Ranks, layout: ParallelLayout | None = None) -> None:
        """Divide the ranks; without a layout every rank computes rows of its own. The same call on every rank."""
        self.ranks = ranks
        self.layout = layout or ParallelLayout()
        sequence, tensor = self.layout.sequence_parallel, self.layout.tensor_parallel
        self.token_group: RankSubgroup | None = ranks.subgroup(sequence, tensor) if sequence > 1 else None
        self.weight_group: RankSubgroup | None = ranks.subgroup(tensor) if tensor > 1 else None

    @property
    def rows(self) -> Share:
        """The share of a step's rows that this rank computes, alone or with others."""
        together = self.layout.ranks_of_rows
        return Share(self.ranks.rank // together, self.ranks.num_ranks // together)

    @property
    def tokens(self) -> Share:
        """The share of a micro-batch's tokens that this rank computes."""
        size = self.layout.sequence_parallel
        return Share(self.ranks.rank // self.layout.tensor_parallel % size, size)

    @property
    def weights(self) -> Share:
        """The share of each divided weight that this rank has."""
        size = self.layout.tensor_parallel
        return Share(self.ranks.rank % size, size)

    @property
    def states(self) -> Share:
        """The share of the optimizer states of its weights that this rank keeps under ZeRO; DeepSpeed averages gradients over them."""
        size = self.layout.tensor_parallel
        return Share(self.ranks.rank // size, self.ranks.num_ranks // size)

    @property
    def files(self) -> Share:
        """The share of a checkpoint's files that this rank writes."""
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
        """Return the element-wise sum over all shares of the rows, each counted once; collective."""
        return self.ranks.sum(values if self._stands_for_rows else [0.0] * len(values))

    def gather(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of all shares of the rows on rank 0, in their order; nothing on the others; collective."""
        return self.ranks.gather(data)[:: self.layout.ranks_of_rows]

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over all shares of the rows; collective."""
        return self.ranks.maximum(values)

    @property
    def _stands_for_rows(self) -> bool:
        """True on the first of the ranks that compute the same rows."""
        return self.ranks.rank % self.layout.ranks_of_rows == 0
