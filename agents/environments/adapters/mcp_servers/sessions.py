"""The sessions of one episode with its MCP servers, and what all episodes of a worker share to have them.

The environments `mcp` and `tools` have episodes with such sessions.
"""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import structlog

from penstock.agents.environments import program_process
from penstock.agents.environments.adapters.mcp_servers import transports
from penstock.agents.environments.adapters.mcp_servers.connection import McpConnection
from penstock.agents.environments.adapters.mcp_servers.options import McpServer
from penstock.agents.environments.server_token import read_token
from penstock.protocol.transport import http_tls
from penstock.serving.target_policy import OwnServer, TargetPolicy

log = structlog.get_logger("rollout.mcp")

_Value = TypeVar("_Value")


class SessionOptions(Protocol):
    """The options of an environment that its sessions need."""

    @property
    def servers(self) -> Mapping[str, McpServer]: ...

    @property
    def call_deadline_s(self) -> float: ...

    @property
    def max_message_bytes(self) -> int: ...

    @property
    def allowed_targets(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class Reached:
    """What all episodes of a worker share to reach the servers."""

    policy: TargetPolicy
    trusted: ssl.SSLContext
    tokens: Mapping[str, str]  # by the server's name

    @classmethod
    def of(cls, options: SessionOptions, own: Sequence[OwnServer]) -> Self:
        """Read the tokens; ``own`` are the run's servers. Raises ConfigError without the library, or for a file that cannot be read."""
        transports.library()
        tokens = {
            name: read_token(one.token_file, f"options.servers.{name}.token_file")
            for name, one in options.servers.items()
            if one.token_file
        }
        policy = TargetPolicy(options.allowed_targets, own, key="options.allowed_targets")
        return cls(policy, http_tls.trust_own_authority(ssl.create_default_context()), tokens)


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a server, in one episode."""

    server: str
    name: str  # at its server
    connection: McpConnection
    described: Any

    def as_function(self, name: str) -> dict[str, Any]:
        """Return it as the chat completions API describes a function of this name."""
        function = {
            "name": name,
            "description": self.described.description or "",
            "parameters": self.described.input_schema,
        }
        return {"type": "function", "function": function}


class McpSessions:
    """One episode's sessions, one with each server."""

    def __init__(self, seed: int, options: SessionOptions, reached: Reached) -> None:
        """Nothing is connected before `open`."""
        self._connections = {
            name: _connection(name, server, seed, options, reached) for name, server in options.servers.items()
        }

    async def open(self) -> list[ServerTool]:
        """Connect to all servers, and return their tools in the servers' order; raises ServerFailed."""
        listed = await side_by_side(connection.open() for connection in self._connections.values())
        named = zip(self._connections.items(), listed, strict=True)
        return [
            ServerTool(server, tool.name, connection, tool) for (server, connection), tools in named for tool in tools
        ]

    async def close(self) -> None:
        """End the sessions, and the processes of servers."""
        await side_by_side(connection.close() for connection in self._connections.values())


def sweep() -> None:
    """End servers of workers that are gone, with what these had started, and delete their folders."""
    killed, deleted = program_process.sweep(Path(tempfile.gettempdir()))
    if killed or deleted:
        log.warning("servers of a worker that is gone", processes_killed=killed, folders_deleted=deleted)


async def side_by_side(work: Iterable[Coroutine[Any, Any, _Value]]) -> list[_Value]:
    """Return the results of coroutines that run side by side; the first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _connection(name: str, server: McpServer, seed: int, options: SessionOptions, reached: Reached) -> McpConnection:
    known = transports.ServerProcess()
    if server.url:
        headers = {"Penstock-Seed": str(seed)}
        if name in reached.tokens:
            headers["Authorization"] = f"Bearer {reached.tokens[name]}"
        transport = transports.over_http(
            server.url, headers, reached.policy, reached.trusted, max_answer_bytes=options.max_message_bytes
        )
    else:
        passed = program_process.passed(server.pass_variables)
        variables = {**passed, **server.variables, "PENSTOCK_SEED": str(seed)}
        transport = transports.over_process(
            server.command, Path(server.folder), variables, max_message_bytes=options.max_message_bytes, known=known
        )
    return McpConnection(
        name, transport, mode=server.protocol, call_deadline_s=options.call_deadline_s, known=known.text
    )
