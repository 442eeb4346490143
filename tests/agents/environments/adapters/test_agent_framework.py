"""An agent of the framework openai-agents, unchanged, against the proxy: the example of docs/agents.md with the real package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.played import call, check_exact, play, said, task_of
from tests.servers import needs

from penstock.agents.environments.program import PROGRAM

pytestmark = needs("agents", extra="dev")

AGENT = Path(__file__).parents[4] / "examples" / "dictionary_agent.py"


def run(model: Path, script: list[str]) -> Any:
    options = {"command": [sys.executable, str(AGENT)], "variables": {"OPENAI_AGENTS_DISABLE_TRACING": "1"}}
    return play(model, PROGRAM, script, task_of("what is sun", ground_truth='"star"'), options=options)


def test_an_agent_of_a_framework_is_recorded_as_it_was_sampled(tool_model: Path) -> None:
    """Its call of a tool and its answer are two turns of one row, each under the tokens that the engine was given."""
    script = [call("look_up", word="sun"), "star"]
    (episode,), engine = run(tool_model, script)
    check_exact(episode, engine, tool_model, script)
    assert said(episode)[-2:] == [("tool", "star"), ("assistant", "star")]
    assert ("system", "Look the word up, then say what it is.") in said(episode)
    assert (episode.status, [turn.reward for turn in episode.rows[0].turns]) == ("done", [0.0, 1.0])
    assert "Look a word up in the dictionary." in engine.tokenizer.decode(engine.prompts[0])


@pytest.mark.skipif(
    "PENSTOCK_TEST_ENVIRONMENTS" not in os.environ, reason="make test-more NAME=environments: three CPU seconds"
)
def test_what_the_framework_refuses_is_the_policys_reward(tool_model: Path) -> None:
    """A tool that there is not: the program ends with a result, and no attempt is repeated."""
    (episode,), _ = run(tool_model, [call("look_down")])
    assert (episode.status, episode.reward, episode.attempt, len(episode.turns)) == ("done", 0.0, 0, 1)
