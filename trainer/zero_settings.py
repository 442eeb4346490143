"""What ZeRO shards, offloads and sends, in the section [trainer] of the run file; imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section

_FROM_STAGE = {
    "overlap_comm": 2,
    "reduce_bucket_size": 2,
    "prefetch_bucket_size": 3,
    "max_live_parameters": 3,
    "hpz_partition_size": 3,
}


class ZeroSettings(Section):
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="ZeRO: 0 nothing sharded, 1 optimizer, 2 also gradients, 3 also parameters."
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        default="none",
        description="Held in host memory: optimizer, the master weights and states of AdamW, which steps there (ZeRO 1 to 3); "
        "parameters, also the parameters, a layer at a time on the device (ZeRO 3). Saves nothing where the CPU trains. NVMe is not "
        "offered: DeepSpeed compiles its access to it at the start, which was never run here.",
    )
    gradient_dtype: Literal["float32", "as-trained"] = Field(
        default="float32",
        description="In which gradients are summed over micro-batches and ranks with model.dtype = bfloat16; as-trained needs "
        "half the memory and drops small terms.",
    )
    overlap_comm: bool | None = Field(
        default=None,
        description="Reduce gradients while the backward pass goes on (ZeRO 2 and 3), with a second reduction bucket. None: at ZeRO 3.",
    )
    reduce_bucket_size: int = Field(
        default=500_000_000,
        ge=1_000_000,
        description="Elements of gradients that ranks reduce at once (ZeRO 2 and 3): smaller ones need less memory, and more messages.",
    )
    prefetch_bucket_size: int | None = Field(
        default=None,
        ge=0,
        description="Elements of parameters that are gathered ahead of their use (ZeRO 3). None: those of one layer, 50 million at "
        "least.",
    )
    max_live_parameters: int = Field(
        default=1_000_000_000,
        ge=0,
        description="Most elements of gathered parameters that a rank keeps (ZeRO 3); beyond it they are released after use.",
    )
    hpz_partition_size: int = Field(
        default=1,
        ge=1,
        description="Ranks, those of one node, that hold a second copy of all parameters in parts (hpZ of ZeRO++, ZeRO 3): the backward "
        "pass gathers from it, not from other nodes. 1: no copy. Divides trainer.num_ranks.",
    )

    @model_validator(mode="after")
    def _of_the_stage(self) -> ZeroSettings:
        needed = {"none": 0, "optimizer": 1, "parameters": 3}[self.offload]
        if self.zero_stage < needed:
            raise ValueError(
                f"trainer.offload = {self.offload} needs trainer.zero_stage >= {needed}, got {self.zero_stage}; DeepSpeed offloads "
                f"only what its stage shards: set trainer.zero_stage = {needed}"
            )
        for name, stage in _FROM_STAGE.items():
            if self.zero_stage < stage and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"trainer.{name} does nothing with trainer.zero_stage = {self.zero_stage}; leave it out, or set trainer.zero_stage = {stage}"
                )
        return self
