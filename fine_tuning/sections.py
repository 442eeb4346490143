"""The settings that `penstock sft`, `penstock dpo` and `penstock rm` read; pure."""

from __future__ import annotations

from penstock.fine_tuning.own_section import OwnSection

SFT = OwnSection(
    section="sft",
    also_read=frozenset({"model.lora.dropout"}),
    instead={"data.answer_is_ground_truth": "answers are what is imitated; remove it"},
)
DPO = OwnSection(
    section="dpo",
    also_read=frozenset(),
    instead={
        "data.answer_is_ground_truth": "a preference has no ground truth; remove it",
        "model.lora.dropout": "preferences are trained without dropout, so that policy and reference differ by their weights alone; remove it",
        "algorithm": "the losses of preferences are in [dpo]; remove it",
    },
)
RM = OwnSection(
    section="rm",
    also_read=frozenset({"model.lora.dropout"}),
    instead={
        "data.answer_is_ground_truth": "a preference has no ground truth; remove it",
        "reward": "a reward model is what is trained; remove it",
    },
)
