"""What a fork server loads for trainers (`tests.forked`): also what a trainer loads only when needed."""

from __future__ import annotations

import gc
from importlib import import_module

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from penstock.trainer.learner.trainable import import_deepspeed

gc.disable()
for _name in (
    "peft",
    "transformers.models.qwen3.modeling_qwen3",
    "penstock.trainer.assemble",
    "penstock.forensics.replay.replay_run",
    "penstock.fine_tuning.__main__",
    "penstock.fine_tuning.dpo",
    "penstock.fine_tuning.rm",
    "penstock.fine_tuning.sft",
    "penstock.trainer.commands.train",
):
    import_module(_name)
import_deepspeed()
get_checkpoint_conversion_mapping(
    "qwen3"
)  # hundreds of patterns, which every process would compile with its first model
gc.freeze()  # else collections of every process would look through, and so copy, what all of them share
gc.enable()
