"""A prompt and its right answer, each in a column."""

from penstock.trainer.row_format import RowFormat

FLAT = RowFormat(
    name="flat",
    columns="prompt (text or chat), ground_truth, data_source",
    trains="GRPO",
    required=("prompt", "ground_truth"),
    unless=("completion", "response"),
    precedence=30,
)
