"""The adapter of httpx: one request to an endpoint, to an address that was checked, with a bound on its answer.

Nothing that a server sends is quoted in an error, except the header `ERROR_HEADER`: whoever may register an endpoint
could otherwise read from any server that this service reaches.

Redirects are not followed and environment proxies are not used. A name is resolved once for each connection, every
address it has is checked, and a checked one is connected to, so that the name cannot resolve differently in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import httpcore
import httpx

from penstock.protocol.endpoints.target_policy import TargetPolicy, resolve
from penstock.protocol.errors import TargetRefused
from penstock.protocol.transport import http_tls
from penstock.reward_service.errors import EndpointFailed, EndpointNonsense

CALL_HEADER = "penstock-endpoint-call"  # of every request sent here; an API that gets one refuses it: a loop
ERROR_HEADER = "penstock-error"  # of an answer: why, for the people who read the errors of this endpoint
_CONNECT_S = 5.0
_KEEP_S = 5.0  # an idle connection
_MAX_REASON = 300  # characters of `ERROR_HEADER`
_MEDIA_TYPE = re.compile(r"[a-z]{1,20}/[a-z0-9.+-]{1,40}")
_IDLE_CONNECTIONS = 32


_OWN_TEXTS = ("Server disconnected", "peer closed connection")  # of the client library; others quote the server


class NoAnswer(Exception):
    """The connection could not be made, or broke before the answer was complete."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def describe(self) -> str:
        """Return its status, size and type, and the reason that an endpoint gives in `ERROR_HEADER`; never its body."""
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        kind = f" of {media_type}" if _MEDIA_TYPE.fullmatch(media_type) else ""
        reason = "".join(c if c.isprintable() else "?" for c in self.headers.get(ERROR_HEADER, "")[:_MAX_REASON])
        return f"HTTP {self.status}, {len(self.body)} bytes{kind}" + (f": {reason}" if reason else "")


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
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # every call has the endpoint's own deadline
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def check(self, url: str) -> None:
        """Raise TargetRefused unless the URL may be called; a host that does not resolve yet passes."""
        host, port = self._policy.check_url(url)
        try:
            parsed = httpx.URL(url)
            _ = parsed.host  # decodes a name of another script
        except (httpx.InvalidURL, UnicodeError) as err:
            raise TargetRefused(f"{url!a} is not a URL ({err})") from None
        if _host_and_port(parsed) != (host, port):  # two readings of one text: one would be checked, the other called
            raise TargetRefused(f"{url!a} is read as host {parsed.raw_host!a} or {host!r}; write it plainly")
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
            "accept-encoding": "identity",  # an answer that decompresses to a large one is not read
            CALL_HEADER: "1",
        }
        try:
            async with self._http.stream(method, url, content=body, headers=given) as response:
                return Answer(response.status_code, response.headers, await self._read(response, url))
        except (TargetRefused, httpx.InvalidURL, UnicodeError) as err:
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
    """Connects through `_CheckedBackend`; connections are kept by name, so that none serves a name it was not made for."""

    def __init__(self, policy: TargetPolicy) -> None:
        super().__init__()
        self._policy = policy
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=http_tls.trust_own_authority(httpx.create_ssl_context()),
            max_connections=None,
            max_keepalive_connections=_IDLE_CONNECTIONS,
            keepalive_expiry=_KEEP_S,
            network_backend=_CheckedBackend(policy),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._policy.check_url(str(request.url))
        return await super().handle_async_request(request)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Resolves a name once for each connection, checks every address it has, and connects to a checked one."""

    def __init__(self, policy: TargetPolicy) -> None:
        self._policy = policy
        self._sockets = cast(httpcore.AsyncNetworkBackend, httpcore.AnyIOBackend())

    async def sleep(self, seconds: float) -> None:
        await self._sockets.sleep(seconds)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 the base class's
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            addresses = await resolve(host, port)
        except OSError as err:
            raise httpcore.ConnectError(f"{host} does not resolve: {describe(err)}") from None
        for address in addresses:
            self._policy.check_address(host, address, port)
        failure: httpcore.ConnectError | httpcore.ConnectTimeout | None = None
        for address in addresses:
            try:
                return await self._sockets.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as err:
                failure = err
        raise failure or httpcore.ConnectError(f"{host} has no address")


def _host_and_port(url: httpx.URL) -> tuple[str, int]:
    return url.raw_host.decode("ascii").lower(), url.port or (443 if url.scheme == "https" else 80)


def describe(err: Exception) -> str:
    """Return an exception's class and text; many network errors have no text, and that of others may be the server's."""
    text = str(err)
    if isinstance(err, httpx.RemoteProtocolError) and not text.startswith(_OWN_TEXTS):
        text = "what it sends is not HTTP"
    return f"{type(err).__name__}: {text}" if text else type(err).__name__
