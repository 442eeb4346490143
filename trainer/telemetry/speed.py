"""How fast a step computed: tokens and operations per second, and the share of the devices' peak; pure."""

from __future__ import annotations

from typing import Any

from penstock.trainer.learner.health.flops import Work


def speed_fields(work: Work, *, num_tokens: int, step_s: float, peak: float | None) -> dict[str, Any]:
    """Return the fields of a step's event about its speed.

    Args:
        work: What the policy computed, over all ranks.
        num_tokens: Sampled tokens that were trained.
        step_s: Seconds of the step, without the wait for its batch.
        peak: Operations per second of all ranks' devices together; None: not known, and no share is given.
    """
    seconds = max(step_s, 1e-9)
    flops_per_s = work.flops / seconds
    return {
        "computed_tokens": int(work.tokens),
        "train_tokens_per_s": num_tokens / seconds,
        "flops_per_s": flops_per_s,
        **({"mfu": flops_per_s / peak} if peak else {}),
    }
