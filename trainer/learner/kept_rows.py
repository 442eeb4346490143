"""The log-probabilities of some rows of a step, taken from the loss as it reads them, to be brought together on rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from penstock.protocol.packs.step_logprobs import CLIPPED, DUAL_CLIPPED, REJECTED
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.objective import TokenOutcomes
from penstock.trainer.parallel_dims import ParallelDims


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Rows of a plan, in any order, and the values of their sampled tokens one row after another."""

    rows: npt.NDArray[np.int64]  # [R] numbers in the plan
    counts: npt.NDArray[np.int64]  # [R] sampled tokens of each
    logprobs: npt.NDArray[np.float32]  # [N]
    outcomes: npt.NDArray[np.uint8]  # [N] as in `StepLogprobs`

    def to_bytes(self) -> bytes:
        """Return the rows as MessagePack."""
        arrays = self.rows, self.counts, self.logprobs, self.outcomes
        packed = msgpack.packb([array.tobytes() for array in arrays])
        assert packed is not None
        return packed

    @classmethod
    def from_bytes(cls, packed: bytes) -> KeptRows:
        """Rebuild what `to_bytes` returned."""
        rows, counts, logprobs, outcomes = msgpack.unpackb(packed)
        return cls(
            np.frombuffer(rows, np.int64),
            np.frombuffer(counts, np.int64),
            np.frombuffer(logprobs, np.float32),
            np.frombuffer(outcomes, np.uint8),
        )

    @classmethod
    def joined(cls, parts: Sequence[KeptRows]) -> KeptRows:
        """Return the rows of several ranks or micro-batches together."""
        return cls(
            _joined([part.rows for part in parts], np.int64),
            _joined([part.counts for part in parts], np.int64),
            _joined([part.logprobs for part in parts], np.float32),
            _joined([part.outcomes for part in parts], np.uint8),
        )


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


class RowRecorder:
    """Takes the rows below ``num_rows`` of one rank's micro-batches; an `Observer` of a policy."""

    def __init__(self, micro_batches: Sequence[Sequence[int]], num_rows: int) -> None:
        """``micro_batches`` are the plan's row numbers of this rank, in the order in which the policy takes them."""
        self._micro_batches = iter(micro_batches)
        self._num_rows = num_rows
        self._parts: list[KeptRows] = []

    def __call__(self, tokens: TokenOutcomes | None, batch: MicroBatch) -> None:
        """Take the rows of the next micro-batch of the plan; one without outcomes, as of pairs, is none of it."""
        if tokens is None:
            return
        rows = np.array(next(self._micro_batches), np.int64)
        if not (wanted := rows < self._num_rows).any():
            return
        counts = torch.bincount(batch.sequence, minlength=len(rows)).numpy()
        outcomes = tokens.clipped.byte() * CLIPPED + tokens.dual_clipped.byte() * DUAL_CLIPPED
        outcomes = outcomes + (~tokens.kept).byte() * REJECTED
        logprobs, outcomes = tokens.logprobs.float().cpu().numpy(), outcomes.cpu().numpy()
        if not wanted.all():
            of_tokens = np.repeat(wanted, counts)
            rows, counts, logprobs, outcomes = rows[wanted], counts[wanted], logprobs[of_tokens], outcomes[of_tokens]
        self._parts.append(KeptRows(rows, counts, logprobs, outcomes))

    def gather(self, dims: ParallelDims) -> KeptRows:
        """Return the rows of all ranks on rank 0, none on the others; collective."""
        parts = dims.gather(KeptRows.joined(self._parts).to_bytes())
        return KeptRows.joined([KeptRows.from_bytes(part) for part in parts])
