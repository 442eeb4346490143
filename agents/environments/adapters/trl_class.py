"""`trl`: a class as TRL's `environment_factory` takes it, unchanged.

Its method `reset` gets the row's columns, and what it returns is appended to the prompt; its other public methods are the tools that the policy
calls; `get_reward`, if it has one, is the episode's reward. A tool that raises answers the policy with the error, as in TRL 1.16
(`trl/trainer/grpo_trainer.py`). The schema of a tool is read from its type hints and docstring by `transformers`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import Field

from penstock.agents.environments.episode_environment import PlayOptions
from penstock.agents.environments.play import Play, Reply, Row, called, done
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import Message, ToolCall
from penstock.protocol.errors import ConfigError
from penstock.protocol.extensions import load_attribute

_THREADS = ThreadPoolExecutor(32, thread_name_prefix="trl")  # plain methods run on these, and stop nobody else


class TrlOptions(PlayOptions):
    """Options of ``trl``."""

    factory: str = Field(
        min_length=1, description="The class, or a function that makes an instance: module:NAME or FILE.py:NAME."
    )


def methods_of(instance: Any) -> dict[str, Callable[..., Any]]:
    methods = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    names = [name for name, _ in methods if name not in ("reset", "get_reward") and not name.startswith("_")]
    return {name: getattr(instance, name) for name in names}


class TrlPlay(Play):
    def __init__(self, seed: int, row: Row, make: Callable[[], Any]) -> None:
        row.asked()
        self._seed, self._row, self._make = seed, row, make
        self._instance: Any = None
        self._methods: dict[str, Callable[..., Any]] = {}

    async def start(self) -> tuple[Message, ...]:
        self._instance = await _called(self._make, {})
        self._methods = methods_of(self._instance)
        self.tools = tuple(_schema(method) for method in self._methods.values())
        said = await _called(self._instance.reset, self._columns())
        if said is None:
            return self._row.messages
        if not isinstance(said, str):
            raise TypeError(f"reset() returns None or a text, got {type(said).__name__}")
        *before, last = self._row.messages
        return (*before, Message("user", last.content + said))

    async def step(self, answer: Message) -> Reply:
        if not answer.tool_calls:
            return done(await self.score())
        return called(answer.tool_calls, [await self._result(call) for call in answer.tool_calls])

    async def score(self) -> float:
        method = getattr(self._instance, "get_reward", None)
        if method is None:
            return 0.0
        return float(await _called(method, {}))

    def _columns(self) -> dict[str, Any]:
        columns: dict[str, Any] = {
            "prompt": [{"role": message.role, "content": message.content} for message in self._row.messages],
            **self._row.extra_info,
        }
        taken = inspect.signature(self._instance.reset).parameters
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
        for name, value in (("ground_truth", self._row.ground_truth), ("seed", self._seed)):
            if name in taken or takes_all:
                columns.setdefault(name, value)
        return columns

    async def _result(self, call: ToolCall) -> tuple[str, bool]:
        try:
            method = self._methods.get(call.name)
            if method is None:
                raise ValueError(f"Tool {call.name} not found.")
            arguments = json.loads(call.arguments or "{}")
            return str(await _called(method, arguments)), False
        except Exception as err:  # noqa: BLE001 - an author's tool raises what it likes, and TRL tells the policy
            return str({"error": str(err)}), True


async def _called(method: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(**arguments)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, functools.partial(method, **arguments))


def _schema(method: Callable[..., Any]) -> dict[str, Any]:
    try:
        from transformers.utils import get_json_schema  # noqa: PLC0415 - only a worker that plays such a class needs it
    except ImportError as err:
        raise ConfigError(f"transformers, which reads the tools of a class, is not installed ({err})") from None
    try:
        return get_json_schema(method)
    except Exception as err:
        raise ConfigError(f"the method {method.__name__} is not a tool: {type(err).__name__}: {err}") from err


class Trl(TurnEnvironment):
    name = "trl"
    options = TrlOptions

    def use_model(self, folder: Path, context_tokens: int | None) -> None:
        super().use_model(folder, context_tokens)
        if self.chosen is None:
            return
        make = load_attribute(self.chosen.factory, f"environment {self.name}: options.factory")
        if not callable(make):
            raise ConfigError(
                f"environment {self.name}: {self.chosen.factory} is a {type(make).__name__}, which makes no instance"
            )
        try:
            instance = make()
        except Exception as err:
            raise ConfigError(
                f"environment {self.name}: {self.chosen.factory}() failed: {type(err).__name__}: {err}"
            ) from err
        if not callable(getattr(instance, "reset", None)):
            raise ConfigError(f"environment {self.name}: {type(instance).__name__} has no method reset")
        for method in methods_of(instance).values():
            _schema(method)

    def play(self, seed: int, row: Row, options: TrlOptions) -> TrlPlay:
        make = load_attribute(options.factory, "options.factory")
        assert callable(make)
        return TrlPlay(seed, row, make)


TRL = Trl()
