"""Imports what a training needs ahead of its start, for whoever knows that one will be started soon."""

from __future__ import annotations

import gc


def import_everything() -> None:
    """Import torch, transformers, DeepSpeed and the trainer: most of the time from a trainer's start to its first step."""
    gc.disable()  # until `process_memory.end_start`, as in a training that is started at once
    from transformers import AutoModelForCausalLM  # noqa: F401, PLC0415  seconds of import

    import penstock.trainer.assemble  # noqa: PLC0415
    import penstock.trainer.commands.train  # noqa: F401, PLC0415
    from penstock.trainer.learner.trainable import import_deepspeed  # noqa: PLC0415

    import_deepspeed()
