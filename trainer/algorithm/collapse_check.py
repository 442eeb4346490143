"""Stop a run whose policy has lost its randomness, before more steps are made of samples that are all alike."""

from __future__ import annotations

import structlog

from penstock.trainer.errors import PolicyCollapsed

collapse_log = structlog.get_logger("trainer.collapse")

PATIENCE = 3  # consecutive steps: one batch may be of easy prompts


class CollapseCheck:
    """Watches the entropy of the sampled tokens in one session."""

    def __init__(self, limit: float | None) -> None:
        """Stop when the entropy is below ``limit`` nats per token in `PATIENCE` steps in a row; None: never."""
        self._limit = limit
        self._num_below = 0

    def check(self, entropy: float, step: int) -> None:
        """Count one step; raises PolicyCollapsed."""
        if self._limit is None or entropy >= self._limit:
            self._num_below = 0
            return
        self._num_below += 1
        collapse_log.warning("entropy below trainer.min_entropy", step=step, entropy=entropy, limit=self._limit)
        if self._num_below >= PATIENCE:
            raise PolicyCollapsed(
                f"step {step}: the entropy of the sampled tokens is {entropy:.3g} nats per token, below trainer.min_entropy = "
                f"{self._limit:g} in {PATIENCE} steps in a row: the completions of a prompt are nearly all the same, and nothing "
                "new is tried. Lower trainer.lr, set algorithm.entropy_coefficient, keep rollout.temperature at 1, or lower "
                "trainer.min_entropy if the reward is as high as you want"
            )
