"""`guess_number`: find a number that follows from the seed; each wrong guess is answered with higher or lower."""

from __future__ import annotations

import random
import re

from pydantic import Field

from penstock.agents.environments.games.actions import ActionOptions, Game, find_action, malformed, opening
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.proxy.messages import Message

_NUMBER = re.compile(r"[0-9]{1,9}")


class GuessNumberOptions(ActionOptions):
    """Options of ``guess_number``."""

    highest: int = Field(100, ge=2, le=999_999_999, description="The number is between 1 and this.")


class GuessNumberPlay(Play):
    def __init__(self, seed: int, row: Row, options: GuessNumberOptions) -> None:
        self._row, self._options = row, options
        self._number = random.Random(seed).randint(1, options.highest)  # noqa: S311  a game, no secret
        self._low, self._high = 1, options.highest  # what the replies so far leave

    def start(self) -> tuple[Message, ...]:
        rules = f"Guess my number, from 1 to {self._options.highest}. Answer with a number; I say higher or lower."
        return opening(self._row, self._options, rules, "")

    def step(self, answer: Message) -> Reply:
        action = find_action(answer.content, self._options)
        if not _NUMBER.fullmatch(action) or not 1 <= int(action) <= self._options.highest:
            text = f"Answer with a number from 1 to {self._options.highest} and nothing else."
            return malformed(self._options, text, self._state(), {"success": 0.0})
        guess = int(action)
        if guess == self._number:
            return Reply(reward=1.0, is_done=True, parts={"success": 1.0})
        if guess < self._number:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        word = "higher" if guess < self._number else "lower"
        return Reply((Message("user", word),), parts={"success": 0.0}, state=self._state())

    def _state(self) -> str:
        return f"{self._low}-{self._high}"


class GuessNumber(Game):
    name = "guess_number"
    options = GuessNumberOptions
    play_class = GuessNumberPlay


GUESS_NUMBER = GuessNumber()
