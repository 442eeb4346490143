"""The table model.lora of the run file; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section

_NOT_SERVED = ("embed_tokens", "lm_head")


class LoraSettings(Section):
    """Low-rank adapters that are trained instead of the model."""

    rank: int = Field(default=0, ge=0, description="Rank of the adapters; 0: no adapters, the whole model is trained.")
    alpha: float = Field(default=32.0, gt=0.0, description="The adapters are scaled by alpha / rank.")
    dropout: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="Share of an adapter's input that is zeroed in a training pass."
    )
    targets: list[str] = Field(
        default=[], description='Layers by the end of their name ("q_proj"); none: every linear layer but the head.'
    )

    seed: int | None = Field(
        default=None,
        ge=0,
        description="Seed of the adapters' first values, and of dropout; none: run.seed.",
    )

    publish: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="What a version is published as: 'adapter': the adapters alone, on a base model that is published once; "
        "engines serve several of them and never pause. 'merged': the whole model, as without adapters.",
    )

    @model_validator(mode="after")
    def _can_be_served(self) -> LoraSettings:
        unserved = [target for target in self.targets if target.rpartition(".")[2] in _NOT_SERVED]
        if unserved and self.rank and self.publish == "adapter":
            raise ValueError(
                f"model.lora.targets = {self.targets}: engines serve no adapter of {unserved[0]}; leave it out, or set "
                'model.lora.publish = "merged"'
            )
        return self

    @model_validator(mode="after")
    def _not_idle(self) -> LoraSettings:
        fields = type(self).model_fields
        idle = sorted(key for key in fields if key != "rank" and getattr(self, key) != fields[key].default)
        if idle and not self.rank:
            raise ValueError(f"model.lora.{idle[0]} does nothing while model.lora.rank is 0; set model.lora.rank too")
        return self
