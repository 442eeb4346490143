"""What a tool is; `TOOLS` finds it by its name in a run file.

A new tool is one file with an instance of `Tool` at its top level: in `built_in/`, in an installed package with an entry point in
the group ``penstock.tools``, or in any file that a run file names (``my_tools.py:WEATHER``).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from penstock.agents.environments.episode_environment import PlayOptions
from penstock.agents.environments.play import Row
from penstock.protocol.errors import PenstockError
from penstock.protocol.extensions import Registry


class ToolError(PenstockError):
    """The call cannot be answered as it is; the policy reads the text, and goes on."""


class ToolUnavailable(PenstockError):
    """The tool cannot answer now, for a reason other than the policy: its episode is restarted with the same seed."""


class ToolArguments(BaseModel):
    """Base class of a tool's arguments: fields with descriptions, which the policy reads as a JSON Schema."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class ToolEpisode:
    seed: int  # equal in a group, and in every attempt
    row: Row
    kept: dict[str, Any] = field(default_factory=dict)  # what tools keep for as long as the episode


class Tool(ABC):
    """One tool. Its ``call`` may be a coroutine; a plain one runs on a thread."""

    name: str  # as the policy writes it
    description: str  # as the policy reads it
    arguments: ClassVar[type[ToolArguments]] = ToolArguments
    options: ClassVar[type[PlayOptions]] = PlayOptions  # what the run file may set
    max_running: int = 32  # calls that run at once in a worker; others wait, before their time begins
    ends_calls: bool = (
        False  # its calls end by themselves at their deadline, with TimeoutError; those of others are abandoned
    )

    def __init__(self) -> None:
        self.chosen: Any = None  # an instance of ``options``; None: they are not set yet

    def with_options(self, values: Mapping[str, Any], place: str) -> Self:
        made = copy.copy(self)
        made.chosen = self.options.checked(values, place, self.name)
        return made

    def prepare(self) -> None:  # noqa: B027 - most need nothing
        """Get ready, once, before the first call; it may block. Raises ConfigError for options that cannot work here."""

    @abstractmethod
    def call(self, arguments: Any, episode: ToolEpisode) -> str | Awaitable[str]:
        """Return the answer to a call; ``arguments`` is an instance of ``self.arguments``.

        Raises ToolError for what the policy should read. Any other exception is told to the policy too, but for
        ToolUnavailable, which begins the episode again.
        """

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give up what the tool holds, at the end of the worker."""

    def schema(self) -> dict[str, Any]:
        parameters = _without_titles(self.arguments.model_json_schema())
        for name in ("description", "additionalProperties"):
            parameters.pop(name, None)
        parameters.setdefault("properties", {})
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def _without_titles(schema: Any) -> Any:
    """Return a JSON Schema without the titles that pydantic adds; a property may be called title."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for name, part in schema.items():
        if name in ("properties", "$defs"):
            kept[name] = {key: _without_titles(value) for key, value in part.items()}
        elif name != "title":
            kept[name] = _without_titles(part)
    return kept


TOOLS = Registry(
    "tool",
    Tool,  # pyright: ignore[reportAbstractUsage]  (the class is only compared with)
    package="penstock.agents.environments.tools.built_in",
    group="penstock.tools",
)
