"""A class of TRL's `environment_factory`, unchanged: its tools, errors and rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.rollout_service.environments.adapters.played import check_exact, play, said, task_of

from penstock.protocol.errors import ConfigError
from penstock.rollout_service.environments.adapters.trl_class import TRL

FOLDER = Path(__file__).parent
COUNTER = {"factory": f"{FOLDER / 'counter.py'}:Counter"}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


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
    """Each episode has an instance of its own: all of them count from 0."""
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
        (f"{__file__}:NoHints", "the method tool is no tool"),
    ],
)
def test_what_is_no_such_class_is_refused(tool_model: Path, factory: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        play(tool_model, TRL, [], options={"factory": factory})
    assert problem in str(caught.value)
