"""Environments of the real GEM, played by `penstock env serve` of an interpreter that has it; ``make test-more NAME=environments`` installs it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.played import check_exact, play, said, task_of

from penstock.agents.environments.adapters.gem_text import GEM
from penstock.agents.environments.over_http.http_environment import HTTP
from penstock.protocol.errors import ConfigError

PYTHON = os.environ.get("PENSTOCK_TEST_GEM_PYTHON", "")
needs_gem = pytest.mark.skipif(not PYTHON, reason="make test-more NAME=environments sets PENSTOCK_TEST_GEM_PYTHON")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """GEM's environments at a URL."""
    server = subprocess.Popen([PYTHON, "-m", "penstock", "env", "serve", "gem"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    said_first = server.stdout.readline()
    found = re.search(r"http://\S+?(?=\. )", said_first)
    assert found is not None, said_first
    yield found[0]
    server.terminate()
    server.wait(90)
    server.stdout.close()


def options(url: str, name: str, **more: Any) -> dict[str, Any]:
    return {"url": url, "options": {"id": name, **more}}


@needs_gem
def test_a_game_is_played_with_the_groups_seed(model: Path, url: str) -> None:
    """Episodes that are played at once draw from generators of their own: the same number is found in all, and again."""
    guesses = ["\\boxed{12}"] * 12  # equal: which episode gets which answer is not certain
    task, drawn = task_of(size=4), options(url, "game:GuessTheNumber-v0-random")
    ends = []
    for _ in range(2):
        found, _ = play(model, HTTP, guesses, task, options=drawn, max_turns=3)
        ends.append({(tuple(said(one)), one.reward, one.status) for one in found})
    assert ends[0] == ends[1]
    assert len(ends[0]) == 1
    other, _ = play(model, HTTP, guesses, task_of(group="r:0:2"), options=drawn, max_turns=3)
    assert said(other[0]) not in [list(one[0]) for one in ends[0]]


@needs_gem
def test_a_number_is_guessed(model: Path, url: str) -> None:
    """The environment reads the action itself; a reply holds its suffix; a wrong form ends the episode with its penalty."""
    game = options(url, "game:GuessTheNumber-v0-easy", make={"max_number": 2})
    script = ["\\boxed{1}", "\\boxed{2}"]
    (episode,), engine = play(model, HTTP, script, options=game)
    turns = len(episode.turns)
    check_exact(episode, engine, model, script[:turns])
    assert (episode.status, [turn.reward for turn in episode.rows[0].turns]) == ("done", [0.0, 1.0][-turns:])
    assert "You are playing Guess The Number." in said(episode)[0][1]
    assert said(episode)[0][1].endswith("Enter your next guess.")
    assert episode.environment_version.startswith("game:GuessTheNumber-v0-easy, gem-llm ")
    (episode,), _ = play(model, HTTP, ["one"], options=game)
    assert (episode.status, episode.reward) == ("done", -0.1)


def test_the_library_is_named_where_it_is_missing(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment mine: gem is not installed .*pip install gem-llm"):
        play(model, GEM, [], options={"id": "game:GuessTheNumber-v0-easy"})
