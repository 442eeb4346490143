"""Stop a run whose engine computes other log-probabilities than the trainer, or whose policy has collapsed."""

from __future__ import annotations

import math

import structlog

from penstock.protocol.hardware_errors import fault_of
from penstock.trainer.algorithm.mismatch import Mismatch
from penstock.trainer.errors import EngineMismatch, HardwareFailed, PolicyCollapsed

log = structlog.get_logger("trainer.engine")


MIN_TOKENS = 32  # too few tokens give no reliable mean
_WARN_AFTER = 50  # steps without a comparison
collapse_log = structlog.get_logger("trainer.collapse")
STEPS_BEFORE_STOP = 3  # consecutive steps: one batch may be of easy prompts


class EngineCheck:
    def __init__(self, *, limit: float | None, max_violations: int) -> None:
        """Stop at a mean difference above ``limit`` nats (None: never) in ``max_violations`` comparisons in a row."""
        self._limit, self._max_violations = limit, max_violations
        self._num_comparisons = 0
        self._num_violations = 0
        self.steps_since = 0  # steps without enough tokens to compare

    def check(self, mismatch: Mismatch | None, version: int) -> None:
        if mismatch is None or mismatch.num_tokens < MIN_TOKENS:
            self.steps_since += 1
            if self.steps_since == _WARN_AFTER:
                log.warning(
                    "trainer and engine not compared: every token was sampled by an older version", steps=_WARN_AFTER
                )
            return
        self.steps_since = 0
        is_first = self._num_comparisons == 0
        self._num_comparisons += 1
        if is_first:
            log.info("engine compared", policy_version=version, mean_abs=mismatch.mean_abs, max_abs=mismatch.max_abs)
        if self._limit is None or mismatch.mean_abs <= self._limit:  # a NaN is above every limit
            self._num_violations = 0
            return
        self._num_violations += 1
        log.warning("engine and trainer differ", policy_version=version, mean_abs=mismatch.mean_abs, limit=self._limit)
        if is_first or self._num_violations >= self._max_violations:
            times = (
                "at the first comparison"
                if self._num_comparisons == 1
                else f"in {self._num_violations} comparisons in a row"
            )
            largest = f"{mismatch.max_abs:.3g}" if math.isfinite(mismatch.max_abs) else "not finite"
            raise EngineMismatch(
                f"engine and trainer give the same {mismatch.num_tokens} tokens of version {version} log-probabilities that "
                f"differ by {mismatch.mean_abs:.3g} nats on average (largest {largest}, KL {mismatch.kl_k3:.3g}), more than "
                f"trainer.max_mismatch = {self._limit:g} {times}; training on them would fail without an error. Check "
                "the engine's temperature handling (SGLANG_RETURN_ORIGINAL_LOGPROB must be unset), its dtype, quantisation "
                "and attention backend against model.dtype, rope scaling and tokenizer of model.path, in-place weight "
                "updates, routing of a mixture of experts. If you accept the difference, raise trainer.max_mismatch"
            )


class CollapseCheck:
    def __init__(self, limit: float | None) -> None:
        """Stop when the entropy is below ``limit`` nats per token in `STEPS_BEFORE_STOP` steps in a row; None: never."""
        self._limit = limit
        self._num_below = 0

    def check(self, entropy: float, step: int) -> None:
        if self._limit is None or entropy >= self._limit:
            self._num_below = 0
            return
        self._num_below += 1
        collapse_log.warning("entropy below trainer.min_entropy", step=step, entropy=entropy, limit=self._limit)
        if self._num_below >= STEPS_BEFORE_STOP:
            raise PolicyCollapsed(
                f"step {step}: the entropy of the sampled tokens is {entropy:.3g} nats per token, below trainer.min_entropy = "
                f"{self._limit:g} in {STEPS_BEFORE_STOP} steps in a row: the completions of a prompt are nearly all the same, and nothing "
                "new is tried. Lower trainer.lr, set algorithm.entropy_coefficient, keep rollout.temperature at 1, or lower "
                "trainer.min_entropy if the reward is as high as you want"
            )


def hardware_failed(err: Exception, num_ranks: int) -> HardwareFailed:
    """Return what failed in a step of rank 0; raises ``err`` again if it is an internal error."""
    if (fault := fault_of(err, rank=0 if num_ranks > 1 else None)) is None:
        raise err
    structlog.get_logger("trainer.training").error("the step failed", exc_info=err)
    return HardwareFailed(fault.text())
