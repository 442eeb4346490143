"""Off-policy sequence masking: failed sequences that the policy has moved from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.trainer.algorithm.corrections.interface import GRPO, Drift, Options, correction
from penstock.trainer.algorithm.lazy_torch import Tensor


class OpsmOptions(Options):
    opsm_delta: float | None = Field(
        default=None,
        ge=0.0,
        description="Failed sequences whose mean log-ratio per token drops by more than this are left out; none: off.",
    )
    opsm_level: Literal["sequence", "token"] = Field(
        default="sequence",
        description="What has failed where the mean advantage (sequence) or its own (token, as runs recorded without this key) is below 0.",
    )


@correction(
    options=OpsmOptions,
    source="arXiv 2512.02556",
    switch="opsm_delta",
    presets={"opsm": {**GRPO, "loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "opsm_delta": 1e-4}},
)
def opsm(drift: Drift, *, opsm_delta: float, opsm_level: str = "sequence") -> Tensor:
    """Leave out failed sequences that became less likely by more than a bound (DeepSeek-V3.2), [N] bool.

    A sequence is left out whole where the mean of its A is below 0 and that of ``log behaviour - log current`` is above
    ``opsm_delta``; at the level of tokens only its tokens of A < 0.
    """
    sequences, advantages = drift.sequences, drift.advantages
    if opsm_level == "sequence":
        advantages = sequences.spread(sequences.mean(advantages))
    return ~((advantages < 0) & (sequences.spread(-sequences.mean(drift.to_behaviour)) > opsm_delta))
