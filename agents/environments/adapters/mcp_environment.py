"""`mcp`: the policy calls the tools of MCP servers, until it answers without a call.

Each episode has separate sessions. MCP knows neither rewards nor seeds: the reward is that of a reward function or
endpoint, which sees the conversation, or what a tool that the policy cannot call (`options.reward_tool`) says at the
end; the seed is in the variable `PENSTOCK_SEED` of a server's process, and in the header `Penstock-Seed` of every
request to a URL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from penstock.agents.environments.adapters.mcp_connection import LISTS_WITHIN_S, Result, ServerFailed
from penstock.agents.environments.adapters.mcp_sessions import (
    McpOptions,
    McpSessions,
    Reached,
    ServerTool,
    side_by_side,
    sweep,
)
from penstock.agents.environments.episode_environment import Attempt, Begun, RowUnfit, Site
from penstock.agents.environments.play import Play, Reply, Row, called, done, parsed_json, read_arguments
from penstock.agents.environments.turn_environment import TurnEnvironment, check_reply_deadline
from penstock.agents.proxy.messages import Message, ToolCall
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.environments.environment import Sampler


class McpPlay(Play):
    def __init__(self, seed: int, row: Row, options: McpOptions, reached: Reached) -> None:
        self._row, self._options = row, options
        self._prompt = row.asked()
        self._sessions = McpSessions(seed, options, reached)
        self._tools: dict[str, ServerTool] = {}
        self._reward: ServerTool | None = None

    async def start(self) -> Sequence[Message]:
        listed, several = await self._sessions.open(), len(self._options.servers) > 1
        tools = {f"{tool.server}__{tool.name}" if several else tool.name: tool for tool in listed}
        wanted = self._options.tools or [name for name in tools if name != self._options.reward_tool]
        missing = {*wanted, *filter(None, [self._options.reward_tool])} - set(tools)
        if missing:
            raise ConfigError(
                f"no MCP server has the tools {sorted(missing)}; they have {', '.join(sorted(tools)) or 'none'}"
            )
        self._tools = {name: tools[name] for name in wanted}
        self._reward = tools.get(self._options.reward_tool)
        self.tools = tuple(tool.as_function(name) for name, tool in self._tools.items())
        return self._prompt

    async def step(self, answer: Message) -> Reply:
        if not answer.tool_calls:
            return done(await self._rewarded(answer.content))
        results = await side_by_side(self._result(call, number) for number, call in enumerate(answer.tool_calls))
        texts = [(self._options.shortened(result.text), result.is_error) for result in results]
        return called(answer.tool_calls, texts)

    async def score(self) -> float:
        return await self._rewarded("")

    async def close(self) -> None:
        await self._sessions.close()

    async def _result(self, call: ToolCall, number: int) -> Result:
        if number >= self._options.max_parallel_calls:
            return _error(f"only the first {self._options.max_parallel_calls} calls of an answer are made")
        tool = self._tools.get(call.name)
        if tool is None:
            return _error(f"there is no tool {call.name[:100]!r}; there are {', '.join(self._tools) or 'none'}")
        try:
            arguments = read_arguments(call)
        except ValueError as err:
            return _error(str(err))
        return await tool.connection.call(tool.name, arguments)

    async def _rewarded(self, answer: str) -> float:
        if self._reward is None:
            return 0.0
        known = self._reward.described.input_schema.get("properties", {})
        arguments = {"answer": answer, "ground_truth": self._row.ground_truth}
        result = await self._reward.connection.call(
            self._reward.name, {key: value for key, value in arguments.items() if key in known}
        )
        value = None if result.is_error else _reward_of(result)
        if value is None:
            raise ServerFailed(
                f"the tool {self._options.reward_tool} returns no reward (a number, or "
                f'{{"reward": NUMBER}}): {result.text[:200]!r}'
            )
        return value


class Mcp(TurnEnvironment):
    name = "mcp"
    options = McpOptions

    def __init__(self) -> None:
        super().__init__()
        self._reached: Reached | None = None

    def defined(self, name: str, definition: EnvironmentDefinition) -> Self:
        other = super().defined(name, definition)
        check_reply_deadline(name, definition, other.chosen.call_deadline_s, LISTS_WITHIN_S)
        return other

    def use_model(self, folder: Path, context_tokens: int | None) -> None:
        super().use_model(folder, context_tokens)
        if self.chosen is not None:
            self._reached = Reached.of(self.chosen, self.own_servers)

    def play(self, seed: int, row: Row, options: McpOptions) -> McpPlay:
        if self.chosen is None:
            raise ValueError(self.needs_definition("options.servers"))
        self._reached = self._reached or Reached.of(self.chosen, self.own_servers)  # tried without a model
        return McpPlay(seed, row, self.chosen, self._reached)

    async def attempt(self, site: Site, begun: Begun, sampler: Sampler) -> Attempt:
        if begun.task.reward.name == "environment" and self.chosen is not None and not self.chosen.reward_tool:
            raise RowUnfit(
                'an MCP server gives no reward: write options.reward_tool, or another reward.name than "environment"'
            )
        return await super().attempt(site, begun, sampler)

    def _prepare(self) -> Site:
        sweep()
        return super()._prepare()


def _error(text: str) -> Result:
    return Result(f"error: {text}", is_error=True)


def _reward_of(result: Result) -> float | None:
    value = parsed_json(result.text) if result.structured is None else result.structured
    if isinstance(value, dict):
        value = value.get("reward", value.get("result"))  # the library wraps a plain number as result
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


MCP = Mcp()
