"""What a teacher says about the tokens that a policy sampled: their log-probabilities, and those of its own likeliest tokens.

A teacher is any model of the same vocabulary that is not trained. A rollout worker asks it for every group whose task wants it
(`Task.teacher_top_k`), and the pack stores the answer, so that a replay trains on the very same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.protocol.errors import PackError
from penstock.protocol.facts import MAX_TEACHER_TOP_K

_SLACK = 1e-3  # rounding may put a log-probability of 0 a little above it
_MASS_SLACK = 1e-2  # and the sum of many probabilities above 1


@dataclass(frozen=True, slots=True, eq=False)
class TeacherRow:
    """The log-probabilities for the sampled tokens of one trajectory, N of them, in their order; at temperature 1."""

    logprobs: npt.NDArray[np.float32]  # [N] of the sampled tokens
    top_ids: npt.NDArray[np.int32]  # [N, k] the teacher's likeliest tokens in their place
    top_logprobs: npt.NDArray[np.float32]  # [N, k]


@dataclass(frozen=True, slots=True, eq=False)
class TeacherScores:
    """What one teacher says about a group; checked on construction (PackError)."""

    model: str  # which model of which version, as its server names them
    top_k: int
    rows: tuple[TeacherRow, ...]  # of each trajectory, in order; a baseline, which is not trained on, has no token

    def __post_init__(self) -> None:
        if not self.model or len(self.model) > 500:
            raise PackError(f"a teacher named {self.model[:100]!r}, expected 1 to 500 characters")
        if not 0 <= self.top_k <= MAX_TEACHER_TOP_K:
            raise PackError(f"a teacher's {self.top_k} likeliest tokens, expected 0 to {MAX_TEACHER_TOP_K}")
        for row in self.rows:
            shape = (len(row.logprobs), self.top_k)
            if row.top_ids.shape != shape or row.top_logprobs.shape != shape:
                raise PackError(
                    f"a teacher's likeliest tokens are {row.top_ids.shape} and {row.top_logprobs.shape}, expected {shape}"
                )

    def check(self, num_sampled: Sequence[int], vocab_size: int | None) -> None:
        """Raise PackError unless every row is about ``num_sampled`` tokens, and every number can be a model's."""
        counts = [len(row.logprobs) for row in self.rows]
        if counts != list(num_sampled):
            raise PackError(f"a teacher's log-probabilities of {counts[:8]} tokens, expected {list(num_sampled)[:8]}")
        logprobs = np.concatenate(
            [values.reshape(-1) for row in self.rows for values in (row.logprobs, row.top_logprobs)]
        )
        if len(logprobs) and not (np.isfinite(logprobs).all() and float(logprobs.max()) <= _SLACK):
            raise PackError("a teacher's log-probability is not finite, or above 0")
        for row in self.rows if self.top_k else ():
            if not len(row.logprobs):
                continue
            lowest, highest = int(row.top_ids.min()), int(row.top_ids.max())
            if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
                raise PackError(
                    f"a teacher's token id {lowest if lowest < 0 else highest} is not one of a vocabulary of {vocab_size}"
                )
            ordered = np.sort(row.top_ids, axis=1)
            if self.top_k > 1 and bool((ordered[:, 1:] == ordered[:, :-1]).any()):
                raise PackError("a teacher names the same token twice among its likeliest ones")
            mass = float(np.exp(row.top_logprobs.astype(np.float64)).sum(axis=1).max())
            if mass > 1.0 + _MASS_SLACK:
                raise PackError(f"a teacher's likeliest tokens have a probability of {mass:.4f} together")
