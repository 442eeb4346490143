"""The sections [sft] and [rm] of the run file, and what [dpo] has of them: training on given answers, without rollouts; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section

Schedule = Literal["constant", "linear", "cosine"]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Files = Path | list[Path]
TurnMasks = Literal["auto", "turns", "markers"]


def listed(files: Files) -> tuple[Path, ...]:
    return tuple(files) if isinstance(files, list) else (files,)


class FineTuningSettings(Section):
    """What every kind of training on given answers has: data, length, optimizer, validation, result."""

    data: Files = Field(default=[], description="Rows to train on; none: data.train.")
    eval_data: Files = Field(
        default=[], description="Held-out rows of the same forms, for the validation loss; none: no validation."
    )
    steps: int = Field(default=100, ge=1, description="Optimizer steps.")
    epochs: float | None = Field(
        default=None, gt=0.0, description="Passes over the rows, such as 3 or 0.5, instead of steps; none: steps."
    )
    batch_size: int = Field(default=32, ge=1, description="Rows of one optimizer step, over all ranks.")
    lr: float = Field(default=1e-5, gt=0.0, description="Peak learning rate of AdamW.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's decay of both moments.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up from 0 to lr.")
    schedule: Schedule = Field(default="constant", description="Learning rate after the warm-up.")
    eval_every: int = Field(
        default=0, ge=0, description="Steps between validations on eval_data; 0: only after the last step."
    )
    early_stop: int = Field(
        default=0,
        ge=0,
        description="Stop after so many validations in a row without a lower validation loss; 0: never.",
    )
    keep_best: bool = Field(
        default=False, description="The result has the weights of the lowest validation loss, not the last ones."
    )
    checkpoint_every: int = Field(
        default=0, ge=0, description="Steps between checkpoints; 0: by time alone, trainer.checkpoint_every_s."
    )
    output: Path | None = Field(
        default=None, description="Folder for the result; none: a folder of the command's name in the run's folder."
    )

    @property
    def files(self) -> tuple[Path, ...]:
        return listed(self.data)

    @property
    def eval_files(self) -> tuple[Path, ...]:
        return listed(self.eval_data)

    @model_validator(mode="after")
    def _validation_is_possible(self) -> FineTuningSettings:
        asked = [name for name in ("eval_every", "early_stop", "keep_best") if getattr(self, name)]
        if asked and not self.eval_files:
            raise ValueError(f"{asked[0]} needs held-out rows; set eval_data too, or remove {asked[0]}")
        if self.early_stop and not self.eval_every:
            raise ValueError("early_stop compares validations during the training; set eval_every too")
        return self


class SftSettings(FineTuningSettings):
    """Supervised fine-tuning, `penstock sft`."""

    mask: TurnMasks = Field(
        default="auto",
        description="Tokens that are trained. turns: each assistant turn is an example of its own, after the chat before it. "
        "markers: a chat is one example, and what the chat template puts between {% generation %} and {% endgeneration %} is "
        "trained. auto: markers where the template has them.",
    )
    loss: Literal["nll", "dft"] = Field(
        default="nll",
        description="nll: cross-entropy; dft: the same, each token weighed by its probability (arXiv 2508.05629).",
    )


class RmSettings(FineTuningSettings):
    """Training of a reward model on preferences, `penstock rm`."""

    use_margin: bool = Field(
        default=True,
        description="A row's column margin is the least difference of rewards that is asked for; false: 0.",
    )
    center: float = Field(
        default=0.0,
        ge=0.0,
        description="Weight of the squared sum of both rewards, which keeps rewards near 0 (arXiv 2312.09244); TRL's is 0.01.",
    )
