"""`mcp`: the policy calls the tools of MCP servers, until it answers without a call.

Each episode has sessions of its own. MCP knows neither rewards nor seeds: the reward is that of a reward function or endpoint, which sees the
conversation, or what a tool that the policy cannot call (`options.reward_tool`) says at the end; the seed is in the variable
`PENSTOCK_SEED` of a server's process, and in the header `Penstock-Seed` of every request to a URL.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import structlog

from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.endpoints.target_policy import OwnServer, TargetPolicy
from penstock.protocol.errors import ConfigError
from penstock.protocol.transport import http_tls
from penstock.rollout_service.environments import program_process
from penstock.rollout_service.environments.adapters.mcp_servers import transports
from penstock.rollout_service.environments.adapters.mcp_servers.connection import (
    LISTS_WITHIN_S,
    McpConnection,
    Result,
    ServerFailed,
)
from penstock.rollout_service.environments.adapters.mcp_servers.options import McpOptions, McpServer
from penstock.rollout_service.environments.environment import Sampler
from penstock.rollout_service.environments.episode_environment import Attempt, Begun, RowUnfit, Site
from penstock.rollout_service.environments.play import Play, Reply, Row, done
from penstock.rollout_service.environments.tools.output_limit import shortened
from penstock.rollout_service.environments.turn_environment import TurnEnvironment
from penstock.rollout_service.proxy.messages import Message, ToolCall

log = structlog.get_logger("rollout.mcp")


@dataclass(frozen=True, slots=True)
class Reached:
    """What all episodes of a worker share to reach the servers."""

    policy: TargetPolicy
    trusted: ssl.SSLContext
    tokens: Mapping[str, str]  # by the server's name


@dataclass(frozen=True, slots=True)
class _Tool:
    """A tool of a server, and its name there."""

    connection: McpConnection
    name: str
    described: Any

    def as_function(self, name: str) -> dict[str, Any]:
        """Return it as the chat completions API describes a function."""
        function = {
            "name": name,
            "description": self.described.description or "",
            "parameters": self.described.input_schema,
        }
        return {"type": "function", "function": function}


class McpPlay(Play):
    """One episode."""

    def __init__(self, seed: int, row: Row, options: McpOptions, reached: Reached) -> None:
        """Note the options; nothing is connected before `start`. Raises ValueError for a row without a prompt."""
        if not row.messages or row.messages[-1].role != "user":
            raise ValueError("its messages are none, or do not end with one of the user")
        self._seed, self._row, self._options, self._reached = seed, row, options, reached
        self._connections: list[McpConnection] = []
        self._tools: dict[str, _Tool] = {}
        self._reward: _Tool | None = None

    async def start(self) -> Sequence[Message]:
        """Connect to all servers, learn their tools, and return the row's messages; raises ServerFailed, or ConfigError for a tool that none has."""
        named = [(name, self._connection(name, server)) for name, server in self._options.servers.items()]
        self._connections = [connection for _, connection in named]
        listed = await _all(connection.open() for connection in self._connections)
        found: dict[str, _Tool] = {}
        for (server, connection), tools in zip(named, listed, strict=True):
            for tool in tools:
                name = f"{server}__{tool.name}" if len(named) > 1 else tool.name
                found[name] = _Tool(connection, tool.name, tool)
        wanted = self._options.tools or [name for name in found if name != self._options.reward_tool]
        missing = {*wanted, *filter(None, [self._options.reward_tool])} - set(found)
        if missing:
            raise ConfigError(
                f"no MCP server has the tools {sorted(missing)}; they have {', '.join(sorted(found)) or 'none'}"
            )
        self._tools = {name: found[name] for name in wanted}
        self._reward = found.get(self._options.reward_tool)
        self.tools = tuple(tool.as_function(name) for name, tool in self._tools.items())
        return self._row.messages

    async def step(self, answer: Message) -> Reply:
        """Make the calls of an answer and reply with their results; an answer without one ends the episode. Raises ServerFailed."""
        if not answer.tool_calls:
            return done(await self._rewarded(answer.content))
        results = await _all(self._result(call, number) for number, call in enumerate(answer.tool_calls))
        messages = [
            Message("tool", self._cut(result.text), tool_call_id=call.id, name=call.name)
            for call, result in zip(answer.tool_calls, results, strict=True)
        ]
        errors = sum(result.is_error for result in results)
        return Reply(tuple(messages), parts={"tool_calls": float(len(results)), "tool_errors": float(errors)})

    async def score(self) -> float:
        """Return the reward of an episode that ended without a last answer."""
        return await self._rewarded("")

    async def close(self) -> None:
        """End the sessions, and the processes of servers."""
        await _all(connection.close() for connection in self._connections)

    async def _result(self, call: ToolCall, number: int) -> Result:
        if number >= self._options.max_parallel_calls:
            return _error(f"only the first {self._options.max_parallel_calls} calls of an answer are made")
        tool = self._tools.get(call.name)
        if tool is None:
            return _error(f"there is no tool {call.name[:100]!r}; there are {', '.join(self._tools) or 'none'}")
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError) as err:
            return _error(f"the arguments are no JSON: {str(err)[:200]}")
        if not isinstance(arguments, dict):
            return _error("the arguments are no JSON object")
        return await tool.connection.call(tool.name, arguments)

    async def _rewarded(self, answer: str) -> float:
        if self._reward is None:
            return 0.0
        known = self._reward.described.input_schema.get("properties", {})
        given = {"answer": answer, "ground_truth": self._row.ground_truth}
        result = await self._reward.connection.call(
            self._reward.name, {key: value for key, value in given.items() if key in known}
        )
        value = None if result.is_error else _reward_of(result)
        if value is None:
            raise ServerFailed(
                f'the tool {self._options.reward_tool} returns no reward (a number, or {{"reward": NUMBER}}): {result.text[:200]!r}'
            )
        return value

    def _cut(self, text: str) -> str:
        return shortened(text, self._options.max_output_chars, self._options.output_cut)

    def _connection(self, name: str, server: McpServer) -> McpConnection:
        known, options = transports.ServerProcess(), self._options
        if server.url:
            headers = {"Penstock-Seed": str(self._seed)}
            if name in self._reached.tokens:
                headers["Authorization"] = f"Bearer {self._reached.tokens[name]}"
            transport = transports.over_http(
                server.url,
                headers,
                self._reached.policy,
                self._reached.trusted,
                max_answer_bytes=options.max_message_bytes,
            )
        else:
            passed = program_process.passed(server.pass_variables)
            variables = {**passed, **server.variables, "PENSTOCK_SEED": str(self._seed)}
            transport = transports.over_process(
                server.command, Path(server.folder), variables, max_message_bytes=options.max_message_bytes, known=known
            )
        return McpConnection(
            name, transport, mode=server.protocol, call_deadline_s=options.call_deadline_s, known=known.text
        )


