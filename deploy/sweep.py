"""`penstock sweep run.toml --vary KEY=V1,V2`: one run for each combination of values, one after another, and which was best.

With ``--halving`` all runs pause after the first steps, the better half goes on for twice as many, and so on: successive halving
(Jamieson and Talwalkar, arXiv 1502.07943). Nothing is stored but the runs: what has to be done next follows from their folders and from
the command, so the same command continues an interrupted sweep.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.console import launch
from penstock.console.cli.options import SweepOptions
from penstock.console.report import curves
from penstock.console.report.learning import recent_reward
from penstock.console.tools import runs
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.errors import ConfigError
from penstock.protocol.record import run_folder
from penstock.protocol.subjects import check_run_id, similar_run_id
from penstock.trainer.settings import GivenAnswersSettings, TrainerSettings

_PENSTOCK = "penstock.console.cli.main"
_POLL_S = 0.5
_STOPPED = (130, 143, -2, -15)
_MOST_RUNS = 1000
_MOST_STEPS = 2**31  # where epochs say how many


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination of values, trained as the run ``folder.name``."""

    values: tuple[tuple[str, str], ...]  # key, value as TOML
    folder: Path

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in (("run.id", self.folder.name), *self.values)]


@dataclass(frozen=True, slots=True)
class Score:
    """How good a run is after a number of steps."""

    measure: str
    value: float | None  # None: nothing was measured, or the run failed
    step: int

    @property
    def rank(self) -> tuple[bool, float]:
        """Sorts the best run first; those without a value are last."""
        if self.value is None:
            return True, 0.0
        return False, self.value if self.measure.endswith("loss") else -self.value


def sweep(arguments: Sequence[str], options: SweepOptions, *, as_json: bool) -> int:
    """Train every combination; returns 0, 1 when a run failed, 130 when it was stopped. Raises ConfigError before anything starts."""
    files, overrides = split_arguments(arguments)
    everyone, steps = combinations(files, overrides, options)
    if options.only_print:
        print("\n".join(shlex.join(["penstock", *_typed(one, arguments, options)]) for one in everyone))
        return 0
    candidates, failed = everyone, set[Candidate]()
    with run_folder.hold_lock(everyone[0].folder, run_folder.SWEEP_LOCK):  # `runs clean` keeps the runs of its name
        for limit, number in rounds(steps, len(candidates), options.halving):
            left = [one for one in candidates if one not in failed]
            candidates = best_first(left, options.command)[:number]
            for place, one in enumerate(candidates):
                until = "its end" if limit is None else f"step {limit}"
                values = " ".join(f"{key}={value}" for key, value in one.values)
                print(
                    f"penstock sweep: {one.folder.name} to {until}, {place + 1} of {len(candidates)}: {values}",
                    file=sys.stderr,
                )
                code = _train(one, arguments, options, limit)
                if code in _STOPPED:
                    print("penstock sweep: stopped; the same command continues it", file=sys.stderr)
                    return 130
                if code:
                    failed.add(one)
    _report(best_first(everyone, options.command), options.command, as_json=as_json)
    return 1 if failed else 0


def combinations(files: Sequence[Path], overrides: Sequence[str], options: SweepOptions) -> tuple[list[Candidate], int]:
    """Return the runs, and the steps of each; all their settings are checked. Raises ConfigError."""
    ranges = [_varied(text) for text in options.vary]
    if len({key for key, _ in ranges}) < len(ranges):
        raise ConfigError("--vary: a key is given twice; give all its values at once: --vary KEY=V1,V2")
    lists = {key: values for key, values in ranges if isinstance(values, list)}
    spans = [key for key, _ in ranges if key not in lists]
    if options.random is not None:
        rng = random.Random(options.seed)  # noqa: S311  not for secrets
        drawn = [tuple(_draw(rng, values) for _, values in ranges) for _ in range(options.random)]
    elif spans:
        raise ConfigError(
            f"--vary {spans[0]}: LOW..HIGH is drawn from; add --random N, or list the values: {spans[0]}=V1,V2"
        )
    else:
        drawn = list(itertools.product(*lists.values()))
    keys = [key for key, _ in ranges]
    chosen = [tuple(zip(keys, values, strict=True)) for values in dict.fromkeys(drawn)]
    if len(chosen) > _MOST_RUNS:
        raise ConfigError(f"--vary: {len(chosen)} combinations, at most {_MOST_RUNS}; give fewer values, or --random N")
    kind: type[TrainerSettings] = TrainerSettings if options.command == "train" else GivenAnswersSettings
    found: list[Candidate] = []
    steps = 0
    for values in chosen:
        given = [*overrides, *(f"{key}={value}" for key, value in values)]
        settings = load(kind, files=files, overrides=given).settings
        run_id = check_run_id("-".join([settings.run.id, *(_short(key, value) for key, value in values)]))
        found.append(Candidate(values, settings.run.dir / run_id))
        section: Any = settings.trainer if options.command == "train" else getattr(settings, options.command)
        steps = max(steps, section.steps if section.epochs is None else _MOST_STEPS)
    if len({one.folder for one in found}) < len(found):
        raise ConfigError(
            "--vary: two combinations would be one run, as their values differ in signs only; write them differently"
        )
    return found, steps


