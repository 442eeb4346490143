"""Run the test programs of data rows in the reward service's sandbox, as its reward `code` would."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_COMMAND = [sys.executable, "-P", "-m", "penstock.reward_service", "check-tests"]
_START_S, _ROW_S = 120.0, 60.0
_MARKS = ("assert", "def test", "def check", "inputs", "test_list")


@dataclass(slots=True)
class TestReport:
    """The number of rows whose tests ran, (place, problem) of the bad ones, and why none could run."""

    num_checked: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)
    not_run: str = ""

    def to_document(self) -> dict[str, Any]:
        return {"checked": self.num_checked, "bad": len(self.problems), "not_run": self.not_run}


def may_hold_tests(ground_truth: str | None, extra_info: str) -> bool:
    return any(mark in text for text in (ground_truth or "", extra_info) for mark in _MARKS)


def check(rows: Sequence[dict[str, Any]]) -> TestReport:
    """Run the rows' tests in a process of the reward service, which this service does not import."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    try:
        done = subprocess.run(
            _COMMAND, input=text, capture_output=True, text=True, timeout=_START_S + _ROW_S * len(rows), check=False
        )
    except subprocess.TimeoutExpired:
        return TestReport(not_run="the sandbox did not finish in time")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    problems = [(row["place"], row["problem"]) for row in found if row["problem"]]
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    return TestReport(len(found), problems, last[0] if done.returncode else "")
