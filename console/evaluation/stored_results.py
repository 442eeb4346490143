"""The files of evaluations in the folder of a run: ``evaluations/ID/groups.jsonl`` and ``result.json``.

| file           | holds                                                                                       |
|----------------|---------------------------------------------------------------------------------------------|
| groups.jsonl   | one `Outcome` a line, written as prompts end: an evaluation that was killed goes on from it |
| rules.json     | the rewards' values from which on a sample is correct, as the reward services offered them  |
| result.json    | the `EvaluationResult`                                                                      |
| result.png     | the plot, if matplotlib is installed                                                        |
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from penstock.console.evaluation.results import EvaluationResult, Outcome
from penstock.protocol.files import atomic_write, read_regular

FOLDER = "evaluations"
GROUPS, RULES, RESULT, PLOT = "groups.jsonl", "rules.json", "result.json", "result.png"


def read_outcomes(folder: Path) -> dict[int, Outcome]:
    """Return the outcomes of an evaluation by prompt, the last one of each; a line that was cut off is left out."""
    found: dict[int, Outcome] = {}
    try:
        lines = read_regular(folder / GROUPS).splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            outcome = Outcome.model_validate_json(line)
        except ValidationError:
            continue
        found[outcome.prompt] = outcome
    return found


def append_outcomes(folder: Path, outcomes: Iterable[Outcome]) -> None:
    """Append outcomes, on disk when this returns."""
    with (folder / GROUPS).open("a", encoding="utf-8") as file:
        for outcome in outcomes:
            file.write(outcome.model_dump_json() + "\n")
        file.flush()
        os.fsync(file.fileno())


def rewrite_outcomes(folder: Path, outcomes: Iterable[Outcome]) -> None:
    """Replace all outcomes, atomically."""
    atomic_write(folder / GROUPS, "".join(one.model_dump_json() + "\n" for one in outcomes))


def write_result(folder: Path, result: EvaluationResult) -> Path:
    """Write ``result.json``, atomically; return its path."""
    return atomic_write(folder / RESULT, result.model_dump_json(indent=1) + "\n")


def read_result(folder: Path) -> EvaluationResult | None:
    """Return the result in the folder of an evaluation; None when there is none that can be read."""
    try:
        return EvaluationResult.model_validate_json(read_regular(folder / RESULT))
    except (OSError, ValueError):
        return None


def results_of(run_folder: Path) -> Iterator[EvaluationResult]:
    """Yield the results stored with a run, oldest first; a file that cannot be read is left out."""
    read = [read_result(path.parent) for path in (run_folder / FOLDER).glob(f"*/{RESULT}")]
    found = [one for one in read if one is not None]
    yield from sorted(found, key=lambda one: (one.finished_at or 0.0, one.evaluation_id))
