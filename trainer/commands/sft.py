"""`python -m penstock.trainer sft run.toml [overrides]`: supervised fine-tuning, from a run file to a model folder."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.trainer.commands.fine_tune import fine_tune
from penstock.trainer.commands.sft_settings import SFT


def main(arguments: Sequence[str]) -> int:
    """Fine-tune and print the folder of the result; 130 or 143 after a signal, with a checkpoint. Raises PenstockError."""
    return fine_tune(SFT, arguments)
