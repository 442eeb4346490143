"""`openenv`: an environment that an OpenEnv server plays (docs/environments_of_others.md); its package is not needed.

Each episode is a separate session: one WebSocket (`/ws`) with the messages of OpenEnv 0.10
(`openenv/core/env_server/types.py`). A server has few sessions; one that is full is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from pydantic import Field, JsonValue

from penstock.agents.environments.adapters.text_steps import text_of
from penstock.agents.environments.games.actions import ActionOptions, find_action, malformed, opening
from penstock.agents.environments.over_http.servers import Server, ServerFull, Servers, open_session
from penstock.agents.environments.play import Play, Reply, Row, called, parsed_json, read_arguments
from penstock.agents.environments.shared_options import SessionOptions, urls_of
from penstock.agents.environments.turn_environment import ServerEnvironment
from penstock.agents.proxy.api.fields import function_tool
from penstock.agents.proxy.messages import Message, ToolCall
from penstock.protocol.errors import PenstockError
from penstock.serving import strict_json
from penstock.serving.http_connections import ConnectionFailed, HttpConnections
from penstock.serving.target_policy import OwnServer

_KEEP_S = 60.0
_OPEN_S = 15.0  # to accept a session; its reset takes as long as a reply may
_CLOSE_S = 5.0


class OpenEnvOptions(SessionOptions, ActionOptions):
    """Options of ``openenv``."""

    reset: dict[str, JsonValue] = Field(
        default_factory=dict, description="Arguments of reset besides seed and episode_id."
    )
    row_reset: list[str] = Field(
        default_factory=list, description="Arguments of reset that are taken from the row's extra_info."
    )
    rules: str = Field(
        "", description='What stands before the first observation; instructions = "row" takes the row\'s prompt.'
    )
    observation: str = Field(
        "",
        description="The field of the observation that the policy reads, such as `prompt` or `messages.-1.content`; "
        "empty: all of it as JSON.",
    )
    action: dict[str, JsonValue] = Field(default_factory=dict, description="Fields of every action.")
    action_field: str = Field(
        "message",
        description="The field of the action that gets the policy's action; empty: the policy writes all fields, "
        "as a JSON object.",
    )
    tools: bool = Field(
        False,
        description="The environment has tools: the policy calls them, and an answer without a call ends the episode.",
    )
    max_message_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, le=64 * 1024 * 1024, description="Longest message of the server that is read."
    )


class OpenEnvFailed(PenstockError):
    """The server failed, or answers what the protocol does not know: the episode is restarted."""


class ActionRefused(Exception):
    """The server does not take an action for one of its environment."""


class OpenEnvSession:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse, server: Server) -> None:
        self._socket, self._server = socket, server

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        url = self._server.url
        try:
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
            received = await self._socket.receive()
        except (aiohttp.ClientError, ConnectionError) as err:
            raise OpenEnvFailed(f"{url}: the session broke: {type(err).__name__}: {err}") from None
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise OpenEnvFailed(f"{url}: the session ended ({received.type.name}) before the answer to {kind}")
        try:
            answer = strict_json.loads(received.data.encode())
        except strict_json.AmbiguousJson as err:
            raise OpenEnvFailed(f"{url} answers {kind} with something other than JSON: {err}") from None
        said = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(said, dict):
            raise OpenEnvFailed(f"{url} answers {kind} with {str(answer)[:200]!r}")
        if answer.get("type") == "error":
            text = (
                f"{said.get('code')}: {str(said.get('message'))[:500]} {str(said.get('errors') or '')[:500]}".rstrip()
            )
            if kind == "step" and said.get("code") == "VALIDATION_ERROR":
                raise ActionRefused(text)
            if said.get("code") == "CAPACITY_REACHED":
                raise ServerFull(text)
            raise OpenEnvFailed(f"{url} answers {kind} with {text}")
        return said

    async def close(self) -> None:
        self._server.running -= 1
        await self.disconnect()

    async def disconnect(self) -> None:
        """End the session; the server ends the episode. The connection of one that does not answer is cut."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._socket.close()


class Sessions:
    def __init__(self, options: OpenEnvOptions, own_servers: Sequence[OwnServer]) -> None:
        self._connections = HttpConnections(keep_s=_KEEP_S, policy=options.policy(own_servers))
        self._servers = Servers(urls_of(options.url))
        self._options = options

    async def open(self, reset: Mapping[str, Any]) -> tuple[OpenEnvSession, dict[str, Any]]:
        async def start(server: Server, undo: contextlib.AsyncExitStack) -> tuple[OpenEnvSession, dict[str, Any]]:
            url = f"{server.url}/ws"
            try:
                async with asyncio.timeout(_OPEN_S):
                    socket = await self._connections.websocket(url, max_message_bytes=self._options.max_message_bytes)
            except TimeoutError:
                raise ConnectionFailed(url, f"no session was opened within {_OPEN_S:g} s") from None
            session = OpenEnvSession(socket, server)
            undo.push_async_callback(session.disconnect)
            return session, await session.ask("reset", reset)

        return await open_session(self._servers, start, self._options.place_deadline_s, OpenEnvFailed)

    async def close(self) -> None:
        await self._connections.close()


