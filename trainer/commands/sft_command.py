"""`python -m penstock.trainer sft run.toml [overrides]`: the supervised warm-up, from the run file to the model folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from penstock.protocol import logs
from penstock.protocol.config.run_file import load, split_arguments
from penstock.trainer.settings import TrainerSettings


def main(arguments: Sequence[str]) -> int:
    """Fine-tune and print the result's folder; raises PenstockError."""
    files, overrides = split_arguments(arguments)
    settings = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ).settings
    logs.configure("sft")
    from penstock.trainer.learner import sft  # noqa: PLC0415  a mistake in the run file need not wait for torch
    from penstock.trainer.ranks import Ranks  # noqa: PLC0415

    ranks = Ranks()
    result = sft.run(settings, ranks)
    if ranks.is_leader:
        sys.stdout.write(f"{result.folder}\n")
    ranks.leave(0)
    return 0
