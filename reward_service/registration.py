"""Telling a reward service over HTTP where an endpoint is, and that it is gone."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass

import httpx

from protocol.errors import PenstockError

_DEADLINE_S = 60.0  # the service may be starting at the same time
_TRY_S = 5.0
_PAUSE_S = 0.5
_PASSES = frozenset({429, 502, 503, 504})


class NotRegistered(PenstockError):
    """The reward service refused the endpoint or could not be reached."""


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where a reward service's API is, and its bearer token."""

    url: str
    token: str = ""


async def register(service: ServiceAddress, *, name: str, url: str, version: str) -> None:
    """Register an endpoint, taking its name over from an earlier life; raises NotRegistered."""
    body = {"name": name, "url": url, "version": version, "replace": True}
    deadline = time.monotonic() + _DEADLINE_S
    async with _client(service) as client:
        while True:
            problem = ""
            try:
                answer = await client.post("/v1/endpoints", json=body)
            except httpx.TransportError as err:
                problem = f"no answer ({type(err).__name__}: {err})"
            else:
                if answer.is_success:
                    return
                problem = f"HTTP {answer.status_code}: {answer.text[:300]}"
                if answer.status_code not in _PASSES:
                    raise NotRegistered(f"the reward service at {service.url} refused reward {name!r}: {problem}")
            if time.monotonic() > deadline:
                raise NotRegistered(
                    f"reward {name!r} could not be registered at {service.url} within {_DEADLINE_S:.0f} s: {problem}; "
                    "is the reward service running there? (penstock reward service)"
                )
            await asyncio.sleep(_PAUSE_S)


async def unregister(service: ServiceAddress, *, name: str, url: str) -> None:
    """Unregister the endpoint if the name is still ours; a service that is away is only told of in a line."""
    async with _client(service) as client:
        try:
            await client.delete(f"/v1/endpoints/{name}", params={"url": url})
        except httpx.TransportError as err:
            sys.stderr.write(f"reward {name} stays registered: {service.url} does not answer ({type(err).__name__})\n")


def _client(service: ServiceAddress) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {service.token}"} if service.token else {}
    return httpx.AsyncClient(base_url=service.url, headers=headers, timeout=_TRY_S, trust_env=False)
