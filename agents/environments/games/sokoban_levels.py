"""Levels of Sokoban that can be solved: made backwards, by pulling boxes away from their targets; pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

_DRAWS = 1_000  # rooms that are drawn before the options are refused
_WALK = 60  # moves backwards from the solved room, for each box

DIRECTIONS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


class Place(NamedTuple):
    """Row and column of a field, counted from the upper left corner."""

    row: int
    column: int

    def moved(self, direction: str, fields: int = 1) -> Place:
        """Return the place some fields further on."""
        down, right = DIRECTIONS[direction]
        return Place(self.row + fields * down, self.column + fields * right)


@dataclass(frozen=True, slots=True)
class Level:
    """A room at its start, and moves that solve it."""

    size: int
    floor: frozenset[Place]  # every other field is a wall
    targets: frozenset[Place]
    boxes: frozenset[Place]
    player: Place
    solution: tuple[str, ...]  # one of many, not the shortest


def draw_level(seed: int, size: int, boxes: int, wall_chance: float) -> Level:
    """Return a level by the seed alone, none of its boxes on a target; raises ValueError if none is found."""
    draw = random.Random(seed)  # noqa: S311  a game, no secret
    for _ in range(_DRAWS):
        floor = _draw_floor(draw, size, wall_chance)
        if len(floor) > 2 * boxes:
            level = _walk_back(draw, size, floor, boxes)
            if level is not None:
                return level
    raise ValueError(f"no level of size {size} with {boxes} boxes and wall_chance {wall_chance:g} in {_DRAWS} draws")


def _draw_floor(draw: random.Random, size: int, wall_chance: float) -> frozenset[Place]:
    """Return the fields inside the outer wall that are no walls and can be reached from the first of them."""
    inside = [Place(row, column) for row in range(1, size - 1) for column in range(1, size - 1)]
    free = {place for place in inside if draw.random() >= wall_chance}
    waiting = [place for place in inside if place in free][:1]
    found = set(waiting)
    while waiting:
        place = waiting.pop()
        near = {place.moved(direction) for direction in DIRECTIONS} & free - found
        found |= near
        waiting.extend(near)
    return frozenset(found)


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
