"""Options of MCP servers, and the sessions of one episode with them; for the environments `mcp` and `tools`."""

from __future__ import annotations

import asyncio
import ssl
import sys
import tempfile
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from penstock.agents.environments import program_process
from penstock.agents.environments.adapters import mcp_connection
from penstock.agents.environments.adapters.mcp_connection import McpConnection, Mode, ServerFailed
from penstock.agents.environments.shared_options import (
    CallOptions,
    ProcessOptions,
    TargetOptions,
    called_url,
    read_token,
)
from penstock.agents.environments.tools.tool import Tool, ToolArguments, ToolEpisode, ToolError, ToolUnavailable
from penstock.protocol.transport import tls
from penstock.serving.target_policy import OwnServer, TargetPolicy

_Value = TypeVar("_Value")


class McpServer(ProcessOptions):
    command: list[str] = Field(
        default_factory=list,
        description="Program and arguments of a server that talks over standard input and output; run for each episode.",
    )
    url: str = Field("", description="URL of a server that talks streamable HTTP; one session for each episode.")
    token_file: Path | None = Field(
        None, description="File with a token that is sent to the URL as `Authorization: Bearer`."
    )
    protocol: Mode = Field(
        "session",
        description="session: one that begins with initialize, and keeps state. auto: the newest that the server knows, which may keep none.",
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("write either command or url")
        if self.url:
            called_url(self.url)
        elif self.token_file is not None:
            raise ValueError("token_file is for a url; give a command its token with variables or pass_variables")
        return self


def _named(name: str) -> str:
    if not name.isidentifier() or "__" in name:
        raise ValueError(f"{name!r}: a server's name is made of letters, digits and single underscores")
    return name


ServerName = Annotated[str, AfterValidator(_named)]


class ServerLimits(TargetOptions):
    """What an environment with MCP servers reads of them, and where it may call them."""

    max_message_bytes: int = Field(
        16 * 1024 * 1024,
        ge=65_536,
        description="Longest message of an MCP server that is read; one that sends a longer one has failed.",
    )


class McpOptions(ServerLimits, CallOptions):
    servers: dict[ServerName, McpServer] = Field(
        min_length=1,
        max_length=16,
        description="Servers by name: command, folder, variables and pass_variables, or url, token_file and protocol. With more than one, a tool's name is SERVER__TOOL.",
    )
    tools: list[str] = Field(
        default_factory=list, description="The tools that the policy may call; empty: all but reward_tool."
    )
    reward_tool: str = Field(
        "",
        description='A tool that the policy cannot call: called at the end with what its schema has of answer and ground_truth; it returns a number, or {"reward": NUMBER}.',
    )
    max_parallel_calls: int = Field(
        8, ge=1, le=256,
        description="Calls of one answer that are made, all at once; to the others an error is the answer.",
    )  # fmt: skip

    @model_validator(mode="after")
    def _hides_the_reward(self) -> Self:
        if self.reward_tool and self.reward_tool in self.tools:
            raise ValueError(
                f"reward_tool {self.reward_tool!r} is one of tools, which the policy calls; leave it out there"
            )
        return self


class ReachedOptions(Protocol):
    """What `mcp` and `tools` both say of their servers."""

    @property
    def servers(self) -> Mapping[str, McpServer]: ...

    @property
    def call_deadline_s(self) -> float: ...

    @property
    def max_message_bytes(self) -> int: ...

    def policy(self, own_servers: Sequence[OwnServer]) -> TargetPolicy: ...


@dataclass(frozen=True, slots=True)
class Reached:
    policy: TargetPolicy
    trusted: ssl.SSLContext
    tokens: Mapping[str, str]  # by the server's name

    @classmethod
    def of(cls, options: ReachedOptions, own_servers: Sequence[OwnServer]) -> Self:
        mcp_connection.library()
        tokens = {
            name: read_token(server.token_file, f"options.servers.{name}.token_file")
            for name, server in options.servers.items()
            if server.token_file
        }
        return cls(options.policy(own_servers), tls.trust_own_authority(ssl.create_default_context()), tokens)


@dataclass(frozen=True, slots=True)
class ServerTool:
    server: str
    name: str  # at its server
    connection: McpConnection
    described: Any

    def as_function(self, name: str) -> dict[str, Any]:
        described = {"description": self.described.description or "", "parameters": self.described.input_schema}
        return {"type": "function", "function": {"name": name, **described}}


class McpSessions:
    def __init__(self, seed: int, options: ReachedOptions, reached: Reached) -> None:
        self._connections = {
            name: _connection(name, server, seed, options, reached) for name, server in options.servers.items()
        }

    async def open(self) -> list[ServerTool]:
        listed = await side_by_side(connection.open() for connection in self._connections.values())
        named = zip(self._connections.items(), listed, strict=True)
        return [
            ServerTool(server, tool.name, connection, tool) for (server, connection), tools in named for tool in tools
        ]

    async def close(self) -> None:
        await side_by_side(connection.close() for connection in self._connections.values())


def sweep() -> None:
    """End servers of workers that have exited, with what these had started, and delete their folders."""
    program_process.sweep(Path(tempfile.gettempdir()))


async def side_by_side(work: Iterable[Coroutine[Any, Any, _Value]]) -> list[_Value]:
    """Return the results of coroutines that run side by side; the first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _connection(name: str, server: McpServer, seed: int, options: ReachedOptions, reached: Reached) -> McpConnection:
    known = mcp_connection.ServerProcess()
    if server.url:
        headers = {"Penstock-Seed": str(seed)}
        if name in reached.tokens:
            headers["Authorization"] = f"Bearer {reached.tokens[name]}"
        transport = mcp_connection.over_http(
            server.url, headers, reached.policy, reached.trusted, max_answer_bytes=options.max_message_bytes
        )
    else:
        passed = program_process.passed(server.pass_variables)
        variables = {**passed, **server.variables, "PENSTOCK_SEED": str(seed)}
        transport = mcp_connection.over_process(
            server.command, Path(server.folder), variables, max_message_bytes=options.max_message_bytes, known=known
        )
    return McpConnection(
        name, transport, mode=server.protocol, call_deadline_s=options.call_deadline_s, known=known.text
    )


class AnyArguments(ToolArguments):
    model_config = ConfigDict(extra="allow")


class McpTool(Tool):
    arguments = AnyArguments
    ends_calls = True  # whether the server still answers is found out then
    max_running = sys.maxsize  # each episode has a separate session

    def __init__(self, of: ServerTool) -> None:
        super().__init__()
        self.name = f"{of.server}__{of.name}"
        self.description = of.described.description or ""
        self._of = of

    def schema(self) -> dict[str, Any]:
        return self._of.as_function(self.name)

    async def call(self, arguments: AnyArguments, episode: ToolEpisode) -> str:
        del episode  # the session is the episode's
        try:
            result = await self._of.connection.call(self._of.name, arguments.model_extra or {})
        except ServerFailed as err:
            raise ToolUnavailable(str(err)) from err
        if result.is_late:
            raise TimeoutError(result.text)
        if result.is_error:
            raise ToolError(result.text.removeprefix("error: "))
        return result.text
