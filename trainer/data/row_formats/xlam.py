"""Rows of xLAM and APIGen: a ``query``, and in ``answers`` the calls that answer it, of the ``tools``."""

from penstock.trainer.row_format import RowFormat

XLAM = RowFormat(
    name="xlam",
    columns="query, answers (JSON text of calls), tools",
    required=("query", "answers", "tools"),
    precedence=55,
    prompt="query",
    calls="answers",
)
