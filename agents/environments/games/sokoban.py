"""`sokoban`: push every box onto a target; boxes cannot be pulled. The rewards are those of gym-sokoban, each an option.

Levels can be solved: they are made backwards, by pulling boxes away from their targets.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pydantic import Field

from penstock.agents.environments.games.actions import (
    DIRECTIONS,
    ActionOptions,
    Place,
    find_move,
    malformed_move,
    opening,
)
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import Message

_DRAWS = 1_000  # rooms that are drawn before the options are refused
_WALK = 60  # moves backwards from the solved room, for each box

_RULES = (
    "Push every box onto a target. # is a wall, _ floor, O a target, X a box, * a box on a target, P you, S you on a target. "
    "You push a box by walking against it; it moves if the field behind it is free. Answer with one move: left, right, up or down."
)


@dataclass(frozen=True, slots=True)
class Level:
    size: int
    floor: frozenset[Place]  # every other field is a wall
    targets: frozenset[Place]
    boxes: frozenset[Place]
    player: Place
    solution: tuple[str, ...]  # one of many, not the shortest


def draw_level(seed: int, size: int, boxes: int, wall_chance: float) -> Level:
    draw = random.Random(seed)  # noqa: S311  a game, no secret
    for _ in range(_DRAWS):
        floor = _draw_floor(draw, size, wall_chance)
        if len(floor) > 2 * boxes:
            level = _walk_back(draw, size, floor, boxes)
            if level is not None:
                return level
    raise ValueError(f"no level of size {size} with {boxes} boxes and wall_chance {wall_chance:g} in {_DRAWS} draws")


def _draw_floor(draw: random.Random, size: int, wall_chance: float) -> frozenset[Place]:
    inside = [Place(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
    free = {place for place in inside if draw.random() >= wall_chance}
    waiting = [place for place in inside if place in free][:1]
    reached = set(waiting)
    while waiting:
        place = waiting.pop()
        near = {place.moved(direction) for direction in DIRECTIONS} & free - reached
        reached |= near
        waiting.extend(near)
    return frozenset(reached)


def _walk_back(draw: random.Random, size: int, floor: frozenset[Place], boxes: int) -> Level | None:
    """Return the first room on a random walk backwards in which no box is on a target; None: the walk finds none."""
    fields = draw.sample(sorted(floor), boxes + 1)
    targets, now, player = frozenset(fields[1:]), set(fields[1:]), fields[0]
    moves: list[str] = []
    for _ in range(_WALK * boxes):
        ways = [way for way in DIRECTIONS if player.moved(way, -1) in floor - now]
        if not ways:
            return None
        way = draw.choice(ways)  # the move forwards that the step backwards undoes
        if player.moved(way) in now and draw.random() < 0.8:
            now.remove(player.moved(way))
            now.add(player)
        player = player.moved(way, -1)
        moves.append(way)
        if not now & targets:
            return Level(size, floor, targets, frozenset(now), player, tuple(reversed(moves)))
    return None


class SokobanOptions(ActionOptions):
    """Options of ``sokoban``."""

    size: int = Field(6, ge=4, le=16, description="Rows and columns of the room, its outer wall included.")
    boxes: int = Field(1, ge=1, le=6, description="Boxes, and targets.")
    wall_chance: float = Field(0.1, ge=0, le=0.6, description="How often a field inside is a wall.")
    move_reward: float = Field(-0.1, allow_inf_nan=False, description="Reward of every move.")
    box_reward: float = Field(
        1.0, allow_inf_nan=False, description="Reward of a box pushed onto a target, and cost of one pushed off."
    )
    solved_reward: float = Field(10.0, allow_inf_nan=False, description="Further reward of the last box.")


class SokobanPlay(Play):
    def __init__(self, level: Level, row: Row, options: SokobanOptions) -> None:
        self._level, self._row, self._options = level, row, options
        self._boxes, self._player = set(level.boxes), level.player

    def start(self) -> tuple[Message, ...]:
        return opening(self._row, self._options, _RULES, self.room())

    def step(self, answer: Message) -> Reply:
        move = find_move(answer.content, self._options)
        if move is None:
            return malformed_move(self._options, self.room())
        before = len(self._boxes & self._level.targets)
        self._move(move)
        on_targets = len(self._boxes & self._level.targets)
        reward = self._options.move_reward + self._options.box_reward * (on_targets - before)
        if on_targets == len(self._boxes):
            return Reply(reward=reward + self._options.solved_reward, is_done=True, parts={"success": 1.0})
        return Reply((Message("user", self.room()),), reward, parts={"success": 0.0}, state=self.room())

    def room(self) -> str:
        numbers = range(self._level.size)
        return "\n".join("".join(self._mark(Place(row, column)) for column in numbers) for row in numbers)

    def _move(self, direction: str) -> None:
        to, behind = self._player.moved(direction), self._player.moved(direction, 2)
        if to not in self._level.floor:
            return
        if to in self._boxes:
            if behind not in self._level.floor or behind in self._boxes:
                return
            self._boxes.remove(to)
            self._boxes.add(behind)
        self._player = to

    def _mark(self, place: Place) -> str:
        is_target = place in self._level.targets
        if place == self._player:
            return "S" if is_target else "P"
        if place in self._boxes:
            return "*" if is_target else "X"
        if place in self._level.floor:
            return "O" if is_target else "_"
        return "#"


class Sokoban(TurnEnvironment):
    name = "sokoban"
    version = "1"
    options = SokobanOptions

    def play(self, seed: int, row: Row, options: SokobanOptions) -> SokobanPlay:
        level = draw_level(seed, options.size, options.boxes, options.wall_chance)
        return SokobanPlay(level, row, options)


SOKOBAN = Sokoban()