def _varied(text: str) -> tuple[str, list[str] | tuple[float, float]]:
    key, _, values = text.partition("=")
    low, dots, high = values.partition("..")
    with contextlib.suppress(ValueError):
        if dots and float(low) < float(high):
            return key, (float(low), float(high))
    if not key or not values or dots:
        raise ConfigError(
            f"--vary {text}: expected KEY=V1,V2 or, with --random, KEY=LOW..HIGH, such as trainer.lr=1e-6..1e-5"
        )
    return key, values.split(",")


def _draw(rng: random.Random, values: list[str] | tuple[float, float]) -> str:
    """Return one of the values, or a number of a range: of one above 0, whose ends are far apart, by its logarithm."""
    if isinstance(values, list):
        return rng.choice(values)
    low, high = values
    drawn = math.exp(rng.uniform(math.log(low), math.log(high))) if 0 < 5 * low < high else rng.uniform(low, high)
    return f"{drawn:.2g}"


def _short(key: str, value: str) -> str:
    return similar_run_id(f"{key.rpartition('.')[2].replace('_', '-')}-{value.replace('.', 'p')}")


def rounds(steps: int, num_runs: int, halving: int | None) -> Iterator[tuple[int | None, int]]:
    """Yield for each round the step at which its runs pause, None for their end, and how many runs take part."""
    limit = halving
    while limit is not None and limit < steps and num_runs > 1:
        yield limit, num_runs
        limit, num_runs = 2 * limit, math.ceil(num_runs / 2)
    yield None, num_runs


def score(folder: Path, command: str, at: int | None = None) -> Score:
    """Return the held-out result of a run, or else its training's, up to the step ``at``."""
    last = at if at is not None else sys.maxsize
    if command != "train":
        rows = [
            row for row in curves.training_rows(curves.training_folder(folder, command)) if row.get("step", 0) <= last
        ]
        names = ("eval_loss", "loss")
        found = (
            (name, row[name], row["step"]) for name in names for row in reversed(rows) if row.get(name) is not None
        )
        return Score(*next(found, ("loss", None, 0)))
    read = curves.read(folder)
    for name, points in (("accuracy", read.accuracies), ("eval reward", read.eval_rewards)):
        if before := [point for point in points if point[0] <= last]:
            return Score(name, before[-1][1], before[-1][0])
    before = [point for point in read.rewards if point[0] <= last]
    return Score("reward", recent_reward([value for _, value in before]), before[-1][0] if before else 0)


def best_first(candidates: Sequence[Candidate], command: str) -> list[Candidate]:
    """Sort runs by their scores at the last step that all of them have been measured at, where they have been trained."""
    last = min((_step_of(one.folder) for one in candidates), default=0)
    return sorted(candidates, key=lambda one: score(one.folder, command, last or None).rank)


def _step_of(folder: Path) -> int:
    return runs.describe(folder).step or 0 if folder.is_dir() else 0


def _typed(one: Candidate, arguments: Sequence[str], options: SweepOptions) -> list[str]:
    words = [options.command, *arguments, *one.overrides]
    if options.command == "train":
        words += ["--local", *([] if options.workers is None else [f"--workers={options.workers}"])]
        words += [f"--serve={file}" for file in options.serve]
    return words


def _train(one: Candidate, arguments: Sequence[str], options: SweepOptions, limit: int | None) -> int:
    """Train a run until ``limit``, or to its end; returns the exit code of its process, 0 where nothing was left to do."""
    if one.folder.is_dir() and (runs.is_finished(one.folder) or (limit is not None and _step_of(one.folder) >= limit)):
        return 0
    words = _typed(one, arguments, options)
    child = subprocess.Popen(
        launch.module(_PENSTOCK, *words, *(["--json"] if options.command == "train" else [])), stdout=subprocess.DEVNULL
    )
    try:
        while child.poll() is None:
            time.sleep(_POLL_S)
            if limit is not None and _step_of(one.folder) >= limit and not run_folder.is_pause_requested(one.folder):
                run_folder.request_pause(one.folder)
    except BaseException:
        child.terminate()
        raise
    finally:
        child.wait()
    return child.returncode


def _report(candidates: Sequence[Candidate], command: str, *, as_json: bool) -> None:
    lines: list[Mapping[str, Any]] = []
    for one in candidates:
        state = runs.describe(one.folder).state if one.folder.is_dir() else "not started"
        found = score(one.folder, command)
        lines.append(
            {
                "run": one.folder.name,
                "values": dict(one.values),
                "state": state,
                "step": _step_of(one.folder),
                "measure": found.measure,
                "value": found.value,
            }
        )
    if as_json:
        print(json.dumps(lines))
        return
    width = max(len(line["run"]) for line in lines)
    for line in lines:
        value = "–" if line["value"] is None else f"{line['value']:.4g}"
        print(f"{line['run']:{width}}  {line['state']:9} step {line['step']:<6} {line['measure']} {value}")
    print(f"best: {lines[0]['run']}; compare them: {launch.page_command(candidates[0].folder.parent)}", file=sys.stderr)
