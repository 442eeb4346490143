"""What the processes of `tests.trainer.learner.forks` have loaded: also what a trainer loads only when needed."""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import torch
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
gc.enable()


def main() -> int:
    """Run the ``main`` of the module that is the first argument, with those after it."""
    torch.set_num_threads(1)
    module, *arguments = sys.argv[1:]
    return import_module(module).main(arguments)
