"""Rows of ShareGPT: a chat of ``from`` and ``value`` in ``conversations``."""

from penstock.trainer.row_format import RowFormat

SHAREGPT = RowFormat(
    name="sharegpt",
    columns="conversations (chat of from and value, or role and content)",
    required=("conversations",),
    precedence=60,
    prompt="conversations",
    is_whole_chat=True,
)
