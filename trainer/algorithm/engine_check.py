"""Do trainer and engine mean the same by a version? Stops a run in which they do not; pure but for its memory.

Tokens that the version in training sampled are scored twice by the same weights: by the engine when it sampled them,
by the trainer just before its update. What remains between the two is kernels and precision (float32 on both sides:
below 1e-5 nats; bfloat16: about 0.02), or a mistake that ruins a run without any error: another temperature, another
tokenizer, other weights under the same number. The first look decides alone, before an update is published; later
ones only together with those before and after them.
"""

from __future__ import annotations

import math

import structlog

from penstock.trainer.algorithm.mismatch import Mismatch
from penstock.trainer.errors import EngineMismatch

log = structlog.get_logger("trainer.engine")

MIN_TOKENS = 32  # fewer say nothing about a mean
_SILENCE = 50  # steps without a look, after which a warning says that nobody checks


class EngineCheck:
    """One life's comparison of trainer and engine, step by step."""

    def __init__(self, *, limit: float | None, patience: int) -> None:
        """``limit`` nats of mean difference (None: only watch) in ``patience`` looks one after the other."""
        self._limit = limit
        self._patience = patience
        self._num_looks = 0
        self._num_beyond = 0
        self.steps_since = 0  # steps without enough tokens to look at

    def look(self, found: Mismatch | None, version: int) -> None:
        """Take note of one step; raises EngineMismatch when the two have parted."""
        if found is None or found.num_tokens < MIN_TOKENS:
            self.steps_since += 1
            if self.steps_since == _SILENCE:
                log.warning("trainer and engine were not compared: every token was older", steps=_SILENCE)
            return
        self.steps_since = 0
        is_first = self._num_looks == 0
        self._num_looks += 1
        if is_first:
            log.info("engine compared", policy_version=version, mean_abs=found.mean_abs, max_abs=found.max_abs)
        if self._limit is None or found.mean_abs <= self._limit:  # a NaN is beyond every limit
            self._num_beyond = 0
            return
        self._num_beyond += 1
        log.warning("engine and trainer differ", policy_version=version, mean_abs=found.mean_abs, limit=self._limit)
        if is_first or self._num_beyond >= self._patience:
            raise EngineMismatch(self._explain(found, version))

    def _explain(self, found: Mismatch, version: int) -> str:
        times = "at the first look" if self._num_looks == 1 else f"in {self._num_beyond} looks one after the other"
        largest = f"{found.max_abs:.3g}" if math.isfinite(found.max_abs) else "not finite"
        return (
            f"engine and trainer give the same {found.num_tokens} tokens of version {version} log-probabilities that "
            f"differ by {found.mean_abs:.3g} nats on average (largest {largest}, KL {found.kl_k3:.3g}), more than "
            f"trainer.max_mismatch = {self._limit:g} {times}; training on them would go wrong in silence. Look at: "
            "the engine's temperature handling (SGLANG_RETURN_ORIGINAL_LOGPROB must be unset), its dtype, quantisation "
            "and attention backend against model.dtype, rope scaling and tokenizer of model.path, in-place weight "
            "updates, routing of a mixture of experts. A difference that you accept: raise trainer.max_mismatch"
        )
