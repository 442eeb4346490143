"""The adapter of aiohttp: one request to an HTTP server over kept connections, its deadline, and when it is sent again.

aiohttp, because a worker has hundreds of requests open at once, an agent's turn being one each: with 1,000 of them
httpx takes 13 ms of CPU for a request, most of it in its pool, and aiohttp 0.9. Redirects are not followed, proxies of
the environment variables are not used, and a compressed answer, which nothing asks for, is refused. With a
`TargetPolicy` a name is resolved once for each connection, every address that it has is checked, and a checked one is
connected to, so that the name cannot resolve differently in between. Nothing that a server sends is quoted in an error:
whoever may name a server could otherwise read from any that this process reaches.

`retry_after_s` reads the header ``Retry-After`` in both forms (RFC 9110, section 10.2.3).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from multidict import CIMultiDict
from yarl import URL

from penstock.protocol.errors import PenstockError, TargetRefused
from penstock.protocol.transport import tls
from penstock.protocol.transport.tls import client_context, handshake_problem
from penstock.serving.target_policy import TargetPolicy, resolve

PASSING = frozenset({429, 502, 503, 504})  # the server is busy, or something before it failed
_LONGEST_S = 3600.0
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_CONNECT_S = 5.0


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float:
    """Return the seconds to wait, at most an hour; 0.0 without the header, for a past time and for anything else.

    Args:
        headers: Of an answer, by any case of their names or by lower-case names.
        now: The time to which a date is compared, with a time zone; None: the present time.
    """
    text = (headers.get("retry-after") or headers.get("Retry-After") or "").strip()
    if _SECONDS.fullmatch(text):
        return min(float(text), _LONGEST_S)
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return min(max((at - (now or datetime.now(UTC))).total_seconds(), 0.0), _LONGEST_S)


class ConnectionFailed(PenstockError):
    """No connection, or it broke before the answer was complete: whether the request was processed is unknown."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.reason = reason


class AnswerRefused(PenstockError):
    """The server's answer is larger than allowed, or compressed."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    cookies: Mapping[str, str] = field(default_factory=dict)  # that it sets, as they are sent back; none is kept here


@contextlib.asynccontextmanager
async def within(deadline_s: float, url: str, key: str = "") -> AsyncIterator[None]:
    """Raise ConnectionFailed where the block takes longer; ``key`` is the setting that the deadline is from."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError:
        raise ConnectionFailed(url, f"no answer within {deadline_s:g} s{f' ({key})' if key else ''}") from None


@dataclass(frozen=True, slots=True)
class Retries:
    """Pauses are random between zero and a bound that doubles (full jitter), after what ``Retry-After`` asks for."""

    first_s: float
    longest_s: float
    most: int | None = None  # further tries; None: until the caller's deadline
    statuses: Set[int] = PASSING

    async def send(
        self, send: Callable[[], Awaitable[Answer]], failed: Callable[[Answer | ConnectionFailed, float], None]
    ) -> Answer:
        """Return the first answer of another status than ``statuses``, else that of the last try.

        ``failed`` gets what failed and the seconds until the next try; it may raise an error instead. Raises
        ConnectionFailed where the last try had no answer.
        """
        number, bound_s = 0, self.first_s
        while True:
            pause_s = random.uniform(0.0, bound_s)  # noqa: S311 no secret
            problem: Answer | ConnectionFailed
            try:
                problem = await send()
                if number == self.most or problem.status not in self.statuses:
                    return problem
                pause_s += retry_after_s(problem.headers)
            except ConnectionFailed as err:
                if number == self.most:
                    raise
                problem = err
            failed(problem, pause_s)
            await asyncio.sleep(pause_s)
            number, bound_s = number + 1, min(2.0 * bound_s, self.longest_s)


