"""The connection that all parts of a bus share: thread, client, retries while NATS is unreachable, errors.

Everything here but `call`, `close` and the properties runs on the connection's event loop. JetStream's error codes are
those of the server's list (``server/errors.json`` of nats-server); one that has no fix here is a plain `BusError`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import APIError

from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.errors import BusError, BusRefused, BusUnreachable, MissingStream, StorageFull
from penstock.protocol.transport.loop_thread import CallThread, Pending
from penstock.protocol.transport.tls import client_context, handshake_problem

BOOTSTRAP = "create it with: penstock bootstrap run.toml"
ERR_FULL = 10077  # the stream's or bucket's bound on messages or bytes
# of a cluster: it goes on when its servers have elected one
ERR_NO_LEADER = frozenset({10004, 10008, 10009, 10118, 10119})
# A majority has no earlier try of the same request yet, whose answer was lost: it may still be stored, or not.
ERR_PUBLICATION_UNDER_WAY = 10158  # a message of the same id
ERR_SWAP_UNDER_WAY = 10164  # a swap of the same key
ERR_OTHER_REVISION = 10071  # of the key of a swap
ERR_STORAGE_FULL = frozenset({10002, 10023, 10028, 10047})  # storage, resources or memory of the account or the server

_LIMIT = "remove finished runs (penstock runs rm RUN), or raise {limit} of the server or of the account"
_FULL = "its storage is full: " + _LIMIT
_REMEDIES: dict[int, tuple[type[BusError], str]] = {
    10002: (StorageFull, _FULL.format(limit="max_file_store and max_mem_store")),
    10023: (StorageFull, _FULL.format(limit="max_file_store")),
    10028: (StorageFull, _FULL.format(limit="max_mem_store")),
    10047: (StorageFull, _FULL.format(limit="max_file_store")),
    10026: (StorageFull, _LIMIT.format(limit="max_consumers")),
    10027: (StorageFull, _LIMIT.format(limit="max_streams")),
    10122: (StorageFull, "raise the account's limit on the bytes of one stream (max_stream_bytes)"),
    10014: (MissingStream, BOOTSTRAP),
    10059: (MissingStream, BOOTSTRAP),
    10035: (BusRefused, "give this user an account that has JetStream"),
    10039: (BusRefused, "enable JetStream for this user's account in the server's configuration"),
    10076: (BusRefused, "start nats-server with -js"),
    10003: (BusError, "the server does not support the request: check that it is 2.12 or newer"),
    10013: (BusError, "a consumer of that name exists with another purpose: remove it, then run penstock bootstrap"),
    10058: (BusError, "it exists with other settings: remove it, then run penstock bootstrap"),
    10065: (BusError, "another stream has these subjects: remove it, or use another run id"),
    10100: (BusError, "another consumer of this queue reads the same subjects: remove it, then run penstock bootstrap"),
    10054: (BusError, "the message is larger than the stream's limit; an older stream needs penstock bootstrap again"),
    10005: (
        BusRefused,
        "fewer servers with JetStream answer than nats.replicas: start them, or set it to 1 "
        "(docs/guides/nats_cluster.md)",
    ),
    10074: (
        BusRefused,
        "this server is not a cluster: set nats.replicas = 1, or start a cluster (docs/guides/nats_cluster.md)",
    ),
    **dict.fromkeys(
        (10007, *ERR_NO_LEADER, ERR_PUBLICATION_UNDER_WAY, ERR_SWAP_UNDER_WAY),
        (BusUnreachable, "servers of the cluster are missing, or it has no leader yet: try again"),
    ),
}  # fmt: skip
T = TypeVar("T")
log = structlog.get_logger("protocol.bus")
ATTEMPT_S = 4.0  # one try of one request; a killed server never answers requests in flight
REQUEST_S = 2 * ATTEMPT_S  # one request with its further tries
CALL_S = 3 * ATTEMPT_S  # the caller of one request waits this long before the bus's thread counts as stuck
RETRY_S = 0.1  # first pause between tries, doubled up to RETRY_MAX_S
RETRY_MAX_S = 2.0


class UnreadableReply(nats.errors.Error):
    """A reply that no server sends: its JSON, a header or a field is damaged. The next try gets another one."""


NO_ANSWER = (
    TimeoutError,
    UnreadableReply,
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.OutboundBufferLimitError,
)
# what the client library and the reading of a reply raise for one that is damaged
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, AssertionError, nats.errors.NotJSMessageError)
_NO_GREETING = (TimeoutError, asyncio.TimeoutError, nats.errors.TimeoutError, nats.errors.Error)
_CLOSE_S = 0.5
_NO_JETSTREAM = frozenset({10035, 10039, 10076})
_MAX_IN_FLIGHT = 64  # requests at a time; more of them make the server slower


def refusal(err: APIError, what: str, url: str) -> BusError:
    """Return the Penstock error for one of JetStream; ``what``: the request and its stream, consumer or bucket."""
    kind, remedy = _REMEDIES.get(err.err_code or 0, (BusError, ""))
    if not remedy and err.code == 404:
        kind, remedy = MissingStream, BOOTSTRAP
    said = f"NATS at {url} says: {err.description} (error {err.err_code})"
    return kind(f"{what}: {said}{'; ' if remedy else ''}{remedy}")


class Connection:
    """One connection to NATS, in a separate thread.

    Attributes:
        client: The client library's connection.
        js: Its JetStream calls.
        num_transitions: How often the connection was lost or restored. After a change, state that only the
            old server process held is lost (requests in flight, consumers in memory).
    """

    def __init__(self, settings: NatsSettings, *, name: str) -> None:
        self._settings = settings
        self._name = name
        self._thread = CallThread(f"bus-{name}")
        self._in_flight = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._up = asyncio.Event()
        self._watchers: set[asyncio.Event] = set()
        self._waits: set[asyncio.Timeout] = set()  # those that end when the connection is lost
        self._down_since: float | None = None
        self._last_error = ""
        self._denials = 0
        self._waited_for: collections.Counter[str] = collections.Counter()
        self.client = Client()
        self.js: JetStreamContext = None  # type: ignore[assignment]
        self.num_transitions = 0

    def open(self, deadline_s: float) -> None:
        try:
            self.call(self._connect(deadline_s), f"connect to {self.url}", deadline_s).wait()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._thread.close(self._drain)

    @property
    def url(self) -> str:
        return self._settings.url

    @property
    def replicas(self) -> int:
        """How many servers store each stream that is created."""
        return self._settings.replicas

    @property
    def is_clustered(self) -> bool:
        """Whether the server is one of a cluster: then a stream may have no leader for a while, and a replica may lag.

        Known by the addresses that the server advertises or the settings list, or by ``nats.replicas``.
        """
        return self.replicas > 1 or len(self._settings.addresses) > 1 or bool(self.client.discovered_servers)

    @property
    def down_s(self) -> float:
        return 0.0 if self._down_since is None else time.monotonic() - self._down_since

    @property
    def is_up(self) -> bool:
        return self.client.is_connected

    @property
    def waits_for(self) -> str:
        waited_for = self._waited_for.copy()
        return max(waited_for, key=lambda name: waited_for[name], default="")

    @contextlib.contextmanager
    def waiting_for(self, name: str) -> Iterator[None]:
        self._waited_for[name] += 1
        try:
            yield
        finally:
            self._waited_for -= collections.Counter([name])  # what is at 0 is left out

    def call(self, action: Coroutine[Any, Any, T], what: str, deadline_s: float = CALL_S) -> Pending[T]:
        return self._thread.call(action, what, deadline_s)

    def spawn(self, action: Coroutine[Any, Any, None]) -> None:
        self._thread.spawn(action)

    def watch(self, event: asyncio.Event) -> None:
        self._watchers.add(event)

    def unwatch(self, event: asyncio.Event) -> None:
        self._watchers.discard(event)

    @contextlib.asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Raise ConnectionReconnectingError in the block when the connection is lost: no answer comes after that.

        Every request is made in such a block: a reply in it that cannot be read is UnreadableReply.
        """
        lost = asyncio.timeout(None)
        try:
            async with lost:
                self._waits.add(lost)
                yield
        except TimeoutError:
            if lost.expired():
                raise nats.errors.ConnectionReconnectingError from None
            raise
        except _UNREADABLE as err:
            log.debug("unreadable reply", name=self._name, exc_info=True)
            reply = getattr(err, "doc", "")  # of a JSONDecodeError
            excerpt = f" in {reply[:160]!r}" if reply else ""
            raise UnreadableReply(f"a reply that cannot be read: {type(err).__name__}: {err}{excerpt}"[:400]) from None
        finally:
            self._waits.discard(lost)

    async def wait_until_up(self) -> None:
        await self._up.wait()

    def explain(self, text: str) -> str:
        state = ""
        if self.is_up:
            state = (
                f"; NATS at {self.url} is connected but does not answer: check its log, and whether its disk is full"
            )
        elif self._down_since:
            state = f"; NATS at {self.url} has been unreachable for {self.down_s:.0f} s"
        last = f"; last error from NATS: {self._last_error}" if self._last_error else ""
        return f"{text}{state}{last}"

    async def retry(self, attempt: Callable[[], Awaitable[T]], *, what: str, deadline_s: float) -> T:
        """Try a request until it is answered; an answer that is an error is raised as it is.

        No answers: that a stream has no leader (one is elected within seconds), or an earlier try is under way.

        Raises BusRefused when this user lacks the right, BusUnreachable when there was no answer in time.
        """
        deadline = time.monotonic() + deadline_s
        pause = RETRY_S
        denials = self._denials
        while True:
            try:
                if not self._up.is_set():
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        await self._up.wait()
                async with self._in_flight, self.while_connected():
                    return await attempt()
            except (*NO_ANSWER, nats.js.errors.Error) as err:
                if isinstance(err, nats.js.errors.Error) and not self._is_for_now(err):
                    raise
                if self._denials > denials:  # the server reports it to the connection, not to the request
                    user = f"user {self._settings.user!r}" if self._settings.user else "a client without a user name"
                    raise BusRefused(
                        f"{what} was refused: NATS at {self._settings.url} does not let {user} do this "
                        f"({self._last_error}); use the login of a service that may (docs/security.md)"
                    ) from None
                if time.monotonic() + pause > deadline or self.client.is_closed:
                    raise BusUnreachable(
                        self.explain(f"no answer to {what} within {deadline_s:.0f} s ({reason_of(err)})")
                    ) from None
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_MAX_S)

    def _is_for_now(self, err: nats.js.errors.Error) -> bool:
        if isinstance(err, nats.js.errors.NoStreamResponseError):
            return self.is_clustered
        return isinstance(err, nats.js.errors.APIError) and err.err_code in {*ERR_NO_LEADER, ERR_PUBLICATION_UNDER_WAY}

    async def _connect(self, deadline_s: float) -> None:
        options: dict[str, Any] = {}
        if self._settings.user:
            options = {"user": self._settings.user, "password": self._settings.secret()}
        if self._settings.is_tls:
            # A client that reads the server's greeting first accepts "no TLS" from it, and sends its password.
            options |= {"tls": client_context(self._settings.ca_file, "nats.ca_file"), "tls_handshake_first": True}
        deadline = time.monotonic() + deadline_s
        pause, hint = RETRY_S, ""
        while True:
            try:
                await self._connect_once(options)
                break
            except Exception as err:  # noqa: BLE001 - the client raises bare OSError, its own errors, and more
                if problem := handshake_problem(err, self._settings.url, "nats.ca_file"):
                    raise BusRefused(f"NATS at {problem}") from None
                if isinstance(err, _NO_GREETING) and not self._settings.is_tls:
                    hint = "; a server that speaks TLS only sends no greeting: is its URL tls://...?"
                text = f"{self._last_error} {err}".lower()
                if "authorization" in text or "authentication" in text:
                    raise BusRefused(
                        f"NATS at {self._settings.url} refused user {self._settings.user or '(none)'}: "
                        "check nats.user and nats.password (or nats.password_file)"
                    ) from None
                if time.monotonic() + pause > deadline:
                    raise BusUnreachable(
                        f"no NATS server at {self._settings.url} within {deadline_s:.0f} s ({type(err).__name__}: "
                        f"{err}); is it running? For one machine: penstock up{hint}"
                    ) from None
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_MAX_S)
        self.js = self.client.jetstream(timeout=ATTEMPT_S)
        await self._require_jetstream()

    async def _connect_once(self, options: dict[str, Any]) -> None:
        client = Client()
        try:
            await client.connect(
                list(self._settings.addresses),
                name=self._name,
                connect_timeout=2,
                allow_reconnect=False,
                reconnect_time_wait=0.2,  # type: ignore[arg-type]  # a float works, the type hint is too narrow
                max_reconnect_attempts=1,  # with -1 the first connection would be tried without end
                ping_interval=5,
                max_outstanding_pings=3,
                inbox_prefix=f"_INBOX_{self._settings.user or 'any'}.{secrets.token_hex(4)}",
                error_cb=self._on_error,
                disconnected_cb=self._on_down,
                reconnected_cb=self._on_up,
                **options,
            )
        except BaseException:
            with contextlib.suppress(TimeoutError):  # after a refused handshake it would wait without end
                await asyncio.wait_for(client.close(), _CLOSE_S)
            raise
        client.options.update(allow_reconnect=True, max_reconnect_attempts=-1)  # from now on without limit
        self.client = client
        self._down_since = None
        self._up.set()

    async def _require_jetstream(self) -> None:
        try:
            async with self.while_connected():
                await self.js.account_info()
        except (nats.js.errors.APIError, nats.errors.NoRespondersError) as err:
            if isinstance(err, nats.errors.NoRespondersError) or err.err_code in _NO_JETSTREAM:
                raise BusRefused(f"NATS at {self.url} has JetStream switched off; start it with -js") from None
        except (nats.errors.TimeoutError, UnreadableReply):
            log.debug("account info is not readable for this user", url=self._settings.url)

    async def _on_error(self, err: Exception) -> None:
        self._last_error = str(err) or type(err).__name__
        if "permissions violation" in self._last_error.lower():
            self._denials += 1
        log.debug("nats", name=self._name, error=self._last_error)

    async def _on_down(self) -> None:
        if self._thread.is_closing:
            return
        if self._down_since is None:
            self._down_since = time.monotonic()
            log.warning("NATS unreachable", url=self._settings.url, name=self._name)
        self._up.clear()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())
        self._changed()

    async def _on_up(self) -> None:
        log.info("NATS reconnected", url=self._settings.url, name=self._name, down_s=round(self.down_s, 1))
        self._down_since = None
        self._up.set()
        self._changed()

    def _changed(self) -> None:
        self.num_transitions += 1
        for event in self._watchers:
            event.set()

    async def _drain(self) -> None:
        if self.is_up:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self.client.flush(timeout=2), 3.0)
        await self.client.close()


def reason_of(err: Exception) -> str:
    if isinstance(err, nats.js.errors.NoStreamResponseError):
        return "no server takes it: its stream was not created, or more than half of the servers that store it are down"
    if isinstance(err, nats.js.errors.APIError):
        return f"{err.description}, error {err.err_code}: are more than half of the cluster's servers up?"
    if isinstance(err, UnreadableReply):
        return str(err)
    return type(err).__name__
