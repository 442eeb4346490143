"""Environments of the real Gymnasium: text in, text out, equal seeds in a group, truncated apart from terminated."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.played import check_exact, play, said, task_of

from penstock.agents.environments.adapters.gymnasium_text import GYMNASIUM
from penstock.agents.environments.over_http.wire import read_reply, write_reply
from penstock.agents.environments.play import Reply
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.errors import TaskRefused

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed; it is in the extra dev")

MOVES = ["left", "down", "right", "up"]


def lake(**more: Any) -> dict[str, Any]:
    make = {"desc": ["SF", "HG"], "is_slippery": False, "render_mode": "ansi", **more}
    return {"id": "FrozenLake-v1", "make": make, "observation": "render", "actions": MOVES, "rules": "Go to G."}


class Echo(gymnasium.Env):
    """Wants a word back; counts its steps; draws the word from its generator."""

    observation_space = gymnasium.spaces.Text(64, charset=string.printable)
    action_space = gymnasium.spaces.Text(8)
    failures: list[int] = []  # noqa: RUF012 - the test looks at it

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = str(self.np_random.integers(10**6))
        return f"say {self.word}", {}

    def render(self) -> Any:
        return [[0, 255], [255, 0]]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "fail" and not self.failures:
            self.failures.append(1)
            raise OSError("the world is gone")
        is_right = action == self.word
        return f"say {self.word}", 1.0 if is_right else -0.5, is_right, False, {"steps": 7, "is_right": is_right}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Any:
    gymnasium.register("Echo-v0", entry_point=Echo, max_episode_steps=3)
    yield
    del gymnasium.registry["Echo-v0"]


def test_a_lake_is_walked_over_token_for_token(model: Path) -> None:
    """The observations are what Gymnasium itself renders; each step's reward is its turn's."""
    script = ["right", "DOWN"]
    (episode,), engine = play(model, GYMNASIUM, script, options=lake())
    check_exact(episode, engine, model, script)
    world = gymnasium.make("FrozenLake-v1", desc=["SF", "HG"], is_slippery=False, render_mode="ansi")
    world.reset(seed=episode.seed)
    first = world.render()
    world.step(2)
    assert said(episode) == [
        ("user", f"Go to G.\n{first}"), ("assistant", "right"), ("user", world.render()), ("assistant", "DOWN"),
    ]  # fmt: skip
    assert (episode.status, [turn.reward for turn in episode.rows[0].turns]) == ("done", [0.0, 1.0])
    assert dict(episode.reward_parts) == {"terminated": 1.0, "truncated": 0.0}
    assert episode.environment_version == f"FrozenLake-v1, gymnasium {gymnasium.__version__}"


def test_a_time_limit_truncates(model: Path) -> None:
    """It is no end by the rules: the status says so; what was sampled is trained."""
    (episode,), _ = play(model, GYMNASIUM, ["left"] * 9, options=lake(max_episode_steps=2))
    assert (episode.status, len(episode.turns), episode.is_trainable) == ("truncated", 2, True)
    assert dict(episode.reward_parts) == {"terminated": 0.0, "truncated": 1.0}


def test_what_is_no_action_moves_nothing(model: Path) -> None:
    options = {**lake(), "action_pattern": "<a>(.*?)</a>", "format_penalty": -0.25}
    (episode,), _ = play(
        model, GYMNASIUM, ["right", "<a>jump</a>", "<a>right</a> <a>down</a>"], options=options, max_turns=3
    )
    shown = [content for role, content in said(episode) if role == "user"]
    assert shown[1] == f"The answer holds no action.\n{shown[0].removeprefix('Go to G.' + chr(10))}"
    assert shown[2].startswith("The answer is none of the actions left, down, right, up.\n")
    assert [turn.reward for turn in episode.rows[0].turns] == [-0.25, -0.25, 0.0]
    assert (dict(episode.reward_parts)["malformed"], dict(episode.reward_parts)["terminated"]) == (2.0, 1.0)  # the hole


def test_the_episodes_of_a_group_begin_alike(model: Path) -> None:
    """Another group begins otherwise; the environment's own numbers are kept."""
    options = {"id": "Echo-v0", "parts": ["steps", "is_right"], "instructions": "row"}
    found, _ = play(model, GYMNASIUM, ["x"] * 6, task_of("Read.", size=2), options=options)
    (other,), _ = play(model, GYMNASIUM, ["x"] * 3, task_of("Read.", group="r:0:2"), options=options)
    firsts = [said(one)[0] for one in (*found, other)]
    assert firsts[0] == firsts[1] != firsts[2]
    assert firsts[0][1].startswith("Read.\nsay ")
    assert {one.status for one in found} == {"truncated"}
    assert found[0].reward == -1.5
    assert dict(found[0].reward_parts) == {"steps": 7.0, "is_right": 0.0, "terminated": 0.0, "truncated": 1.0}


def test_an_environment_that_raises_is_begun_again_with_its_seed(model: Path) -> None:
    """It is no reward; a text that is no action of the space is the policy's fault instead."""
    Echo.failures.clear()
    (episode,), _ = play(model, GYMNASIUM, ["fail", "much too long", "é", "b"], options={"id": "Echo-v0"}, max_turns=3)
    assert (episode.attempt, episode.status) == (1, "truncated")
    assert [turn.reward for turn in episode.rows[0].turns] == [0.0, 0.0, -0.5]


@pytest.mark.parametrize(
    ("name", "script", "taken"),
    [
        ("CliffWalking-v1", ["0", "4", "1.0", "up"], [True, False, False, False]),
        (
            "Pendulum-v1",
            ["[0.5]", "[3]", "[0.5, 1]", "0.5", '["a"]', "[true]"],
            [True, False, False, False, False, False],
        ),
    ],
)
def test_numbers_are_actions(model: Path, name: str, script: list[str], taken: list[bool]) -> None:
    """A number of a discrete space, a list of numbers of another; observations that are no text are JSON."""
    (episode,), _ = play(
        model, GYMNASIUM, script, options={"id": name, "format_penalty": -1000.0}, max_turns=len(script)
    )
    assert [turn.reward > -1000.0 for turn in episode.rows[0].turns] == taken


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"id": "Nothing-v0"}, "gymnasium.make: NameNotFound"),
        (
            {"id": "CliffWalking-v1", "actions": ["up", "down"]},
            "options.actions has 2 names, and the actions of CliffWalking-v1 are Discrete(4)",
        ),
        ({"id": "CliffWalking-v1", "actions": ["up", "Up "]}, "expected different names"),
        ({"id": "FrozenLake-v1", "make": {"size": 3}}, "gymnasium.make: TypeError"),
        ({"id": "CliffWalking-v1", "action_pattern": "("}, "not a regular expression"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_first_task(
    model: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        play(model, GYMNASIUM, [], options=options)
    assert problem in str(caught.value)


def test_an_observation_that_is_a_picture_is_refused(model: Path) -> None:
    options = {"id": "Echo-v0", "observation": "render", "make": {"disable_env_checker": True}}
    found, _ = play(model, GYMNASIUM, [], options=options, attempts=1)
    assert isinstance(found, TaskRefused)
    assert 'render() returns a list, expected text; write make.render_mode = "ansi" if Echo-v0 has it' in str(found)


def test_truncated_goes_over_http() -> None:
    """As a field that is absent otherwise: older workers refuse what they do not know."""
    assert read_reply(write_reply(Reply(is_done=True, is_truncated=True))).is_truncated
    assert "truncated" not in write_reply(Reply(is_done=True)).model_dump(exclude_unset=True)
