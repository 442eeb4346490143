"""Calls to one engine, each with a deadline; every failure is an EngineError."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from penstock.rollout_service.engines.completion import shorten
from penstock.rollout_service.errors import EngineRefused, EngineTimeout, EngineUnreachable, ReplyRefused
from penstock.serving.http_connections import AnswerRefused, ConnectionFailed, HttpConnections

_KEEP_S = 3.0  # less than the 5 s after which uvicorn, which all engines use, closes an idle connection


class EngineHttp:
    """Connections to one engine."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._connections = HttpConnections(keep_s=_KEEP_S, headers=headers)

    async def close(self) -> None:
        await self._connections.close()

    async def call(self, method: str, path: str, body: Any, deadline_s: float, *, parse: bool = True) -> Any:
        """Return the engine's answer, read as JSON or as text.

        Raises EngineTimeout, EngineUnreachable, EngineRefused for an HTTP error, ReplyRefused for what is not JSON.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._connections.send(method, f"{self.url}{path}", data)
        except TimeoutError:
            raise EngineTimeout(f"{self.url}{path} gave no answer within {deadline_s:g} s") from None
        except ConnectionFailed as err:
            raise EngineUnreachable(str(err)) from None
        except AnswerRefused as err:
            raise ReplyRefused(str(err)) from None
        if answer.status != HTTPStatus.OK:
            raise EngineRefused(
                f"{self.url}{path} answered {answer.status}: {shorten(answer.body.decode('utf-8', 'replace'))}",
                status=answer.status,
            )
        if not parse:
            return answer.body.decode("utf-8", "replace")
        try:
            return json.loads(answer.body)
        except ValueError as err:
            raise ReplyRefused(
                f"{self.url}{path} answered what is not JSON ({err}): {shorten(answer.body.decode('utf-8', 'replace'))}"
            ) from None
