"""The settings that `penstock sft` reads; pure."""

from __future__ import annotations

from penstock.trainer.commands.own_section import OwnSection

SFT = OwnSection(
    section="sft",
    also_read=frozenset({"model.lora.dropout"}),
    instead={"data.answer_is_ground_truth": "answers are what is imitated; remove it"},
)
