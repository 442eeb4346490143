"""The command ``data-rows FILE | --run-file RUN.TOML``: rows as the input of a reward, for `penstock reward test`.

One JSON object each.

The test programs of rows run in the reward service's sandbox, as its reward `code` would run them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from penstock.protocol.command_line import UsageError
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.trainer.data.inputs import resolve_inputs
from penstock.trainer.data.messages import text_of
from penstock.trainer.data.pairs import holds_pair
from penstock.trainer.data.read_rows import PromptRow, prompt_row, read_row
from penstock.trainer.data.row_checks import Problems
from penstock.trainer.data.row_files import RowFile, open_rows
from penstock.trainer.errors import MalformedData
from penstock.trainer.row_format import ROW_FORMATS
from penstock.trainer.settings import COLUMNS, DataSettings, TrainerSettings

_COMMAND = [sys.executable, "-P", "-m", "penstock.reward_service", "check-tests"]
_START_S, _ROW_S = 120.0, 60.0
_MARKS = (
    "assert",
    "def test",
    "def check",
    "inputs",
    "test_list",
    "test_cases",
    'input"',
    'input\\"',
    "instruction_id_list",
)


@dataclass(slots=True)
class TestReport:
    num_checked: int = 0
    num_bad: int = 0  # of those whose tests were run
    not_run: str = ""
    num_failed: int = 0  # that this machine could not try: no fault of the rows
    first_failed: str = ""

    def to_document(self) -> dict[str, Any]:
        failed = {"failed": self.num_failed, "first_failed": self.first_failed} if self.num_failed else {}
        return {"checked": self.num_checked, "bad": self.num_bad, "not_run": self.not_run, **failed}

    def __str__(self) -> str:
        failed = (
            f"; {self.num_failed} could not be tried on this machine, {self.first_failed}" if self.num_failed else ""
        )
        run = f"of {self.num_checked} rows were run, {self.num_bad} are bad"
        return f"not run: {self.not_run}" if self.not_run else run + failed


def may_hold_tests(ground_truth: str | None, extra_info: str) -> bool:
    return any(mark in text for text in (ground_truth or "", extra_info) for mark in _MARKS)


def check_tests(rows: IO[str], num_rows: int, problems: Problems) -> TestReport:
    """Check the rows of a file that is read from its start, and add what is wrong with them to ``problems``."""
    rows.seek(0)
    with tempfile.TemporaryFile("w+") as out:
        try:
            limit = _START_S + _ROW_S * num_rows
            done = subprocess.run(
                _COMMAND, stdin=rows, stdout=out, stderr=subprocess.PIPE, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return TestReport(not_run="the sandbox did not finish in time")
        out.seek(0)
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        report = TestReport(not_run=last[0] if done.returncode else "")
        for outcome in map(json.loads, out):
            if outcome["problem"]:
                problems.add(outcome["place"], outcome["problem"])
            elif failed := outcome.get("failed"):
                report.num_failed += 1
                report.first_failed = report.first_failed or f"{outcome['place']}: {failed}"
                continue
            report.num_checked += "solution" in outcome
            report.num_bad += "solution" in outcome and bool(outcome["problem"])
        return report


def print_rows(file: Path | None, run_file: Path | None, number: int, row_format: str, pairs: Sequence[str]) -> int:
    """Print rows spread over the files; raises UsageError, and MalformedData naming file, line and column."""
    mapping = {column: name for column, _, name in (pair.partition("=") for pair in pairs)}
    if unknown := sorted(set(mapping) - set(COLUMNS)):
        raise UsageError(f"--map {unknown[0]}: unknown column; use one of {', '.join(COLUMNS)}")
    if run_file is None:
        assert file is not None
        if row_format != "auto" and ":" not in row_format:
            ROW_FORMATS.find(row_format)  # raises ConfigError, with what is known
        files, data, has_pairs = [file], DataSettings(format=row_format, map=mapping), False
    else:
        settings = resolve_inputs(load(TrainerSettings, files=[run_file], environ=os.environ).settings)
        files, data, has_pairs = settings.data.train_files, settings.data, settings.algorithm.dpo_coefficient > 0.0
        if not files:
            raise ConfigError(f"{run_file}: data.train names no file; set it")
    for path in files:
        _print_rows(open_rows(path), data, math.ceil(number / len(files)), has_pairs=has_pairs)
    return 0


def _print_rows(rows: RowFile, data: DataSettings, most: int, *, has_pairs: bool) -> None:
    numbers = _prompts(rows, data) if has_pairs else range(len(rows))
    step = max(1, len(numbers) // max(1, most))
    for number in numbers[::step][:most]:
        try:
            row = read_row(rows, number, data)
            prompt = prompt_row(row, data)
        except MalformedData as err:
            raise MalformedData(f"{rows.place(number)}: {err}") from None
        completion = next((row[name] for name in ("completion", "response") if isinstance(row.get(name), str)), None)
        sys.stdout.write(json.dumps({**as_reward_input(rows.place(number), prompt), "completion": completion}) + "\n")


def _prompts(rows: RowFile, data: DataSettings) -> list[int]:
    numbers = []
    for number in range(len(rows)):
        try:
            if not holds_pair(read_row(rows, number, data)):
                numbers.append(number)
        except MalformedData as err:
            raise MalformedData(f"{rows.place(number)}: {err}") from None
    return numbers


def as_reward_input(place: str, prompt: PromptRow) -> dict[str, Any]:
    return {
        "place": place,
        "prompt": "\n".join(text_of(message["content"]) for message in prompt.chat),
        "data_source": prompt.data_source,
        "ground_truth": None if prompt.ground_truth is None else json.loads(prompt.ground_truth),
        "extra_info": json.loads(prompt.extra_info),
    }
