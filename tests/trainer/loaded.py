"""What the fork server of `tests.trainer.forks` has loaded: also what a trainer loads only when it comes to need it."""

from __future__ import annotations

from importlib import import_module

from trainer.trainable import _import_deepspeed

for _name in (
    "peft",
    "transformers.models.qwen3.modeling_qwen3",
    "trainer.assemble",
    "trainer.replay",
    "trainer.sft_command",
    "trainer.train_command",
):
    import_module(_name)
_import_deepspeed()
