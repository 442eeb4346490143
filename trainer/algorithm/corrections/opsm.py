"""Off-policy sequence masking: failed sequences that the policy has moved from."""

from __future__ import annotations

from pydantic import Field

from penstock.trainer.algorithm.corrections.interface import Drift, Options, correction
from penstock.trainer.algorithm.lazy_torch import Tensor
from penstock.trainer.algorithm.losses.tokens import Sequences


class OpsmOptions(Options):
    opsm_delta: float | None = Field(
        default=None,
        ge=0.0,
        description="Failed sequences whose mean log-ratio per token drops by more than this are left out; none: off.",
    )


@correction(
    options=OpsmOptions,
    source="arXiv 2512.02556",
    switch="opsm_delta",
    presets={
        "opsm": {
            "advantage": "grpo", "normalise_by_std": True, "loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2,
            "opsm_delta": 1e-4, "aggregation": "token-mean",
        },
    },
)  # fmt: skip
def opsm(drift: Drift, *, opsm_delta: float) -> Tensor:
    """Leave out failed sequences that became less likely by more than a bound (DeepSeek-V3.2), [N] bool."""
    return off_policy_sequence_mask(drift.to_behaviour, drift.advantages, drift.sequences, opsm_delta)


def off_policy_sequence_mask(log_ratio: Tensor, advantages: Tensor, sequences: Sequences, delta: float) -> Tensor:
    """Return which tokens off-policy sequence masking keeps, [N] bool.

    A sequence is left out where A < 0 and the mean of ``log behaviour - log current`` is above ``delta``. Against
    a proximal policy that was recomputed for the same step it never fires.
    """
    drift = -sequences.mean(log_ratio.detach())
    return ~((advantages < 0) & (sequences.spread(drift) > delta))