class OpenEnvPlay(Play):
    def __init__(self, seed: int, row: Row, options: OpenEnvOptions, sessions: Sessions) -> None:
        missing = [name for name in options.row_reset if name not in row.extra_info]
        if missing:
            raise ValueError(f"options.row_reset: its extra_info has no {', '.join(missing)}")
        self._seed, self._row, self._options, self._sessions = seed, row, options, sessions
        self._session: OpenEnvSession | None = None
        self._shown = ""

    async def start(self) -> tuple[Message, ...]:
        row_fields = {name: self._row.extra_info[name] for name in self._options.row_reset}
        episode = secrets.token_hex(8)
        reset = {**self._options.reset, **row_fields, "seed": self._seed % 2**32, "episode_id": episode}
        self._session, first = await self._sessions.open(reset)
        if first.get("done"):
            raise OpenEnvFailed("the episode is over after its reset")
        if self._options.tools:
            self.tools = await self._listed()
        self._shown = self._text(first)
        return opening(self._row, self._options, self._options.rules, self._shown)

    async def step(self, answer: Message) -> Reply:
        return await (self._called(answer) if self._options.tools else self._acted(answer))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _acted(self, answer: Message) -> Reply:
        action = find_action(answer.content, self._options)
        fields: Any = {self._options.action_field: action} if self._options.action_field else parsed_json(action)
        if not action or not isinstance(fields, dict):
            return malformed(self._options, f"The answer holds no action.\n{self._shown}", self._shown, {})
        try:
            result = await self._ask("step", {**self._options.action, **fields})
        except ActionRefused as err:
            return malformed(self._options, f"The answer is no action: {err}\n{self._shown}", self._shown, {})
        self._shown = self._text(result)
        reward = _reward(result)
        if result.get("done"):
            return Reply(reward=reward, is_done=True)
        return Reply((Message("user", self._shown),), reward)

    async def _called(self, answer: Message) -> Reply:
        results: list[tuple[str, bool]] = []
        reward, is_done = 0.0, not answer.tool_calls
        for call in answer.tool_calls:
            text, result = await self._result(call)
            reward += _reward(result)
            results.append((text, text.startswith("error: ")))
            if is_done := bool(result.get("done")):
                break
        return called(answer.tool_calls, results, reward, is_done=is_done)

    async def _result(self, call: ToolCall) -> tuple[str, dict[str, Any]]:
        try:
            arguments = read_arguments(call)
        except ValueError as err:
            return f"error: {err}", {}
        try:
            result = await self._ask("step", {"type": "call_tool", "tool_name": call.name, "arguments": arguments})
        except ActionRefused as err:
            return f"error: {err}", {}
        observation = result.get("observation")
        if not isinstance(observation, dict):
            raise OpenEnvFailed(f"a call is answered with {str(result)[:200]!r}")
        error = observation.get("error")
        if error:
            return f"error: {error.get('message', error) if isinstance(error, dict) else error}", result
        return _tool_text(observation.get("result")), result

    async def _listed(self) -> tuple[dict[str, Any], ...]:
        answer = await self._ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        tools = (answer.get("result") or {}).get("tools")
        if not isinstance(tools, list) or not tools:
            raise OpenEnvFailed(f"options.tools is true, and the environment lists no tools: {str(answer)[:300]}")
        schemas = (tool.get("inputSchema") or tool.get("input_schema") or None for tool in tools)
        return tuple(
            function_tool(tool["name"], tool.get("description") or "", schema, "tools")
            for tool, schema in zip(tools, schemas, strict=True)
        )

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._session is not None
        return await self._session.ask(kind, data)

    def _text(self, result: Mapping[str, Any]) -> str:
        observation = result.get("observation")
        try:
            return text_of(_at(observation, self._options.observation))
        except (KeyError, IndexError, TypeError, ValueError):
            field = self._options.observation
            raise OpenEnvFailed(f"options.observation = {field!r} is not in {str(observation)[:300]}") from None


def _at(observation: Any, path: str) -> Any:
    if not path and isinstance(observation, dict):
        return {name: field for name, field in observation.items() if name != "metadata"}
    for step in filter(None, path.split(".")):
        observation = observation[int(step)] if isinstance(observation, list) else observation[step]
    return observation


def _reward(result: Mapping[str, Any]) -> float:
    value = result.get("reward")
    return 0.0 if value is None else value


def _tool_text(result: Any) -> str:
    blocks = result.get("content") if isinstance(result, dict) else None
    texts = (
        [block.get("text") if isinstance(block, dict) else None for block in blocks]
        if isinstance(blocks, list)
        else [None]
    )
    return "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else text_of(result)


class OpenEnv(ServerEnvironment):
    name = "openenv"
    options = OpenEnvOptions
    sessions_class = Sessions
    play_class = OpenEnvPlay


OPENENV = OpenEnv()
