"""A small run of the quickstart's task: its data, its random model and its run file; then its steps, audit and replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.deploy import quickstart_task
from penstock.deploy.processes.child import DeployError
from penstock.forensics.audit.audit_checks import AuditResult
from penstock.protocol.config.run_file import toml_text
from tests import forked

PENSTOCK = (sys.executable, "-P", "-m", "penstock")
_TOOL_S = 3600.0


def write_small_run(
    folder: Path,
    run_id: str,
    *,
    seed: int = 0,
    num_train: int = 200,
    num_eval: int = 8,
    write_data: Callable[..., None] = quickstart_task.write_data,
    **sections: Mapping[str, Any],
) -> Path:
    """Write data, model and run file into a folder, below which the run is, and return the run file.

    What ``sections`` do not set: batches of four groups of four, scored by exact match, and no evaluation.
    """
    write_data(folder / "data", seed=seed, num_sft=1, num_train=num_train, num_eval=num_eval)
    quickstart_task.write_model(folder / "model", seed=seed)
    files = {name: str(folder / "data" / f"{name}.jsonl") for name in ("train", "eval")}
    defaults: dict[str, Mapping[str, Any]] = {
        "run": {"seed": seed},
        "data": {**files, "max_prompt_tokens": 32},
        "rollout": {
            "groups_per_step": 4,
            "max_staleness": 2,
            "group_size": 4,
            "max_new_tokens": quickstart_task.MAX_NEW_TOKENS,
        },
        "reward": {"name": "exact_match"},
        "eval": {"every": 0},
    }
    names = dict.fromkeys((*defaults, *sections))
    return write_run_file(folder, run_id, **{n: {**defaults.get(n, {}), **sections.get(n, {})} for n in names})


def write_run_file(folder: Path, run_id: str, **sections: Mapping[str, Any]) -> Path:
    """Write the run file of a folder with the model ``model``, below which the run is; return it."""
    settings: dict[str, Mapping[str, Any]] = {
        "run": {"id": run_id, "dir": str(folder / "runs")},
        "model": {"path": str(folder / "model")},
        "trainer": {"lr": 1e-4},
    }
    settings |= {name: {**settings.get(name, {}), **section} for name, section in sections.items()}
    file = folder / "run.toml"
    file.write_text("".join(f"{name} = {toml_text(section)}\n" for name, section in settings.items()))
    return file


def train_local(run_file: Path, *words: str) -> dict[str, Any]:
    """Train a run to its end with all services here, one of them a worker; return the summary of the command."""
    with forked.children():
        done = subprocess.run(
            [*PENSTOCK, "train", str(run_file), "--local", "--workers", "1", "--json", *words],
            cwd=run_file.parent, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def steps_of(runs: Path, run_id: str) -> list[int]:
    """Return the steps in the metrics of a run, in their order; a line that is being written does not count."""
    file = runs / run_id / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
    return [row["step"] for row in map(json.loads, whole.splitlines()) if row["kind"] == "step"]


def report_of(verb: str, run_id: str, runs: Path, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a verb about a run, such as audit or replay, prints as JSON, and its ``exit_code``; raises DeployError without any."""
    done = subprocess.run(
        [*PENSTOCK, verb, run_id, f"run.dir={runs}", "--json"],
        capture_output=True, text=True, timeout=_TOOL_S, check=False, env={**(environ or os.environ), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if not done.stdout.strip():
        raise DeployError(f"penstock {verb} ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "exit_code": done.returncode}


def check_run(runs: Path, run_id: str, *, num_steps: int, num_groups: int) -> list[dict[str, Any]]:
    """Check that a run made its steps of so many groups, that its audit closes and its replay holds; return its steps."""
    lines = (runs / run_id / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["kind"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1))
    totals = json.loads((runs / run_id / "trainer.json").read_text())
    assert totals["groups"]["trained"] == num_groups
    assert report_of("audit", run_id, runs)["exit_code"] == 0
    replay = report_of("replay", run_id, runs)
    assert (replay["difference"], replay["findings"], replay["num_steps"]) == (None, [], num_steps)
    return steps


def audit_failures(audit: AuditResult, trained: int) -> list[str]:
    """Return what does not hold: each breach, an account that does not close, another number of trained groups."""
    failures = [f"{breach.kind}: {breach.group_id} {breach.detail}" for breach in audit.breaches]
    if not audit.closes:
        failures.append("the audit does not close")
    if (used := audit.splits[0].used) != trained:
        failures.append(f"{used} groups trained, expected {trained}")
    return failures


def replay_failures(replay: Mapping[str, Any]) -> list[str]:
    return [] if replay["holds"] else [f"the replay differs: {replay.get('difference')}, {replay.get('findings')}"]
