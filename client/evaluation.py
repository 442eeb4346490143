"""An evaluation on this machine: the process of `penstock eval`, and the result that it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.client import data_files, run_settings
from penstock.client.data_files import Data
from penstock.client.processes import LocalProcess
from penstock.console import launch
from penstock.console.evaluation_results import EvaluationResult
from penstock.protocol.errors import ConfigError

FOLDER = "client-evaluations"  # in the folder of runs: rows of calls, and the log
_MAX_RESULT_BYTES = 1 << 20
_INCOMPLETE = 3  # exit code of `penstock eval` when prompts failed


def evaluate(
    target: str, data: Data, runs: Path, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> EvaluationResult:
    folder = runs / FOLDER
    stored = data_files.stored(data, folder, "rows")
    words = arguments(target, [stored] if isinstance(stored, str) else stored, runs, options, settings)
    command = launch.module("penstock", "eval", *words)
    process = LocalProcess(f"evaluation of {target}", command, folder / "client.log")
    try:
        process.wait(None)
    finally:
        process.stop()
    result = _result(process.output(_MAX_RESULT_BYTES))
    if result is None or process.code not in (0, _INCOMPLETE):
        raise process.failure(f"the evaluation of {target}")
    return result


def arguments(
    target: str, files: Sequence[str], runs: Path, options: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[str]:
    """Return the arguments of `penstock eval`; raises ConfigError for a reward that it cannot take."""
    set_options = {name: value for name, value in options.items() if value is not None}
    reward = set_options.pop("reward", None)
    if callable(reward):
        raise ConfigError(
            "reward: evaluate takes the name of a reward or a Python file; write the function into a file, and pass its path"
        )
    if reward is not None:
        is_file = str(reward).endswith(".py")
        set_options["serve" if is_file else "reward"] = Path(reward).absolute() if is_file else reward
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in set_options.items()]
    overrides = run_settings.overrides(run_settings.flat(settings))
    return [target, *(f"--data={file}" for file in files), *flags, "--json", f"run.dir={runs}", *overrides]


def _result(lines: Sequence[str]) -> EvaluationResult | None:
    for line in reversed(lines):
        try:
            return EvaluationResult.model_validate_json(line)
        except ValidationError:
            continue
    return None
