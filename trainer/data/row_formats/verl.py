"""Rows of verl: a chat in ``prompt``, and the rule and right answer in ``reward_model``."""

from penstock.trainer.row_format import RowFormat

VERL = RowFormat(
    name="verl",
    columns="prompt (chat), reward_model {style, ground_truth}, data_source, extra_info",
    trains="GRPO",
    required=("prompt", "reward_model"),
    precedence=20,
)
