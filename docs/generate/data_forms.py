"""The forms of rows that are read, and the columns that `data.map` may name."""

from __future__ import annotations

from penstock.trainer.data import row_formats
from penstock.trainer.settings import COLUMNS


def text() -> str:
    """Return the table of the module that reads rows, and what it says below it."""
    documentation = row_formats.__doc__ or ""
    _, _, body = documentation.partition("\n\n")
    columns = ", ".join(f"`{name}`" for name in COLUMNS)
    return f"{body.strip()}\n\nColumns that `data.map` may name: {columns}.\n"
