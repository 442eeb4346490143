"""Read the first rows of a data file for `penstock init`: which columns a run reads, and how long the prompts are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.console import launch

_NUM_ROWS = 500
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class DataSample:
    """What the first rows of a data file say."""

    num_rows: int = 0
    formats: tuple[str, ...] = ()
    mapping: Mapping[str, str] = field(default_factory=dict)  # data.map: the file's columns by what they are read as
    num_prompts: int = 0  # rows with a prompt to answer
    num_truths: int = 0  # of them with a ground truth
    longest_prompt: int | None = None  # tokens; None: not known
    context_tokens: int | None = None  # of the model; None: not known
    problem: str = ""  # the first one


def read(data: str, model: str | None) -> DataSample | None:
    """Return what the first rows say; None for a path that does not exist, such as an id on the hub.

    Columns with other names are mapped where their names say what they hold. The trainer's code reads the rows, in a child process.
    """
    if not Path(data).exists():
        return None
    options = [data, "--first", str(_NUM_ROWS), "--no-tests", "--json"]
    if model and Path(model).exists():
        options += ["--model", model]
    sample = _read(options, {})
    if suggested := sample.mapping:
        mapped = _read([*options, *(f"--map={column}={name}" for column, name in suggested.items())], suggested)
        if mapped.num_prompts and not mapped.problem:
            return mapped
    return replace(sample, mapping={})


def _read(options: Sequence[str], mapping: Mapping[str, str]) -> DataSample:
    command = launch.module("penstock", "data", "check", *options)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return DataSample(problem=f"its first {_NUM_ROWS} rows were not read within {_DEADLINE_S:.0f} s")
    try:
        reports = [json.loads(line) for line in done.stdout.splitlines()]
    except ValueError:
        reports = []
    if not reports:
        return DataSample(problem=done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    return _merged(reports, mapping)


def _merged(reports: Sequence[Mapping[str, Any]], mapping: Mapping[str, str]) -> DataSample:
    """Return the sample of all files of a folder."""
    sources = [source for report in reports for source in report["data_sources"].values()]
    lengths = [
        one["prompt_length"]["max"] for one in reports if one["prompt_length"] and one["length_unit"] == "tokens"
    ]
    return DataSample(
        num_rows=sum(one["rows"] for one in reports),
        formats=tuple(dict.fromkeys(name for one in reports for name in one["formats"])),
        mapping=mapping or next((one["suggested_map"] for one in reports if one["suggested_map"]), {}),
        num_prompts=sum(one["can_train"]["grpo"] for one in reports),
        num_truths=sum(source["with_ground_truth"] for source in sources),
        longest_prompt=max(lengths, default=None),
        context_tokens=next((one["context_tokens"] for one in reports if one["context_tokens"]), None),
        problem=next((line for one in reports for line in one["first_bad_rows"]), ""),
    )
