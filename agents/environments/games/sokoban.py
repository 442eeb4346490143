"""`sokoban`: push every box onto a target; boxes cannot be pulled. The rewards are those of gym-sokoban, each an option."""

from __future__ import annotations

from pydantic import Field

from penstock.agents.environments.games.actions import ActionOptions, find_action, malformed, opening
from penstock.agents.environments.games.sokoban_levels import DIRECTIONS, Level, Place, draw_level
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import Message

_MOVES = {name[:end]: name for name in DIRECTIONS for end in (1, len(name))}
_RULES = (
    "Push every box onto a target. # is a wall, _ floor, O a target, X a box, * a box on a target, P you, S you on a target. "
    "You push a box by walking against it; it moves if the field behind it is free. Answer with one move: left, right, up or down."
)


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
    """One room."""

    def __init__(self, level: Level, row: Row, options: SokobanOptions) -> None:
        """Start with the boxes and the player where the level has them."""
        self._level, self._row, self._options = level, row, options
        self._boxes, self._player = set(level.boxes), level.player

    def start(self) -> tuple[Message, ...]:
        """Return the rules and the room."""
        return opening(self._row, self._options, _RULES, self.room())

    def step(self, answer: Message) -> Reply:
        """Move, and push the box that is there; the episode ends when every box is on a target."""
        move = _MOVES.get(find_action(answer.content, self._options).lower())
        if move is None:
            text = f"Answer with left, right, up or down.\n{self.room()}"
            return malformed(self._options, text, self.room(), {"success": 0.0})
        before = len(self._boxes & self._level.targets)
        self._move(move)
        on_targets = len(self._boxes & self._level.targets)
        reward = self._options.move_reward + self._options.box_reward * (on_targets - before)
        if on_targets == len(self._boxes):
            return Reply(reward=reward + self._options.solved_reward, is_done=True, parts={"success": 1.0})
        return Reply((Message("user", self.room()),), reward, parts={"success": 0.0}, state=self.room())

    def room(self) -> str:
        """Return the room as lines of text."""
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
    """The environment ``sokoban``."""

    name = "sokoban"
    version = "1"
    options = SokobanOptions

    def play(self, seed: int, row: Row, options: SokobanOptions) -> SokobanPlay:
        """Return the seed's room; raises ValueError for options that allow none."""
        level = draw_level(seed, options.size, options.boxes, options.wall_chance)
        return SokobanPlay(level, row, options)


SOKOBAN = Sokoban()
