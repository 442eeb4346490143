"""`gymnasium`: an environment of Gymnasium whose observations and actions are text, or have names.

The library is the extra ``gymnasium``. What is rendered as text (``render_mode = "ansi"``) can be the observation, and
discrete actions get names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from penstock.agents.environments.adapters.text_steps import NoAction, StepEnvironment, StepOptions, World, text_of
from penstock.agents.environments.shared_options import optional_library
from penstock.protocol.errors import ConfigError

_WHOLE = re.compile(r"-?[0-9]{1,18}")


class GymnasiumOptions(StepOptions):
    """Options of ``gymnasium``."""

    observation: Literal["observation", "render"] = Field(
        "observation",
        description="What the policy reads: the observation, as JSON if it is no text, or what render() returns as "
        'text; for that write make.render_mode = "ansi".',
    )
    actions: list[str] = Field(
        default_factory=list,
        description="Names of discrete actions, in the order of their numbers. Empty: text, a number, or a list of "
        "numbers, as the environment has them.",
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [action.strip().lower() for action in self.actions]
        if len(set(names)) != len(names) or "" in names:
            raise ValueError(f"actions: expected different names that are not empty, got {self.actions}")
        return self


class GymnasiumWorld(World):
    def __init__(self, options: GymnasiumOptions) -> None:
        """Make it; raises ConfigError for one whose actions cannot be written as text."""
        self._options = options
        library = optional_library("gymnasium", '"penstock[gymnasium]"')
        self.env, self._spaces = library.make(options.id, **options.make), library.spaces
        spec = self.env.spec
        self.version = f"{spec.id if spec is not None else options.id}, gymnasium {library.__version__}"
        try:
            self._check_actions()
        except BaseException:
            self.env.close()
            raise

    def seen(self, observation: Any, info: Mapping[str, Any]) -> str:
        if self._options.observation == "observation":
            return text_of(observation)
        shown = self.env.render()
        if not isinstance(shown, str):
            raise TypeError(
                f"render() returns a {type(shown).__name__}, expected text; "
                f'write make.render_mode = "ansi" if {self._options.id} has it'
            )
        return shown

    def _check_actions(self) -> None:
        space, names = self.env.action_space, self._options.actions
        if names:
            if not isinstance(space, self._spaces.Discrete) or space.n != len(names):
                raise ConfigError(
                    f"options.actions has {len(names)} names, and the actions of {self._options.id} are {space}"
                )
            return
        kinds = ("Text", "Discrete", "MultiDiscrete", "MultiBinary", "Box")
        if not isinstance(space, tuple(getattr(self._spaces, kind) for kind in kinds)):
            raise ConfigError(
                f"the actions of {self._options.id} are {space}, which no text of an answer can be; wrap it"
            )

    def action(self, text: str) -> Any:
        space, names = self.env.action_space, self._options.actions
        if names:
            lowered = [name.strip().lower() for name in names]
            if text.lower() not in lowered:
                raise NoAction(f"The answer is none of the actions {', '.join(names)}.")
            return space.start + lowered.index(text.lower())
        if isinstance(space, self._spaces.Text):
            action: Any = text
        elif isinstance(space, self._spaces.Discrete):
            action = int(text) if _WHOLE.fullmatch(text) else None
        else:
            action = _numbers(text, space.dtype)
        if action is None or not space.contains(action):
            raise NoAction(f"The answer is no action of {space}.")
        return action


def _numbers(text: str, dtype: Any) -> Any:
    try:
        value = np.asarray(json.loads(text))
        made = value.astype(dtype)
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise NoAction("The answer is no list of numbers, as JSON.") from None
    if value.dtype.kind not in "iuf" or (made.dtype.kind in "iu" and not np.array_equal(made, value)):
        raise NoAction("The answer is no list of numbers of the right kind.")
    return made


class Gymnasium(StepEnvironment):
    name = "gymnasium"
    options = GymnasiumOptions
    world_class = GymnasiumWorld


GYMNASIUM = Gymnasium()
