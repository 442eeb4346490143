"""A class of TRL's `environment_factory`, unchanged: its tools, errors, rewards; and that the real TRL trains with the same class."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.agents.environments.played import call, check_exact, play, said, task_of

from penstock.agents.environments.adapters.trl_class import TRL
from penstock.protocol.errors import ConfigError

FOLDER = Path(__file__).parent
COUNTER = {"factory": f"{FOLDER / 'counter.py'}:Counter"}
PYTHON = os.environ.get("PENSTOCK_TEST_TRL_PYTHON", "")


def test_a_class_is_played(tool_model: Path) -> None:
    """Plain and asynchronous tools, one that raises, one that there is not; the text of reset stands behind the prompt."""
    script = [
        call("increment", step=4) + "\n" + call("peek"),
        call("increment", step=-1) + "\n" + call("get_reward"),
        "done",
    ]
    (episode,), engine = play(tool_model, TRL, script, task_of("Count.", extra_info='{"goal": 4}'), options=COUNTER)
    check_exact(episode, engine, tool_model, script)
    assert [content for role, content in said(episode) if role != "assistant"] == [
        "Count. The goal is 4.", "4", "it shows 4", "{'error': 'step is negative'}", "{'error': 'Tool get_reward not found.'}",
    ]  # fmt: skip
    assert (episode.status, [turn.reward for turn in episode.rows[0].turns]) == ("done", [0.0, 0.0, 1.0])
    assert dict(episode.reward_parts) == {"tool_calls": 4.0, "tool_errors": 2.0}


def test_an_episode_without_turns_left_has_its_reward_too(tool_model: Path) -> None:
    found, _ = play(tool_model, TRL, [call("increment", step=3)] * 2, task_of(size=2), options=COUNTER, max_turns=1)
    assert [(one.status, one.reward) for one in found] == [("truncated", 1.0)] * 2


class NoReset:
    """Not one."""


class NoHints:
    def reset(self) -> None:
        """Do nothing."""

    def tool(self, a):
        """Do nothing."""


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("nothing", "expected module:attribute or file.py:attribute"),
        (f"{FOLDER / 'counter.py'}:Other", "has no attribute 'Other'"),
        (f"{__file__}:COUNTER", "is a dict, which makes no instance"),
        (f"{__file__}:NoReset", "NoReset has no method reset"),
        (f"{__file__}:NoHints", "the method tool is not a tool"),
    ],
)
def test_what_is_no_such_class_is_refused(tool_model: Path, factory: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        play(tool_model, TRL, [], options={"factory": factory})
    assert problem in str(caught.value)


@pytest.mark.skipif(not PYTHON, reason="make test-more NAME=environments sets PENSTOCK_TEST_TRL_PYTHON")
def test_trl_trains_with_the_same_class(tool_model: Path) -> None:
    words = [PYTHON, str(FOLDER / "trl_trains.py"), str(tool_model)]
    ran = subprocess.run(
        words, capture_output=True, text=True, timeout=200, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    said_by_trl = json.loads(ran.stdout.strip().splitlines()[-1])
    assert set(said_by_trl["resets"]) == {4}
    assert set(said_by_trl["rewards"]) == {0.25}
    (_,), engine = play(tool_model, TRL, ["done"], options=COUNTER)
    prompt = engine.tokenizer.decode(engine.prompts[0])
    for tool in said_by_trl["tools"]:
        assert json.dumps(tool) in prompt
    assert len(said_by_trl["tools"]) == 2
