"""Rows of OpenRLHF: ``input`` with ``output`` or ``label``, and ``datasource``."""

from penstock.trainer.row_format import RowFormat

OPENRLHF = RowFormat(
    name="openrlhf",
    columns="input (text or chat), with output, label or datasource",
    required=("input",),
    precedence=80,
    prompt="input",
    answer="output",
    ground_truth="label",
    data_source="datasource",
)
