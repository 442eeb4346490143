"""What environments with the interface of Gymnasium share: text in, text out, a reward for each step.

`reset(seed)` returns an observation, `step(action)` an observation, a reward, whether the rules ended the episode (terminated), and whether a
limit did (truncated).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from penstock.agents.environments.games.actions import ActionOptions, find_action, malformed, opening
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import Message
from penstock.protocol.errors import ConfigError


class StepOptions(ActionOptions):
    """Options of every environment with the interface of Gymnasium."""

    id: str = Field(min_length=1, description="The environment, as the library's make() names it.")
    make: dict[str, Any] = Field(default_factory=dict, description="Arguments of make() besides the id.")
    rules: str = Field(
        "", description='What stands before the first observation; instructions = "row" takes the row\'s prompt.'
    )
    parts: list[str] = Field(
        default_factory=list, description="Numbers of the last step's info that are kept with the episode, and plotted."
    )


class NoAction(Exception):
    """An answer holds no action of the environment; the text says what one is."""


class World(ABC):
    """One environment of another library, in ``env``. Its methods run on a thread, one after another."""

    env: Any
    version: str  # the environment and the library's version

    def reset(self, seed: int) -> str:
        """Begin the episode that follows from the seed; return the first observation."""
        observation, info = self.run(lambda: self.env.reset(seed=seed))
        return self.seen(observation, info)

    def step(self, text: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Return observation, reward, terminated, truncated and info; raises NoAction, after which nothing has moved."""
        action = self.action(text)
        observation, reward, terminated, truncated, info = self.run(lambda: self.env.step(action))
        return self.seen(observation, info), float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what a call of the library returns."""
        return call()

    def action(self, text: str) -> Any:
        """Return the action that a text is; raises NoAction."""
        return text

    @abstractmethod
    def seen(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Return what the policy reads of an observation."""


class StepPlay(Play):
    def __init__(self, seed: int, row: Row, options: StepOptions, make: Callable[[Any], World]) -> None:
        self._seed, self._row, self._options, self._make = seed, row, options, make
        self._world: World | None = None
        self._observation = ""

    def start(self) -> tuple[Message, ...]:
        self._world = self._make(self._options)
        self.version = self._world.version
        self._observation = self._world.reset(self._seed)
        return opening(self._row, self._options, self._options.rules, self._observation)

    def step(self, answer: Message) -> Reply:
        assert self._world is not None
        action = find_action(answer.content, self._options)
        try:
            if not action:
                raise NoAction("The answer holds no action.")
            observation, reward, terminated, truncated, info = self._world.step(action)
        except NoAction as err:
            return malformed(self._options, f"{err}\n{self._observation}", self._observation, {})
        self._observation = observation
        if terminated or truncated:
            kept = {name: _number(info, name) for name in self._options.parts}
            parts = {"terminated": float(terminated), "truncated": float(truncated), **kept}
            return Reply(reward=reward, is_done=True, parts=parts, is_truncated=not terminated)
        return Reply((Message("user", observation),), reward)

    def close(self) -> None:
        if self._world is not None:
            self._world.close()


class StepEnvironment(TurnEnvironment):
    world_class: ClassVar[
        Callable[[Any], World]
    ]  # raises ConfigError without the library, or for options that do not fit

    def use_model(self, folder: Path, context_tokens: int | None) -> None:
        super().use_model(folder, context_tokens)
        if self.chosen is None:
            return
        try:
            type(self).world_class(self.chosen).close()
        except ConfigError as err:
            raise ConfigError(f"environment {self.name}: {err}") from None
        except Exception as err:
            raise ConfigError(f"environment {self.name}: {type(self).name}.make: {type(err).__name__}: {err}") from err

    def play(self, seed: int, row: Row, options: Any) -> StepPlay:
        return StepPlay(seed, row, options, type(self).world_class)


def _number(info: Mapping[str, Any], name: str) -> float:
    """Return a number of the last step's info; raises KeyError or TypeError, which are failures of the environment."""
    if name not in info:
        raise KeyError(
            f"options.parts names {name!r}, and the info of the last step has {', '.join(map(str, info)) or 'nothing'}"
        )
    return float(info[name])


def text_of(observation: Any) -> str:
    """Return an observation as text: text as it is, anything else as JSON. Raises TypeError for what is neither."""
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"an observation holds a {type(value).__name__}, which is neither text nor JSON")
