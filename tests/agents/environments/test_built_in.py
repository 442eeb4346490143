"""The rules of the built-in games: equal by seed, solvable, and every answer has a reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.agents.environments.games.actions import Place
from penstock.agents.environments.games.arithmetic import evaluate
from penstock.agents.environments.games.calculator import CALCULATOR, draw_expression
from penstock.agents.environments.games.frozen_lake import FROZEN_LAKE, draw_lake, shortest_path
from penstock.agents.environments.games.guess_number import GUESS_NUMBER
from penstock.agents.environments.games.sokoban import SOKOBAN, Level, SokobanOptions, SokobanPlay, draw_level
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import Message, ToolCall
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.environments.environment import load_environments

ROW = Row((Message("system", "Be brief."), Message("user", "play")), None, {}, "")


def new(environment: TurnEnvironment, seed: int = 0, **options: Any) -> Any:
    """Return a play with options that are checked as those of the run file are."""
    return environment.play(seed, ROW, environment.options.model_validate(options))


def answer(play: Play, text: str) -> Reply:
    reply = play.step(Message("assistant", text))
    assert isinstance(reply, Reply)
    return reply


GAMES = pytest.mark.parametrize(
    "environment", [CALCULATOR, FROZEN_LAKE, GUESS_NUMBER, SOKOBAN], ids=lambda one: one.name
)


@GAMES
def test_a_seed_is_a_world(environment: TurnEnvironment) -> None:
    """Two plays of a seed begin and reply alike; other seeds give other worlds."""
    first, second = new(environment, 7), new(environment, 7)
    assert first.start() == second.start()
    for text in ("down", "right", "50", "nonsense"):
        assert answer(first, text) == answer(second, text)
    made = [new(environment, seed) for seed in range(8)]
    worlds = [(tuple(one.start()), answer(one, "50").messages) for one in made]
    assert len(set(worlds)) > 1


@GAMES
def test_a_malformed_answer_costs_its_penalty(environment: TurnEnvironment) -> None:
    """The action is what the pattern finds; without one the turn costs format_penalty and counts as malformed."""
    play = new(environment, action_pattern="<answer>(.*?)</answer>", format_penalty=-0.25)
    reply = answer(play, "left")
    assert (reply.reward, reply.parts["malformed"], reply.parts["success"]) == (-0.25, 1.0, 0.0)
    taken = answer(new(environment, action_pattern="<answer>(.*?)</answer>"), "<answer>x</answer> <answer> 3 </answer>")
    moved = answer(new(environment, action_pattern="<answer>(.*?)</answer>"), "well, <answer> UP </answer>.")
    assert ("malformed" in taken.parts) == (environment in (FROZEN_LAKE, SOKOBAN))
    assert ("malformed" in moved.parts) == (environment in (CALCULATOR, GUESS_NUMBER))


@GAMES
def test_the_rows_prompt_can_be_the_instructions(environment: TurnEnvironment) -> None:
    """A system message stays; the rules, or the row's last message, stand before the state."""
    system, rules = new(environment).start()
    _, own = new(environment, instructions="row").start()
    assert (system, own.content.split("\n")[0]) == (ROW.messages[0], "play")
    assert "play" not in rules.content
    assert rules.content.split("\n")[1:] == own.content.split("\n")[1:]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"action_pattern": "("}, "not a regular"), ({"action_pattern": "a"}, "one group"), ({"sizes": 3}, "sizes")],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    definition = EnvironmentDefinition.model_validate({"type": "frozen_lake", "options": options})
    with pytest.raises(ConfigError, match=rf"environment\.define\.lake\.options: .*{message}"):
        load_environments((), {"lake": definition})


def test_every_lake_can_be_crossed() -> None:
    """A shortest path ends at the goal with 1; a hole ends the walk with 0; an edge stops it."""
    for seed in range(100):
        holes = draw_lake(seed, 4, 0.4)
        path = shortest_path(holes, 4)
        assert path is not None
        assert len(path) >= 6
        play = new(FROZEN_LAKE, seed, hole_chance=0.4)
        replies = [answer(play, move if seed % 2 else move[0].upper()) for move in path]
        assert [(reply.reward, reply.is_done) for reply in replies] == [(0.0, False)] * (len(path) - 1) + [(1.0, True)]
    seed = next(seed for seed in range(100) if Place(0, 1) in draw_lake(seed, 4, 0.4))
    play = new(FROZEN_LAKE, seed, hole_chance=0.4)
    assert play.lake()[0] == "P"
    assert play.lake()[-1] == "G"
    assert answer(play, "up").state == play.lake()
    assert play.lake()[0] == "P"
    fallen = answer(play, "right")
    assert (fallen.reward, fallen.is_done, dict(fallen.parts)) == (0.0, True, {"success": 0.0, "fell": 1.0})


