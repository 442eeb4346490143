"""The adapter file of httpx: calls to one engine, each with a deadline; every failure is an EngineError."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from penstock.rollout_service.engines.completion import shorten
from penstock.rollout_service.errors import EngineRefused, EngineTimeout, EngineUnreachable, ReplyRefused

_CONNECT_S = 5.0


class EngineHttp:
    """Connections to one engine."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        """Prepare; nothing is sent before the first call."""
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # an engine on loopback is never behind a proxy
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def call(self, method: str, path: str, body: Any, deadline_s: float, *, parse: bool = True) -> Any:
        """Return the engine's answer, read as JSON or as text.

        Raises EngineTimeout, EngineUnreachable, EngineRefused for an HTTP error, ReplyRefused for what is not JSON.
        """
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._client.request(method, path, json=body)
        except TimeoutError:
            raise EngineTimeout(f"{self.url}{path} gave no answer within {deadline_s:g} s") from None
        except (httpx.HTTPError, RuntimeError) as err:
            if isinstance(err, RuntimeError) and not self._client.is_closed:
                raise
            raise EngineUnreachable(f"{self.url}{path}: {type(err).__name__} {err}".rstrip()) from None
        if response.status_code != httpx.codes.OK:
            raise EngineRefused(
                f"{self.url}{path} answered {response.status_code}: {shorten(response.text)}",
                status=response.status_code,
            )
        if not parse:
            return response.text
        try:
            return json.loads(response.content)
        except ValueError as err:
            raise ReplyRefused(
                f"{self.url}{path} answered what is not JSON ({err}): {shorten(response.text)}"
            ) from None
