"""The adapter of aiohttp: one request to an HTTP server over kept connections; the caller sets the deadline.

aiohttp, because a worker has hundreds of requests open at once, an agent's turn being one each: with 1,000 of them httpx takes
13 ms of CPU for a request, most of it in its pool, and aiohttp 0.9. Redirects are not followed, proxies of the environment
variables are not used, and a compressed answer, which nothing asks for, is refused.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from penstock.protocol.endpoints.target_policy import TargetPolicy, resolve
from penstock.protocol.errors import PenstockError
from penstock.protocol.transport import http_tls
from penstock.protocol.transport.tls import client_context, handshake_problem

_CONNECT_S = 5.0


class ConnectionFailed(PenstockError):
    """No connection, or it broke before the answer was complete: whether the request was processed is unknown."""


class AnswerRefused(PenstockError):
    """The server's answer is larger than allowed, or compressed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response; ``headers`` finds names in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    cookies: Mapping[str, str] = field(default_factory=dict)  # that it sets, as they are sent back; none is kept here


class HttpConnections:
    """Connections to servers. For one event loop; close it."""

    def __init__(
        self,
        *,
        keep_s: float,
        headers: Mapping[str, str] | None = None,
        policy: TargetPolicy | None = None,
        max_answer_bytes: int | None = None,
        ca_file: Path | None = None,
        ca_key: str = http_tls.AUTHORITY,
    ) -> None:
        """Prepare; nothing is opened before the first request.

        Args:
            keep_s: Seconds that an idle connection is kept.
            headers: Sent with every request.
            policy: Which addresses may be called; None: any.
            max_answer_bytes: Longest answer that is read; None: any.
            ca_file: Certificates of the only authorities that https servers are trusted by; None: as `http_tls` has it.
            ca_key: The setting that ``ca_file`` is from, for errors.

        Raises ConfigError for a ``ca_file`` that cannot be used.
        """
        self._keep_s = keep_s
        self._headers = dict(headers or {})
        self._policy = policy
        self._max_bytes = max_answer_bytes
        self._ca_key = ca_key
        self._tls = None if ca_file is None else client_context(ca_file, ca_key)
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def close(self) -> None:
        """Close the connections; later requests fail."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def send(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Return the answer; a body is sent as JSON. Raises ConnectionFailed, AnswerRefused, TargetRefused."""
        self._check(url)
        given = dict(headers or {}) if body is None else {"Content-Type": "application/json", **(headers or {})}
        try:
            async with self._connections().request(
                method, url, data=body, headers=given, allow_redirects=False
            ) as response:
                cookies = {name: one.coded_value for name, one in response.cookies.items()}
                return Answer(response.status, response.headers, await self._read(response, url), cookies)
        except aiohttp.ServerTimeoutError as err:  # to connect
            raise ConnectionFailed(f"{url}: {err}") from None
        except aiohttp.ClientError as err:
            problem = handshake_problem(err, url, self._ca_key)
            raise ConnectionFailed(problem or f"{url}: {type(err).__name__} {str(err)[:300]}".rstrip()) from None

    async def websocket(self, url: str, *, max_message_bytes: int) -> aiohttp.ClientWebSocketResponse:
        """Return an open WebSocket to an http:// or https:// URL; raises ConnectionFailed, TargetRefused."""
        self._check(url)
        try:
            return await self._connections().ws_connect(url, max_msg_size=max_message_bytes, compress=0)
        except (aiohttp.ClientError, TimeoutError) as err:
            raise ConnectionFailed(f"{url}: {type(err).__name__} {str(err)[:300]}".rstrip()) from None

    def _check(self, url: str) -> None:
        """Raise TargetRefused for a URL that may not be called; the addresses of a name are checked by the resolver."""
        if self._policy is None:
            return
        host, port = self._policy.check_url(url)
        with contextlib.suppress(ValueError):
            self._policy.check_address(host, str(ipaddress.ip_address(host)), port)

    async def _read(self, response: aiohttp.ClientResponse, url: str) -> bytes:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise AnswerRefused(f"{url} compresses its answer, which was not requested")
        if self._max_bytes is None:
            return await response.read()
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > self._max_bytes:
                raise AnswerRefused(f"{url} answers with more than {self._max_bytes} bytes")
        return bytes(content)

    def _connections(self) -> aiohttp.ClientSession:
        """Return the session, made with the first request, since it belongs to the running loop; raises ConnectionFailed once closed."""
        if self._is_closed:
            raise ConnectionFailed("this client has been closed")
        if self._session is None:
            resolver = None if self._policy is None else _CheckedResolver(self._policy)
            self._session = aiohttp.ClientSession(
                headers={"Accept-Encoding": "identity", **self._headers},
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(
                    limit=0,
                    keepalive_timeout=self._keep_s,
                    resolver=resolver,
                    use_dns_cache=resolver is None,
                    ssl=self._tls or http_tls.client_context(),
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                auto_decompress=False,
            )
        return self._session


class _CheckedResolver(AbstractResolver):
    """Resolves a name once for each connection, and checks every address that it has; a checked one is connected to."""

    def __init__(self, policy: TargetPolicy) -> None:
        self._policy = policy

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await resolve(host, port)
        for address in addresses:
            self._policy.check_address(host, address, port)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Hold nothing."""
