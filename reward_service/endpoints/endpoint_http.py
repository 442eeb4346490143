"""The adapter of httpx: one request to an endpoint, to an address that was checked, with a bound on its answer.

Redirects are not followed and environment proxies are not used. A name is resolved once for each connection, every
address it has is checked, and a checked one is connected to, so that the name cannot resolve differently in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from penstock.reward_service.endpoints.target_policy import TargetPolicy
from penstock.reward_service.errors import EndpointFailed, EndpointNonsense, EndpointRefused

_CONNECT_S = 5.0
_IDLE_CONNECTIONS = 32
# A pool of their own: a name server that hangs must not block the threads that fetch packs.
_RESOLVERS = ThreadPoolExecutor(16, thread_name_prefix="resolve")


class NoAnswer(Exception):
    """The connection could not be made, or broke before the answer was complete."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class EndpointHttp:
    """Sends requests to endpoints. Close it."""

    def __init__(self, policy: TargetPolicy, *, max_response_bytes: int) -> None:
        """``policy`` decides which addresses may be called; longer answers than the maximum are not read."""
        self._policy = policy
        self._max_bytes = max_response_bytes
        self._http = httpx.AsyncClient(
            transport=_CheckedTransport(policy),
            follow_redirects=False,
            trust_env=False,
            timeout=None,  # noqa: S113 every call has the endpoint's own deadline
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def check(self, url: str) -> None:
        """Raise EndpointRefused unless the URL may be called; a host that does not resolve yet passes."""
        self._policy.check_url(url)
        host, port = _host_and_port(httpx.URL(url))
        try:
            addresses = await resolve(host, port)
        except OSError:
            return
        for address in addresses:
            self._policy.check_address(host, address, port)

    async def send(
        self, method: str, url: str, *, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send one request and read its answer; the caller sets the deadline.

        Raises NoAnswer when the connection fails, EndpointFailed when the address may not be called, and
        EndpointNonsense for an answer that is too large or compressed.
        """
        given = {
            **(headers or {}),
            "accept-encoding": "identity",
        }  # an answer that decompresses to a large one is not read
        try:
            async with self._http.stream(method, url, content=body, headers=given) as response:
                return Answer(response.status_code, response.headers, await self._read(response, url))
        except EndpointRefused as err:
            raise EndpointFailed(f"{url} may not be called: {err}") from None
        except httpx.TransportError as err:
            raise NoAnswer(describe(err)) from None

    async def _read(self, response: httpx.Response, url: str) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise EndpointNonsense(f"{url} compresses its answer, which was not requested")
        answer = bytearray()
        async for chunk in response.aiter_raw():
            answer += chunk
            if len(answer) > self._max_bytes:
                raise EndpointNonsense(
                    f"{url} answers with more than {self._max_bytes} bytes (reward_service.max_response_bytes)"
                )
        return bytes(answer)


class _CheckedTransport(httpx.AsyncHTTPTransport):
    """Resolves a name once, checks its addresses against the policy, and connects to a checked one."""

    def __init__(self, policy: TargetPolicy) -> None:
        super().__init__(limits=httpx.Limits(max_connections=None, max_keepalive_connections=_IDLE_CONNECTIONS))
        self._policy = policy

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._policy.check_url(str(request.url))
        host, port = _host_and_port(request.url)
        try:
            async with asyncio.timeout(_CONNECT_S):
                addresses = await resolve(host, port)
        except (OSError, TimeoutError) as err:
            raise httpx.ConnectError(f"{host} does not resolve: {describe(err)}") from None
        for address in addresses:
            self._policy.check_address(host, address, port)
        timeouts: dict[str, Any] = {"connect": _CONNECT_S, "read": None, "write": None, "pool": None}
        extensions = {**request.extensions, "sni_hostname": host, "timeout": timeouts}
        failure: httpx.ConnectError | httpx.ConnectTimeout | None = None
        for address in addresses:
            try:
                return await super().handle_async_request(
                    httpx.Request(
                        request.method,
                        request.url.copy_with(host=address),
                        headers=request.headers,  # Host was set from the name already
                        stream=request.stream,
                        extensions=extensions,
                    )
                )
            except (httpx.ConnectError, httpx.ConnectTimeout) as err:
                failure = err
        raise failure or httpx.ConnectError(f"{host} has no address")


def _host_and_port(url: httpx.URL) -> tuple[str, int]:
    return url.host, url.port or (443 if url.scheme == "https" else 80)


async def resolve(host: str, port: int) -> list[str]:
    """Return all addresses of a name; raises OSError when it has none."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, look_up)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def describe(err: Exception) -> str:
    """Return an exception's class and text; many network errors have no text."""
    return f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
