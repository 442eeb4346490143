"""The critic section of the run file: the network that `algorithm.advantage = "gae"` learns values with; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section


class CriticSettings(Section):
    """PPO's critic: its initial weights, its optimisation, and how its values become advantages."""

    path: Path | None = Field(
        default=None, description="Model folder whose body the critic is initialised with; none: model.path."
    )
    lr: float = Field(
        default=1e-5,
        gt=0.0,
        description="Peak learning rate of the critic's own AdamW; trainer.schedule applies to it.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up from 0 to critic.lr.")
    max_grad_norm: float = Field(
        default=1.0, gt=0.0, description="The critic's gradients are scaled down to this norm."
    )
    head_start_steps: int = Field(
        default=0,
        ge=0,
        description="First steps of the run in which only the critic is trained.",
    )
    updates: int = Field(default=1, ge=1, description="Optimizer steps of the critic on each batch.")
    loss: Literal["mse", "huber"] = Field(
        default="mse", description="Loss of a value: half its squared error, or Huber's."
    )
    loss_coefficient: float = Field(
        default=1.0,
        gt=0.0,
        description="Factor on the value loss; AdamW cancels it, so that only critic.max_grad_norm depends on it.",
    )
    value_clip: float | None = Field(
        default=None,
        gt=0.0,
        description="How far the updates on one batch may move a value; none: no limit; needs critic.updates > 1.",
    )
    gamma: float = Field(default=1.0, ge=0.0, le=1.0, description="Discount of later rewards, per token.")
    lam: float = Field(
        default=0.95,
        ge=0.0,
        le=1.0,
        description="GAE's lambda: 1 uses the rewards alone (no bias, high variance), 0 the critic alone.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> CriticSettings:
        if self.value_clip is not None and self.updates == 1:
            raise ValueError(
                f"critic.value_clip = {self.value_clip} does nothing with critic.updates = 1: it limits how far a value "
                "moves from its value before the batch, and the one update starts there; raise critic.updates"
            )
        return self
