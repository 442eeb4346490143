"""The section [model.lora] of the run file; reads the configuration of an adapter that is trained further, and imports no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.errors import PenstockError
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ALL_LINEAR, MERGE_ADAPTER, AdapterConfig


class LoraSettings(Section):
    """Low-rank adapters that are trained instead of the model."""

    path: Path | None = Field(
        default=None,
        description="Folder of an adapter in PEFT's form, which is trained further: rank, alpha, use_rslora and targets are its own; none: a new one.",
    )
    rank: int = Field(default=0, ge=0, description="Rank of the adapters; 0: no adapters, the whole model is trained.")
    alpha: float = Field(default=32.0, gt=0.0, description="The adapters are scaled by alpha / rank.")
    use_rslora: bool = Field(default=False, description="Scale them by alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732).")
    dropout: float = Field(
        default=0.0, ge=0.0, lt=1.0, description="Share of an adapter's input that is zeroed in a training pass."
    )
    targets: list[str] = Field(
        default=[], description='Layers by the end of their name ("q_proj"); none: every linear layer but the head.'
    )
    seed: int | None = Field(
        default=None, ge=0, description="Seed of the adapters' first values, and of dropout; none: run.seed."
    )
    publish: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="What a version is published as: 'adapter': the adapters alone, on a base model that is published once; "
        "engines serve several of them and never pause. 'merged': the whole model, as without adapters.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> LoraSettings:
        fields = type(self).model_fields
        if self.path is not None:
            return self._of_folder(self.path)
        idle = sorted(key for key in fields if key != "rank" and getattr(self, key) != fields[key].default)
        if idle and not self.rank:
            raise ValueError(f"model.lora.{idle[0]} does nothing while model.lora.rank is 0; set model.lora.rank too")
        return self

    @property
    def scaled_alpha(self) -> float:
        """What divided by the rank is the adapters' scale, as engines compute it that know no rsLoRA."""
        return self.alpha * (math.sqrt(self.rank) if self.use_rslora else 1.0)

    def _of_folder(self, path: Path) -> LoraSettings:
        where, instead = f"model.lora.path = {path}", MERGE_ADAPTER.format(adapter=path)
        if not (path / ADAPTER_CONFIG).is_file():
            raise ValueError(
                f"{where}: no {ADAPTER_CONFIG}; name the folder of a PEFT adapter (a model's is model.path)"
            )
        try:
            written = AdapterConfig.from_peft(path)
        except PenstockError as err:
            raise ValueError(f"{where}: {err}; {instead}") from None
        targets = [] if written.target_modules == (ALL_LINEAR,) else sorted(written.target_modules)
        own = {"rank": written.r, "alpha": written.lora_alpha, "use_rslora": written.use_rslora, "targets": targets}
        for key, value in own.items():
            given = getattr(self, key)
            if key in self.model_fields_set and (sorted(given) if isinstance(given, list) else given) != value:
                raise ValueError(
                    f"model.lora.{key} = {given}, and the adapter {where} has {value}; leave model.lora.{key} out to train it further. "
                    f"For another adapter on top, {instead}"
                )
        return self.model_copy(update=own)
