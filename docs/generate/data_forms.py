"""The forms of rows that are read, and the columns that `data.map` may name."""

from __future__ import annotations

from penstock.trainer.data.row_formats.row_format import ROW_FORMATS
from penstock.trainer.settings import COLUMNS

_AFTER = """Every format may have ground_truth, data_source, extra_info and system, and images (`row_images`). Other columns go into extra_info, so that a
reward sees the whole row. An invalid value is refused with its file, line and column. [Rows](../data.md) has an example of each."""


def text() -> str:
    """Return a table of the formats, in the order in which ``auto`` tries them, and what holds for all."""
    formats = sorted(ROW_FORMATS.built_in.values(), key=lambda form: form.precedence)
    rows = [f"| `{form.name}` | {form.columns} | {form.trains} |" for form in formats]
    table = "\n".join(["| format | columns | can train |", "|---|---|---|", *rows])
    columns = ", ".join(f"`{name}`" for name in COLUMNS)
    return f"{table}\n\n{_AFTER}\n\nColumns that `data.map` may name: {columns}.\n"
