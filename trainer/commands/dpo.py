"""`python -m penstock.trainer dpo run.toml [overrides]`: training on preferences, from a run file to a model folder."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.trainer.commands.fine_tune import fine_tune
from penstock.trainer.commands.own_section import OwnSection

DPO = OwnSection(
    section="dpo",
    also_read=frozenset(),
    instead={
        "data.answer_is_ground_truth": "a preference has no ground truth; remove it",
        "model.lora.dropout": "preferences are trained without dropout, so that policy and reference differ by their weights alone; remove it",
        "algorithm": "the losses of preferences are in [dpo]; remove it",
    },
)


def main(arguments: Sequence[str]) -> int:
    """Train and print the folder of the result; 130 or 143 after a signal, with a checkpoint. Raises PenstockError."""
    return fine_tune(DPO, arguments)
