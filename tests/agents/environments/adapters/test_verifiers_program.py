"""A taskset, a harness and a reward of the real verifiers, as a program against the proxy; ``make test-more NAME=environments`` installs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.played import check_exact, play, said, task_of

from penstock.agents.environments.adapters import verifiers_runner
from penstock.agents.environments.adapters.verifiers_program import VERIFIERS
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.errors import TaskRefused

FOLDER = Path(__file__).parent
PYTHON = os.environ.get("PENSTOCK_TEST_VERIFIERS_PYTHON", "")
needs_verifiers = pytest.mark.skipif(
    not PYTHON, reason="make test-more NAME=environments sets PENSTOCK_TEST_VERIFIERS_PYTHON"
)


def run(model: Path, script: list[str], task: Any, **settings: Any) -> Any:
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"  # uv prepares the harness
    options = {"python": PYTHON, "folder": str(FOLDER), "config": {"taskset": {"id": "reverse_text"}, "agent": agent}}
    options |= {"variables": {"PATH": path}, "pass_variables": ["SSL_CERT_FILE"]}
    return play(model, VERIFIERS, script, task, options=options, episode_deadline_s=300, **settings)


@needs_verifiers
def test_a_harness_is_recorded_as_it_was_sampled(tool_model: Path) -> None:
    """The row chooses the task; the reward is that of verifiers, with its name as a part."""
    (episode,), engine = run(tool_model, ["noom"], task_of(extra_info='{"task": 1}'))
    check_exact(episode, engine, tool_model, ["noom"])
    assert ("user", "Reverse moon.") in said(episode)
    assert (episode.status, episode.reward, dict(episode.reward_parts)["is_reversed"]) == ("done", 1.0, 1.0)
    (episode,), _ = run(tool_model, ["moon"], task_of(extra_info='{"task": 1}'))
    assert episode.reward == 0.0


@needs_verifiers
def test_an_error_of_verifiers_is_no_reward(tool_model: Path) -> None:
    refused, _ = run(tool_model, ["break"], task_of(), attempts=1)
    assert isinstance(refused, TaskRefused)
    assert "the judge is gone" in str(refused)


class Tasks(list[str]):
    bounded = True


class Endless(Tasks):
    bounded = False


def test_the_row_or_the_seed_chooses_the_task() -> None:
    def chosen(tasks: Tasks, seed: int = 0, **extra_info: Any) -> str:
        return str(verifiers_runner.chosen(tasks, {"extra_info": extra_info, "seed": seed}))

    assert [chosen(Tasks("ab"), 7), chosen(Tasks("ab"), 7, task=0), chosen(Endless("abc"), task=2)] == ["b", "a", "c"]
    ab = Tasks("ab")
    for tasks, number in ((ab, 2), (ab, -1), (ab, "0"), (Endless("ab"), None), (Tasks(), None)):
        with pytest.raises(LookupError, match="task"):
            chosen(tasks, **({} if number is None else {"task": number}))


def test_an_interpreter_without_verifiers_is_named(tool_model: Path) -> None:
    options = {"python": sys.executable, "config": {"taskset": {"id": "reverse_text"}}}
    refused, _ = play(tool_model, VERIFIERS, [], options=options, attempts=1)
    assert "No module named 'verifiers'" in str(refused)


def test_the_runner_imports_nothing_of_penstock() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print(sorted(one for one in sys.modules if one.startswith('penstock')))"
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, verifiers_runner.__file__], capture_output=True, text=True, check=True
    )
    assert json.loads(ran.stdout) == []


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="python: Field required"):
        VERIFIERS.defined("mine", EnvironmentDefinition(type="verifiers", options={"config": {}}))
