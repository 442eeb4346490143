"""A chat whose last assistant message, if it ends with one, is the answer."""

from penstock.trainer.row_format import RowFormat

MESSAGES = RowFormat(
    name="messages",
    columns="messages (chat); a last assistant message is what SFT imitates",
    required=("messages",),
    precedence=10,
    prompt="messages",
    is_whole_chat=True,
)