class Mcp(TurnEnvironment):
    """The environment ``mcp``."""

    name = "mcp"
    options = McpOptions

    def __init__(self) -> None:
        """Start without servers."""
        super().__init__()
        self._own: tuple[OwnServer, ...] = ()
        self._reached: Reached | None = None

    def never_call(self, servers: Sequence[OwnServer]) -> None:
        """Note the run's own servers, which no URL may lead to."""
        self._own = tuple(servers)

    def defined(self, name: str, definition: EnvironmentDefinition) -> Self:
        """Return this environment under another name; raises ConfigError for a deadline of replies that is over before one of calls."""
        other = super().defined(name, definition)
        least = other.chosen.call_deadline_s + LISTS_WITHIN_S
        if definition.reply_deadline_s <= least:
            raise ConfigError(
                f"environment.define.{name}.reply_deadline_s = {definition.reply_deadline_s:g}: expected more than {least:g}, which is "
                f"options.call_deadline_s and {LISTS_WITHIN_S:g} s to see whether the server still answers"
            )
        return other

    def use_model(self, folder: Path, context_tokens: int | None) -> None:
        """Note where the model is, and read the tokens; raises ConfigError without the library, or for a file that cannot be read."""
        super().use_model(folder, context_tokens)
        if self.chosen is not None:
            self.prepare()

    def prepare(self) -> None:
        """Read the tokens; raises ConfigError."""
        transports.library()
        tokens = {name: _token(name, one.token_file) for name, one in self.chosen.servers.items() if one.token_file}
        policy = TargetPolicy(self.chosen.allowed_targets, self._own, key="options.allowed_targets")
        self._reached = Reached(policy, http_tls.trust_own_authority(ssl.create_default_context()), tokens)

    def play(self, seed: int, row: Row, options: McpOptions) -> McpPlay:
        """Return the play of one episode."""
        if self._reached is None:
            raise ValueError(
                'mcp needs servers: write [environment.define.NAME] with type = "mcp" and options.servers, and name that'
            )
        return McpPlay(seed, row, options, self._reached)

    async def attempt(self, site: Site, begun: Begun, sampler: Sampler) -> Attempt:
        """Play one episode; raises EngineError, or RowUnfit where nothing would give a reward."""
        if begun.task.reward.name == "environment" and self.chosen is not None and not self.chosen.reward_tool:
            raise RowUnfit(
                'an MCP server gives no reward: write options.reward_tool, or another reward.name than "environment"'
            )
        return await super().attempt(site, begun, sampler)

    def _prepare(self) -> Site:
        killed, deleted = program_process.sweep(Path(tempfile.gettempdir()))
        if killed or deleted:
            log.warning("servers of a worker that is gone", processes_killed=killed, folders_deleted=deleted)
        return super()._prepare()


async def _all(work: Any) -> list[Any]:
    """Return the results of coroutines that run side by side; the first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _error(text: str) -> Result:
    return Result(f"error: {text}", is_error=True)


def _reward_of(result: Result) -> float | None:
    """Return the reward that a result holds; None if it holds none."""
    value = result.structured
    if value is None:
        try:
            value = json.loads(result.text)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, dict):
        value = value.get("reward", value.get("result"))  # the library wraps a plain number as result
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _token(name: str, file: Path) -> str:
    """Return the token of a file; raises ConfigError, which never shows it."""
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(
            f"options.servers.{name}.token_file {file}: not readable as ASCII ({type(err).__name__})"
        ) from None
    if not token or not token.isprintable() or " " in token:
        raise ConfigError(f"options.servers.{name}.token_file {file}: expected one token without spaces")
    return token


MCP = Mcp()