class HttpConnections:
    def __init__(
        self, *, keep_s: float, headers: Mapping[str, str] | None = None, policy: TargetPolicy | None = None,
        max_answer_bytes: int | None = None, max_answer_key: str = "", ca_file: Path | None = None,
        ca_key: str = tls.AUTHORITY,
    ) -> None:  # fmt: skip
        """Prepare; nothing is opened before the first request.

        Args:
            keep_s: Seconds that an idle connection is kept.
            headers: Sent with every request.
            policy: Which addresses may be called; None: any.
            max_answer_bytes: Longest answer that is read; None: any.
            max_answer_key: The setting that ``max_answer_bytes`` is from, for errors.
            ca_file: Certificates of the only authorities that https servers are trusted by; None: as `tls` has it.
            ca_key: The setting that ``ca_file`` is from, for errors.

        Raises ConfigError for a ``ca_file`` that cannot be used.
        """
        self._keep_s = keep_s
        self._headers = dict(headers or {})
        self._policy = policy
        self._max_bytes = max_answer_bytes
        self._max_key = f" ({max_answer_key})" if max_answer_key else ""
        self._ca_key = ca_key
        self._tls = None if ca_file is None else client_context(ca_file, ca_key)
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def send(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None,
        max_bytes: int | None = None, fingerprint: str = "",
    ) -> Answer:  # fmt: skip
        """Return the answer, at most ``max_bytes`` of it (None: as of all); a body is JSON unless a header says else.

        With a ``fingerprint`` the server's certificate is the one with this SHA-256, whatever its name and authority
        are. Raises ConnectionFailed, AnswerRefused, TargetRefused.
        """
        self._check(url)
        sent_headers = CIMultiDict() if body is None else CIMultiDict({"Content-Type": "application/json"})
        sent_headers.update(headers or {})
        try:
            async with self._connections(url).request(
                method, url, data=body, headers=sent_headers, allow_redirects=False,
                ssl=aiohttp.Fingerprint(bytes.fromhex(fingerprint)) if fingerprint else True,
            ) as response:  # fmt: skip
                cookies = {name: morsel.coded_value for name, morsel in response.cookies.items()}
                data = await self._read(response, url, max_bytes or self._max_bytes)
                return Answer(response.status, response.headers, data, cookies)
        except aiohttp.ClientError as err:
            problem = handshake_problem(err, url, self._ca_key).removeprefix(f"{url}: ")
            raise ConnectionFailed(url, problem or _reason(err)) from None

    async def check(self, url: str) -> None:
        """Raise TargetRefused unless the URL may be called; a host that does not resolve yet passes."""
        assert self._policy is not None
        host, port = self._check(url)
        try:
            addresses = await resolve(host, port)
        except OSError:
            return
        for address in addresses:
            self._policy.check_address(host, address, port)

    async def websocket(self, url: str, *, max_message_bytes: int) -> aiohttp.ClientWebSocketResponse:
        self._check(url)
        try:
            return await self._connections(url).ws_connect(url, max_msg_size=max_message_bytes, compress=0)
        except (aiohttp.ClientError, TimeoutError) as err:
            raise ConnectionFailed(url, _reason(err)) from None

    def _check(self, url: str) -> tuple[str, int]:
        """Raise TargetRefused for a URL that may not be called; the addresses of a name are checked by the resolver."""
        if self._policy is None:
            return "", 0
        host, port = self._policy.check_url(url)
        try:
            parsed = URL(url)
            _ = parsed.host  # decodes a name of another script
        except ValueError as err:  # UnicodeError is one
            raise TargetRefused(f"{url!a} is not a URL ({err})") from None
        called = (_plain(parsed.raw_host or ""), parsed.port)
        if called != (_plain(host), port):  # two readings of one text: one would be checked, the other called
            raise TargetRefused(f"{url!a} is read as host {parsed.raw_host!a} or {host!r}; write it plainly")
        with contextlib.suppress(ValueError):
            self._policy.check_address(host, str(ipaddress.ip_address(host)), port)
        return host, port

    async def _read(self, response: aiohttp.ClientResponse, url: str, max_bytes: int | None) -> bytes:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise AnswerRefused(f"{url} compresses its answer, which was not requested")
        if max_bytes is None:
            return await response.read()
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > max_bytes:
                raise AnswerRefused(f"{url} answers with more than {max_bytes} bytes{self._max_key}")
        return bytes(content)

    def _connections(self, url: str) -> aiohttp.ClientSession:
        """Return the session, made with the first request, in the running loop; raises ConnectionFailed once closed."""
        if self._is_closed:
            raise ConnectionFailed(url, "this client has been closed")
        if self._session is None:
            resolver = None if self._policy is None else _CheckedResolver(self._policy)
            trust, keep_s = self._tls or tls.aiohttp_trust(), self._keep_s
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=keep_s, resolver=resolver, use_dns_cache=resolver is None, ssl=trust
            )
            self._session = aiohttp.ClientSession(
                headers={"Accept-Encoding": "identity", **self._headers},
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=connector,
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
        common = {"hostname": host, "port": port, "proto": 0, "flags": socket.AI_NUMERICHOST}
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [ResolveResult(host=address, family=families[":" in address], **common) for address in addresses]

    async def close(self) -> None:
        """Hold nothing."""


def _plain(host: str) -> str:
    """Return a host with an IPv6 address in its shortest form."""
    return str(ipaddress.ip_address(host)) if ":" in host else host


def _reason(err: Exception) -> str:
    """Return what broke a connection, without what the server sent: the library quotes that in other errors."""
    if isinstance(err, (OSError, aiohttp.ServerTimeoutError)):
        text = str(err)[:300]
    elif isinstance(err, aiohttp.WSServerHandshakeError):
        text = f"it answers HTTP {err.status}"
    elif isinstance(err, aiohttp.ServerDisconnectedError):
        text = "it closed the connection without an answer"
    else:
        text = (
            "its answer is incomplete" if isinstance(err, aiohttp.ClientPayloadError) else "what it sends is not HTTP"
        )
    return f"{type(err).__name__}: {text}".removesuffix(": ")
