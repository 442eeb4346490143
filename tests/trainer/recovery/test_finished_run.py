"""A run that has ended by itself is recognised, and only that one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.config.connection import RunSettings
from penstock.trainer.data_settings import EvalSettings
from penstock.trainer.recovery import resume_checks
from penstock.trainer.settings import DataSettings, ModelSettings, OptimizerSettings, TrainerSettings

COMPLETE = {"run_id": "r", "complete": True, "steps": 20}


def notice(folder: Path, document: Any, *, steps: int = 20, resume: bool = True, early_stop: int = 0) -> str | None:
    settings = TrainerSettings(
        data=DataSettings(eval=[folder / "eval.jsonl"]),
        eval=EvalSettings(every=1, early_stop=early_stop),
        run=RunSettings(id="r", dir=folder),
        model=ModelSettings(path=folder),
        trainer=OptimizerSettings(steps=steps, resume=resume),
    )
    (folder / "r").mkdir(exist_ok=True)
    if document is not None:
        (folder / "r" / "trainer.json").write_text(document if isinstance(document, str) else json.dumps(document))
    return resume_checks.finished_notice(settings)


def test_a_finished_run_says_so_and_what_to_do(tmp_path: Path):
    """The notice names the run, its report, and how to continue or begin anew."""
    text = notice(tmp_path, COMPLETE)
    assert text is not None
    assert text.startswith("run r is finished: 20 of 20 steps")
    assert "Nothing was started or changed" in text
    assert "raise trainer.steps above 20" in text
    assert "run.id=r-2" in text


@pytest.mark.parametrize(
    "document",
    [None, "", "[1]", {**COMPLETE, "complete": False}, {"run_id": "r", "finished": True, "steps": 20}, {**COMPLETE, "steps": 19},
     {**COMPLETE, "run_id": "other"}, {**COMPLETE, "steps": None}],
)  # fmt: skip
def test_a_run_that_has_something_to_do_is_started(tmp_path: Path, document: Any):
    """Steps, the export or an evaluation may be left: such a run, or one of an older build, starts."""
    assert notice(tmp_path, document) is None


def test_a_run_that_ended_early_is_finished_while_it_may_end_early(tmp_path: Path):
    """With the reason, and how to get the best version; without eval.early_stop it trains the remaining steps."""
    document = {**COMPLETE, "steps": 8, "early_stop": {"text": "ended early: no gain"}}
    text = notice(tmp_path, document, early_stop=2)
    assert text is not None
    assert text.startswith("run r is finished after 8 of 20 steps, it ended early: no gain. Its model is in ")
    assert "penstock weights export r --best" in text
    assert notice(tmp_path, document) is None


def test_more_steps_or_no_resume_start_it(tmp_path: Path):
    """With more steps the run continues; with trainer.resume = false its refusal comes from the trainer."""
    assert notice(tmp_path, COMPLETE, steps=21) is None
    assert notice(tmp_path, COMPLETE, resume=False) is None


@pytest.mark.parametrize("command", ["penstock.trainer", "penstock.deploy.train"])
def test_starting_a_finished_run_changes_nothing(tmp_path: Path, command: str):
    """Both commands say so within a second, start no process, need no server, and exit with 0; the folder stays as it was."""
    notice(tmp_path, COMPLETE)
    report = tmp_path / "r" / "report.json"
    report.write_text('{"run_id": "r", "steps": 20, "tokens_generated": 7}')
    (tmp_path / "run.toml").write_text(
        f'[run]\nid = "r"\ndir = "{tmp_path}"\n[model]\npath = "{tmp_path}"\n[trainer]\nsteps = 20\n'
    )
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*")}
    words = [command, "train"] if command == "penstock.trainer" else [command, "--local", "--json"]
    answer = subprocess.run(
        [sys.executable, "-P", "-m", *words, str(tmp_path / "run.toml")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "run r is finished: 20 of 20 steps" in answer.stderr
    assert {path: path.read_bytes() for path in (tmp_path / "r").rglob("*")} == before
    if "--json" in words:
        assert json.loads(answer.stdout)["tokens_generated"] == 7
