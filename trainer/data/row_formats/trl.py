"""Rows of TRL: a prompt, alone or with what completes it."""

from penstock.trainer.row_format import RowFormat

TRL = RowFormat(
    name="trl", columns="prompt (text or chat), or with completion or response", required=("prompt",), precedence=40
)