def test_slippery_ice_moves_to_either_side_but_never_back() -> None:
    ends: dict[str, int] = {}
    for seed in range(300):
        play = new(FROZEN_LAKE, seed, hole_chance=0, is_slippery=True, size=3)
        answer(play, "down")
        ends[play.lake()] = ends.get(play.lake(), 0) + 1
    down, right, stayed = (ends[lake] for lake in ("___\nP__\n__G", "_P_\n___\n__G", "P__\n___\n__G"))
    assert down + right + stayed == 300
    assert min(down, right, stayed) > 70


def test_a_number_is_found_by_bisection() -> None:
    """Every number up to 100 is found in 7 guesses; the state is what the replies leave."""
    for seed in range(50):
        play, low, high, reply = new(GUESS_NUMBER, seed), 1, 100, Reply()
        for _ in range(7):
            middle = (low + high) // 2
            reply = answer(play, str(middle))
            if reply.is_done:
                break
            low, high = (middle + 1, high) if reply.messages[0].content == "higher" else (low, middle - 1)
            assert reply.state == f"{low}-{high}"
        assert (reply.reward, reply.is_done, reply.parts["success"]) == (1.0, True, 1.0)
    assert [answer(new(GUESS_NUMBER), text).parts.get("malformed") for text in ("0", "101", "٣", "1.5", "")] == [
        1.0
    ] * 5


def test_a_level_is_solved_by_the_moves_that_made_it() -> None:
    """The rewards are gym-sokoban's: -0.1 a move, 1 for a box onto a target, 10 for the last."""
    for seed in range(60):
        level = draw_level(seed, 6, 1 + seed % 2, 0.15)
        assert not level.boxes & level.targets
        play = new(SOKOBAN, seed, boxes=1 + seed % 2, wall_chance=0.15)
        replies = []
        for move in level.solution:
            replies.append(answer(play, move))
            if replies[-1].is_done:
                break
        assert (replies[-1].is_done, replies[-1].parts["success"]) == (True, 1.0)
        total = sum(reply.reward for reply in replies)
        assert total == pytest.approx(10 + len(level.boxes) - 0.1 * len(replies))
    with pytest.raises(ValueError, match="no level of size 4 with 6 boxes"):
        draw_level(0, 4, 6, 0.0)


def test_a_box_is_pushed_and_never_pulled_or_pushed_into_a_wall() -> None:
    floor = frozenset(Place(1, column) for column in range(1, 7))
    level = Level(
        8, floor, frozenset({Place(1, 5), Place(1, 6)}), frozenset({Place(1, 3), Place(1, 5)}), Place(1, 2), ()
    )
    play = SokobanPlay(level, ROW, SokobanOptions.model_validate({}))
    rows = []
    for move in ("left", "right", "right", "right", "down"):
        answer(play, move)
        rows.append(play.room().split("\n")[1])
    assert rows == ["#P_X_*O#", "#_PX_*O#", "#__PX*O#", "#__PX*O#", "#__PX*O#"]


def test_the_calculator_answers_calls_with_values_or_what_is_wrong() -> None:
    """Calls of one answer are answered in order, as text; the right number alone ends the episode with 1."""
    play, value = new(CALCULATOR, 3, max_calls=6), evaluate(draw_expression(3, 3, 99))
    texts = ['{"expression": "(2+3)*-4/3"}', '{"expression": "1/0"}', "{", '{"expression": 3}', '["x"]']
    calls = [ToolCall(f"c{n}", "calculator", text) for n, text in enumerate(texts)]
    calls += [ToolCall("c5", "rm", "{}"), ToolCall("c6", "calculator", json.dumps({"expression": "1"}))]
    reply = play.step(Message("assistant", tool_calls=tuple(calls)))
    assert [(message.role, message.tool_call_id) for message in reply.messages] == [("tool", f"c{n}") for n in range(7)]
    assert [message.content for message in reply.messages] == [
        "-20/3", "error: division by zero", "error: the arguments are not JSON",
        'error: expected the arguments {"expression": "..."}', 'error: expected the arguments {"expression": "..."}',
        "error: there is no tool 'rm', only calculator", "not done: more than 6 calls",
    ]  # fmt: skip
    assert answer(new(CALCULATOR, 3), str(value)).reward == 1.0
    assert answer(new(CALCULATOR, 3), str(value + 1)).reward == 0.0
