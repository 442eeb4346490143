"""A session with an OpenEnv server: one WebSocket (`/ws`), one episode; and a free one among several servers.

The messages are those of OpenEnv 0.10 (`openenv/core/env_server/types.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from penstock.agents.environments.adapters.open_env.options import OpenEnvOptions
from penstock.agents.environments.over_http.servers import Server, Servers, take_place
from penstock.protocol.errors import PenstockError
from penstock.serving import strict_json
from penstock.serving.http_connections import ConnectionFailed, HttpConnections
from penstock.serving.target_policy import OwnServer, TargetPolicy

_KEEP_S = 60.0
_OPEN_S = 15.0  # to accept a session; its reset takes as long as a reply may
_CLOSE_S = 5.0
_FULL_S = 1.0  # between two questions of a server without a free session


class OpenEnvFailed(PenstockError):
    """The server failed, or answers what the protocol does not know: the episode is begun again."""


class ActionRefused(Exception):
    """The server does not take an action for one of its environment."""


class OpenEnvSession:
    """One session of a server."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, server: Server) -> None:
        """Note an open socket."""
        self._socket, self._server = socket, server

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of the answer to one message; raises OpenEnvFailed, and ActionRefused."""
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
            raise OpenEnvFailed(f"{url} answers {kind} with what is no JSON: {err}") from None
        said = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(said, dict):
            raise OpenEnvFailed(f"{url} answers {kind} with {str(answer)[:200]!r}")
        if answer.get("type") == "error":
            text = (
                f"{said.get('code')}: {str(said.get('message'))[:500]} {str(said.get('errors') or '')[:500]}".rstrip()
            )
            if kind == "step" and said.get("code") == "VALIDATION_ERROR":
                raise ActionRefused(text)
            raise (
                _Full(text)
                if said.get("code") == "CAPACITY_REACHED"
                else OpenEnvFailed(f"{url} answers {kind} with {text}")
            )
        return said

    async def close(self) -> None:
        """End the session; the server ends the episode. The connection of one that does not answer is cut."""
        self._server.running -= 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._socket.close()


class _Full(PenstockError):
    """The server has no free session."""


class Sessions:
    """The servers of one environment, and the connections to them."""

    def __init__(self, options: OpenEnvOptions, own: Sequence[OwnServer]) -> None:
        """Prepare; nothing is opened before the first episode."""
        policy = TargetPolicy(options.allowed_targets, own, key="options.allowed_targets")
        self._connections = HttpConnections(keep_s=_KEEP_S, policy=policy)
        self._servers = Servers(options.urls)
        self._options = options

    async def open(self, reset: Mapping[str, Any]) -> tuple[OpenEnvSession, dict[str, Any]]:
        """Return a session and the answer to its reset; waits for a free one. Raises OpenEnvFailed."""
        ends, last = time.monotonic() + self._options.place_deadline_s, "all servers rest"
        while (server := await take_place(self._servers, ends)) is not None:
            try:
                return await self._open_at(server, reset)
            except _Full as err:
                server.is_full(time.monotonic(), _FULL_S)
                last = str(err)
            except ConnectionFailed as err:
                server.failed(time.monotonic())
                last = str(err)
        raise OpenEnvFailed(
            f"no session within {self._options.place_deadline_s:g} s (options.place_deadline_s): {last}"
        )

    async def _open_at(self, server: Server, reset: Mapping[str, Any]) -> tuple[OpenEnvSession, dict[str, Any]]:
        url = f"{server.url}/ws"
        try:
            async with asyncio.timeout(_OPEN_S):
                socket = await self._connections.websocket(url, max_message_bytes=self._options.max_message_bytes)
        except BaseException as err:
            server.running -= 1  # of the place that was taken; later the session gives it back
            if isinstance(err, TimeoutError):
                raise ConnectionFailed(url, f"no session was opened within {_OPEN_S:g} s") from None
            raise
        session = OpenEnvSession(socket, server)
        try:
            first = await session.ask("reset", reset)
        except BaseException as err:
            if not isinstance(err, _Full):  # cancelled: the reset took longer than a reply may
                server.failed(time.monotonic())
            await session.close()
            raise
        server.works()
        return session, first

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()
