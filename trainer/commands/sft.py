"""`python -m penstock.trainer sft run.toml [overrides]`: supervised fine-tuning, from a run file to a model folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from penstock.protocol import logs
from penstock.protocol.config.run_file import load, split_arguments
from penstock.trainer.commands.sft_settings import check_ranks, chosen_settings
from penstock.trainer.data.inputs import resolve_inputs
from penstock.trainer.learner.gguf_model import with_model_folders
from penstock.trainer.settings import TrainerSettings


def main(arguments: Sequence[str]) -> int:
    """Fine-tune and print the folder of the result; raises PenstockError."""
    files, overrides = split_arguments(arguments)
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ)
    settings, unread = chosen_settings(loaded, overrides)
    check_ranks(loaded, int(os.environ.get("WORLD_SIZE", "1")))
    settings = resolve_inputs(settings)
    if unread and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"penstock sft reads the section [sft]; it does not use {', '.join(unread)}\n")
    logs.configure("sft")
    settings = with_model_folders(settings)
    from penstock.trainer.learner import sft  # noqa: PLC0415  run file errors are reported without importing torch
    from penstock.trainer.ranks import Ranks  # noqa: PLC0415

    ranks = Ranks()
    result = sft.run(settings, ranks)
    if ranks.is_leader:
        sys.stdout.write(f"{result.folder}\n")
    ranks.leave(0)
    return 0
