"""What the built-in games share: how an action is found in an answer, what a malformed one costs, what the policy reads first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator

from penstock.agents.environments.episode_environment import PlayOptions
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import Message

DIRECTIONS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}  # neighbours are at right angles
_MOVES = {name[:end]: name for name in DIRECTIONS for end in (1, len(name))}


class Place(NamedTuple):
    """Row and column of a field, counted from the upper left corner."""

    row: int
    column: int

    def moved(self, direction: str, fields: int = 1) -> Place:
        down, right = DIRECTIONS[direction]
        return Place(self.row + fields * down, self.column + fields * right)


class PatternOptions(PlayOptions):
    """Where an answer holds what counts, and what an answer without it costs."""

    action_pattern: str = Field(
        "",
        description="A regular expression with one group: the action is what its last match in the answer holds, for example "
        "`<answer>(.*?)</answer>`. Empty: the whole answer is the action.",
    )
    format_penalty: float = Field(
        0.0, le=0, allow_inf_nan=False,
        description="Reward of a turn whose answer is malformed: no action of the game, no call that can be made; 0 or less.",
    )  # fmt: skip

    @field_validator("action_pattern")
    @classmethod
    def _has_one_group(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as err:
            raise ValueError(f"not a regular expression: {err}") from None
        if value and groups != 1:
            raise ValueError(f"expected one group in parentheses, got {groups}")
        return value


class ActionOptions(PatternOptions):
    """Options of every built-in game."""

    instructions: Literal["rules", "row"] = Field(
        "rules",
        description="What stands before the first state: the game's rules, or the last message of the row's prompt instead.",
    )


def find_action(answer: str, options: PatternOptions) -> str:
    """Return the action that an answer holds, without spaces around it; empty if the pattern does not match."""
    if not options.action_pattern:
        return answer.strip()
    matches = re.findall(options.action_pattern, answer, re.DOTALL)
    return matches[-1].strip() if matches else ""


def find_move(answer: str, options: PatternOptions) -> str | None:
    """Return the direction that an answer names, by its word or its first letter; None: it names none."""
    return _MOVES.get(find_action(answer, options).lower())


def opening(row: Row, options: ActionOptions, rules: str, state: str) -> tuple[Message, ...]:
    system = tuple(message for message in row.messages if message.role == "system")
    prompt = row.messages[-1].content if row.messages else ""
    text = rules if options.instructions == "rules" else prompt
    return (*system, Message("user", "\n".join(filter(None, [text, state]))))


def malformed(options: ActionOptions, text: str, state: str, parts: Mapping[str, float]) -> Reply:
    return Reply((Message("user", text),), options.format_penalty, False, {**parts, "malformed": 1.0}, state)


def malformed_move(options: ActionOptions, state: str) -> Reply:
    return malformed(options, f"Answer with left, right, up or down.\n{state}", state, {"success": 0.0})


class Game(TurnEnvironment):
    """A built-in game, whose ``play_class`` is made of seed, row and options."""

    version = "1"
    play_class: ClassVar[type[Any]]

    def play(self, seed: int, row: Row, options: Any) -> Play:
        return self.play_class(seed, row, options)
