"""The adapter file of aiohttp: calls to one engine, each with a deadline; every failure is an EngineError.

aiohttp, because a worker has hundreds of requests open at once, an agent's turn being one each: with 1,000 of them httpx takes
13 ms of CPU for a request, most of it in its pool, and aiohttp 0.9.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

import aiohttp

from penstock.rollout_service.engines.completion import shorten
from penstock.rollout_service.errors import EngineRefused, EngineTimeout, EngineUnreachable, ReplyRefused

_CONNECT_S = 5.0
_KEEP_S = 3.0  # less than the 5 s after which uvicorn, which all engines use, closes an idle connection


class EngineHttp:
    """Connections to one engine."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        """Prepare; nothing is sent before the first call."""
        self.url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def call(self, method: str, path: str, body: Any, deadline_s: float, *, parse: bool = True) -> Any:
        """Return the engine's answer, read as JSON or as text.

        Raises EngineTimeout, EngineUnreachable, EngineRefused for an HTTP error, ReplyRefused for what is not JSON.
        """
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._connections().request(method, f"{self.url}{path}", json=body, allow_redirects=False) as response,
            ):
                content = await response.read()
        except aiohttp.ServerTimeoutError as err:  # to connect
            raise EngineUnreachable(f"{self.url}{path}: {err}") from None
        except TimeoutError:
            raise EngineTimeout(f"{self.url}{path} gave no answer within {deadline_s:g} s") from None
        except aiohttp.ClientError as err:
            raise EngineUnreachable(f"{self.url}{path}: {type(err).__name__} {err}".rstrip()) from None
        if response.status != HTTPStatus.OK:
            raise EngineRefused(
                f"{self.url}{path} answered {response.status}: {shorten(content.decode('utf-8', 'replace'))}",
                status=response.status,
            )
        if not parse:
            return content.decode("utf-8", "replace")
        try:
            return json.loads(content)
        except ValueError as err:
            raise ReplyRefused(
                f"{self.url}{path} answered what is not JSON ({err}): {shorten(content.decode('utf-8', 'replace'))}"
            ) from None

    def _connections(self) -> aiohttp.ClientSession:
        """Return the session, made with the first call, since it belongs to the running loop; raises EngineUnreachable once closed."""
        if self._is_closed:
            raise EngineUnreachable(f"{self.url}: this client has been closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            )
        return self._session
