"""The commands `penstock data check`, and as a program ``data-check`` and ``data-rows``; imports nothing slow."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from penstock.protocol import process_end
from penstock.protocol.command_line import USAGE_ERROR, Help, UsageError, program
from penstock.protocol.errors import PenstockError
from penstock.protocol.process_end import error_text

FormName = Annotated[str, Help("Form of the rows, such as trl; auto recognises it, file.py:attribute is your own.")]
Columns = Annotated[tuple[str, ...], Help("Read the file's column NAME as COLUMN, as COLUMN=NAME; repeatable.")]


@dataclass(frozen=True, slots=True)
class Reading:
    """How data files are read; ``map`` has COLUMN=NAME."""

    model: Path | None = None
    run: Path | None = None
    format: str = "auto"
    map: tuple[str, ...] = ()
    first: int | None = None
    show: int = 0  # rows whose rendered text is printed


def data_check(
    *files: Annotated[
        Path,
        Help(
            "JSONL, JSON, CSV, Parquet or Arrow; a folder of them; an id on the Hugging Face hub; "
            "data.KEY=VALUE reads the rows with this setting."
        ),
    ],
    model: Annotated[
        Path | None, Help("Model folder, GGUF file or id, to count tokens through its chat template.")
    ] = None,
    run: Annotated[
        Path | None, Help("Run file whose model, settings and (without FILES) data files are checked.")
    ] = None,
    format: FormName = "auto",
    map: Columns = (),
    first: Annotated[int | None, Help("Check only the first rows of each file; default all.")] = None,
    show: Annotated[
        int, Help("Print the rendered text of the first rows of each file, with what is trained marked; needs a model.")
    ] = 0,
    json: Annotated[bool, Help("Print one JSON object for each file.")] = False,
    no_tests: Annotated[bool, Help("Do not run the rows' test programs (they run in the sandbox).")] = False,
) -> int:
    """Check a data file: which rows can be trained on, and what is wrong with the others.

    Example:  penstock data check train.parquet --model Qwen3-0.6B
    Then:     penstock train run.toml data.train=train.parquet
    """
    from penstock.deploy.data_check.check import check_data

    try:
        return check_data(files, Reading(model, run, format, map, first, show), as_json=json, runs_tests=not no_tests)
    except PenstockError as err:
        sys.stderr.write(error_text(f"{err}\n"))
        return USAGE_ERROR


def data_rows(
    file: Annotated[Path | None, Help("JSONL, JSON, CSV or Parquet.")] = None,
    *,
    run_file: Annotated[Path | None, Help("Rows of its data.train instead, read as it says.")] = None,
    number: Annotated[int, Help("How many rows, spread over the file.")] = 20,
    format: FormName = "auto",
    map: Columns = (),
) -> int:
    """Print rows of a data file as the input of a reward, one JSON object each."""
    from penstock.deploy.data_check.rows import print_rows

    if (file is None) == (run_file is None):
        raise UsageError("name a data file, or a run file with --run-file")
    return print_rows(file, run_file, number, format, map)


COMMANDS = {"data-check": data_check, "data-rows": data_rows}


def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names; return 2 for an error explained on stderr, 130 after Ctrl-C."""
    process_end.install("data")
    name, *rest = arguments
    try:
        return program(f"python -m penstock.trainer {name}", COMMANDS[name], error=None)(rest)
    except PenstockError as err:
        sys.stderr.write(error_text(f"{err}\n"))
        return USAGE_ERROR


if __name__ == "__main__":
    with process_end.ends_quietly():
        code = main(sys.argv[1:])
    sys.exit(code)
