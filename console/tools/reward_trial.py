"""`penstock reward test NAME --data FILE`: the score distribution of a reward on rows of a data file.

A data file has no completions yet. Each row is scored with answers of known quality: its right answer in the usual
formats, its recorded completion if it has one, another row's answer, and an empty one; a row of tests with its own
solution, if it has one, and an empty program. A reward that gives all of them the same score gives no learning signal.
Rows whose tests accept an empty program, or refuse their own solution, are named.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.console import launch
from penstock.console.tables import console
from penstock.console.tools.rewards import RewardService
from penstock.protocol.errors import ConfigError

_ROWS_DEADLINE_S = 60.0
_ERRORS_SHOWN = 3
_TEST_MARKS = ("assert", "def test", "def check", "inputs", "test_list")


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where rows come from: a data file with its columns, or what a run file trains on."""

    name: str
    arguments: tuple[str, ...]  # of the command that prints the rows

    @classmethod
    def of(cls, file: Path | None, run_file: Path | None, columns: Sequence[str]) -> RowSource:
        """Return the source of ``--data`` and ``--map``, or of ``--run-file``; raises ConfigError for both."""
        if file is not None and run_file is not None:
            raise ConfigError(f"--data {file} and --run-file {run_file}: leave one out; a run file names its data")
        if file is not None and file.suffix == ".toml":
            raise ConfigError(f"--data {file}: a run file, no data; type: --run-file {file}")
        if run_file is not None:
            if columns:
                raise ConfigError(f"--map {columns[0]}: a run file has its columns in [data.map]; change them there")
            return cls(str(run_file), ("--run-file", str(run_file)))
        return cls(str(file), (str(file), *(word for column in columns for word in ("--map", column))))


def try_data(name: str, source: RowSource, number: int, url: str, token_file: Path | None, *, as_json: bool) -> int:
    """Print the score distribution; return 1 when a row could not be scored, or all scores are equal.

    Raises ConfigError for a file that cannot be read, RewardServiceError when the service is unreachable or refuses.
    """
    service = RewardService(url, token_file)
    rows = _rows(source, number)
    checked = _check_tests(rows)
    tries = [
        _programs(checked[row["place"]]["solution"])
        if row["place"] in checked
        else _answers(row, rows[(at + 1) % len(rows)])
        for at, row in enumerate(rows)
    ]
    groups = [
        {
            "group_id": f"row-{at}",
            "completions": [text for _, text in answers],
            **{key: row[key] for key in ("prompt", "data_source", "ground_truth", "extra_info")},
        }
        for at, (row, answers) in enumerate(zip(rows, tries, strict=True))
    ]
    answer = service.call("POST", "/v1/score", {"reward": name, "groups": groups})
    by_kind: dict[str, list[float]] = {}
    for answers, result in zip(tries, answer["results"], strict=True):
        for (kind, _), score in zip(answers, result["scores"], strict=False):
            by_kind.setdefault(kind, []).append(score["score"])
    spread = answer["spread"]
    bad_tests = {place: found["problem"] for place, found in checked.items() if found["problem"]}
    if as_json:
        print(json.dumps({"reward": name, "spread": spread, "by_answer": by_kind, "bad_tests": bad_tests}))
    else:
        _print(name, rows, answer["results"], by_kind, spread)
        for place, problem in bad_tests.items():
            print(f"penstock: {place}: {problem}", file=sys.stderr)
    return 1 if spread["warning"] or spread["num_errors"] or bad_tests else 0


def _rows(source: RowSource, number: int) -> list[dict[str, Any]]:
    """Read rows as a run would, with the trainer's code in a child process."""
    command = launch.module("penstock.trainer", "data-rows", *source.arguments, "--number", str(number))
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ROWS_DEADLINE_S, check=False)
    if done.returncode:
        raise ConfigError(done.stderr.strip() or f"{source.name} could not be read")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if not rows:
        raise ConfigError(f"{source.name} has no rows")
    return rows


def _check_tests(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run the test programs of rows that have them, in the reward service's sandbox; return the results by place."""
    texts = "".join(json.dumps(row) + "\n" for row in rows)
    if not any(mark in texts for mark in _TEST_MARKS):
        return {}
    command = launch.module("penstock.reward_service", "check-tests")
    deadline_s = _ROWS_DEADLINE_S * (1 + len(rows))
    done = subprocess.run(command, input=texts, capture_output=True, text=True, timeout=deadline_s, check=False)
    if done.returncode:
        print(f"penstock: the rows' tests were not run: {done.stderr.strip()[-300:]}", file=sys.stderr)
    return {found["place"]: found for found in map(json.loads, done.stdout.splitlines())}


def _programs(solution: str | None) -> list[tuple[str, str]]:
    """Return (kind, answer) pairs for a row of tests."""
    empty = ("an empty program", "```python\npass\n```")
    return [empty] if solution is None else [("its own solution", f"````python\n{solution}\n````"), empty]


def _answers(row: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (kind, answer) pairs, of the same kinds for every row that has a right answer."""
    answers = []
    if row["completion"] is not None:
        answers.append(("its own completion", row["completion"]))
    for whose, of in (("right", row), ("another row's", other)):
        truth = of["ground_truth"]
        if truth is not None and (of is row or truth != row["ground_truth"]):
            text = truth if isinstance(truth, str) else json.dumps(truth)
            answers += [
                (f"{whose} answer, plain", text),
                (f"{whose} answer after ####", f"#### {text}"),
                (f"{whose} answer in \\boxed", f"\\boxed{{{text}}}"),
            ]
    return [*answers, ("nothing", "")]


def _print(
    name: str,
    rows: Sequence[dict[str, Any]],
    results: Sequence[dict[str, Any]],
    by_kind: dict[str, list[float]],
    spread: dict[str, Any],
) -> None:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("scored", no_wrap=True)
    for head in ("number", "mean", "min", "max"):
        table.add_column(head, justify="right")
    for kind, scores in by_kind.items():
        table.add_row(Text(kind), str(len(scores)), *(f"{f(scores):.3f}" for f in (fmean, min, max)))
    console().print(table)
    if spread["num_scores"]:
        print(
            f"\n{name} on {len(rows)} rows: {spread['num_scores']} scores, mean {spread['mean']:.3f}, standard deviation "
            f"{spread['std']:.3f}, {spread['num_distinct']} different values from {spread['min']:g} to {spread['max']:g}"
        )
    failed = [(row["place"], result["error"]) for row, result in zip(rows, results, strict=True) if result["error"]]
    for row_name, error in failed[:_ERRORS_SHOWN]:
        print(f"penstock: {row_name}: {error['reason']}: {error['detail']}", file=sys.stderr)
    if failed:
        print(f"penstock: {len(failed)} of {len(rows)} rows could not be scored", file=sys.stderr)
    if spread["warning"]:
        print(f"penstock: warning: {spread['warning']}", file=sys.stderr)
