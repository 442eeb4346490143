"""`frozen_lake`: walk from the upper left corner to the lower right one, and into no hole.

The rules are Gymnasium's FrozenLake: reward 1 at the goal and 0 in a hole, and on slippery ice a move goes where it was meant
or to either side of it, with a chance of one third each. Maps are drawn from the seed until one can be crossed.
"""

from __future__ import annotations

import random
from collections import deque

from pydantic import Field

from penstock.agents.environments.games.actions import (
    DIRECTIONS,
    ActionOptions,
    Game,
    Place,
    find_move,
    malformed_move,
    opening,
)
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.proxy.messages import Message

_DRAWS = 10_000  # maps that are drawn before the options are refused
_START = Place(0, 0)
_RULES = (
    "You are on a frozen lake. P is you, G the goal, O a hole, _ ice. Walk to the goal and into no hole. "
    "Answer with one move: left, right, up or down."
)


class FrozenLakeOptions(ActionOptions):
    """Options of ``frozen_lake``."""

    size: int = Field(4, ge=2, le=16, description="Rows and columns of the lake.")
    hole_chance: float = Field(0.2, ge=0, le=0.8, description="How often a field other than start and goal is a hole.")
    is_slippery: bool = Field(
        False, description="A move goes to either side of where it was meant in two of three cases."
    )


def draw_lake(seed: int, size: int, hole_chance: float) -> frozenset[Place]:
    draw = random.Random(seed)  # noqa: S311  a game, no secret
    for _ in range(_DRAWS):
        fields = [Place(row, column) for row in range(size) for column in range(size)]
        holes = frozenset(field for field in fields[1:-1] if draw.random() < hole_chance)
        if shortest_path(holes, size) is not None:
            return holes
    raise ValueError(f"no lake of size {size} with hole_chance {hole_chance:g} can be crossed in {_DRAWS} draws")


def shortest_path(holes: frozenset[Place], size: int, start: Place = _START) -> list[str] | None:
    """Return the moves of a shortest way from ``start`` to the goal on ice that is not slippery; None: there is no way."""
    goal = Place(size - 1, size - 1)
    waiting: deque[tuple[Place, list[str]]] = deque([(start, [])])
    seen = {start}
    while waiting:
        at, path = waiting.popleft()
        if at == goal:
            return path
        for move in DIRECTIONS:
            to = _moved(at, move, size)
            if to not in seen and to not in holes:
                seen.add(to)
                waiting.append((to, [*path, move]))
    return None


class FrozenLakePlay(Play):
    def __init__(self, seed: int, row: Row, options: FrozenLakeOptions) -> None:
        self._row, self._options = row, options
        self._holes = draw_lake(seed, options.size, options.hole_chance)
        self._goal = Place(options.size - 1, options.size - 1)
        self._slips = random.Random(f"{seed} slips")  # noqa: S311  a game, no secret
        self._at = _START

    def start(self) -> tuple[Message, ...]:
        return opening(self._row, self._options, _RULES, self.lake())

    def step(self, answer: Message) -> Reply:
        move = find_move(answer.content, self._options)
        if move is None:
            return malformed_move(self._options, self.lake())
        self._at = _moved(self._at, self._slipped(move), self._options.size)
        if self._at == self._goal:
            return Reply(reward=1.0, is_done=True, parts={"success": 1.0})
        if self._at in self._holes:
            return Reply(is_done=True, parts={"success": 0.0, "fell": 1.0})
        return Reply((Message("user", self.lake()),), parts={"success": 0.0}, state=self.lake())

    def shortest_path(self) -> list[str]:
        """Return the moves of a shortest way from here to the goal."""
        return shortest_path(self._holes, self._options.size, self._at) or []

    def lake(self) -> str:
        marks = {**dict.fromkeys(self._holes, "O"), self._goal: "G", self._at: "P"}
        numbers = range(self._options.size)
        return "\n".join("".join(marks.get(Place(row, column), "_") for column in numbers) for row in numbers)

    def _slipped(self, move: str) -> str:
        if not self._options.is_slippery:
            return move
        names = list(DIRECTIONS)
        return names[(names.index(move) + self._slips.choice((-1, 0, 1))) % 4]


def _moved(at: Place, move: str, size: int) -> Place:
    return Place(*(min(max(number, 0), size - 1) for number in at.moved(move)))


class FrozenLake(Game):
    name = "frozen_lake"
    options = FrozenLakeOptions
    play_class = FrozenLakePlay


FROZEN_LAKE = FrozenLake()
