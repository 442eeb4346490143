"""`python -m penstock.trainer rm run.toml [overrides]`: training of a reward model on preferences, into a model folder."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.trainer.commands.fine_tune import fine_tune
from penstock.trainer.commands.own_section import OwnSection

RM = OwnSection(
    section="rm",
    also_read=frozenset({"model.lora.dropout"}),
    instead={
        "data.answer_is_ground_truth": "a preference has no ground truth; remove it",
        "reward": "a reward model is what is trained; remove it",
    },
)


def main(arguments: Sequence[str]) -> int:
    """Train and print the folder of the result; 130 or 143 after a signal, with a checkpoint. Raises PenstockError."""
    return fine_tune(RM, arguments)
