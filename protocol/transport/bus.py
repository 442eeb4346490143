"""The door to NATS JetStream, and the only file that imports nats.

NATS lives in its own thread and event loop, so a training step of thirty seconds cannot stop
heartbeats, keep-alives or acknowledgements. Every call returns a `Pending`: threads say
``.wait()``, coroutines ``await`` it. Every call has a deadline whose error names whom it waited for.

What a caller can rely on:

- `publish` is at-least-once with a message id: it retries until the server has acknowledged, and a
  full stream makes it wait (back-pressure), never drop.
- A fetched `Delivery` is kept alive for its reader until it is acknowledged, given back or
  dead-lettered, however long the work takes; when the reader dies, the message comes again.
- A redelivery of a message that this inbox still holds only renews the handle; it is not handed out twice.
- A message that does not decode goes to the dead letters with its reason, and is not seen again.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import json
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext, api
from nats.js.kv import KeyValue as NatsKeyValue

from protocol import subjects
from protocol.connection import NatsSettings
from protocol.errors import (
    BusError,
    BusRefused,
    BusUnreachable,
    CompareAndSwapFailed,
    MissingStream,
    StreamFull,
    WireError,
)
from protocol.facts import DeadLetter, Fact, decode, encode
from protocol.streams import KEEPALIVES_PER_ACK_WAIT, BucketSpec, ConsumerSpec, StreamSpec

T = TypeVar("T")
F = TypeVar("F", bound=Fact)
log = structlog.get_logger("protocol.bus")

_ATTEMPT_S = 4.0  # one try of one request; a killed server never answers requests in flight
_RETRY_S = 0.1  # first pause between tries, doubled up to _RETRY_MAX_S
_RETRY_MAX_S = 2.0
_STREAMS_PER_PAGE = 256  # the server's own limit for one answer
_LOOP_GRACE_S = 30.0  # a call that outlives its own deadline by this much has lost its thread
_MAX_IN_FLIGHT = 64  # requests at a time: more makes the server slower, not faster
_MISSING_GRACE_S = 1.0
_TAIL_PULL_S = 10.0
_LINGER_S = 5.0  # the longest single pull request
_LATE_S = 0.25  # how late the server's word that it has expired may come
_MAX_LETTER_PAYLOAD = 28 * 1024  # what a dead letter keeps, so that it always fits into a message itself
_MAX_LETTER_IDS = 128
_NOTHING_THERE = ("404", "408")
_NO_ANSWER = (
    TimeoutError,
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.OutboundBufferLimitError,
)
_ERR_OTHER_CONFIG = 10058  # the stream exists with another configuration
_ERR_STREAM_FULL = (10077, 10023, 10047)  # maximum messages or bytes, insufficient resources


class Pending(Generic[T]):
    """The result of a call that runs on the bus's thread."""

    __slots__ = ("_future", "_patience_s", "_what")

    def __init__(self, future: concurrent.futures.Future[T], what: str, patience_s: float) -> None:
        """Wrap a future of the bus's loop."""
        self._future = future
        self._what = what
        self._patience_s = patience_s

    def wait(self) -> T:
        """Block this thread until the result is there; raises what the call raised."""
        try:
            return self._future.result(self._patience_s)
        except concurrent.futures.TimeoutError:
            if self._future.done():
                raise
            raise BusUnreachable(
                f"{self._what} did not end within {self._patience_s:.0f} s; the bus's thread is stuck or closed"
            ) from None

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self._future).__await__()

    def done(self) -> bool:
        """Say whether the result is there."""
        return self._future.done()


@dataclass(frozen=True, slots=True)
class Receipt:
    """The server's acknowledgement of a published fact."""

    sequence: int
    duplicate: bool  # the message id was already known: nothing was stored twice


@dataclass(frozen=True, slots=True)
class StreamState:
    """How much a stream holds."""

    num_messages: int
    num_bytes: int
    first_sequence: int
    last_sequence: int


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """What is waiting and what is held, as the broker counts it."""

    num_pending: int
    num_ack_pending: int
    num_redelivered: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a key-value bucket; ``revision`` is what compare-and-swap compares."""

    key: str
    value: bytes
    revision: int


class Delivery(Generic[F]):
    """One message held by this process. Exactly one of ack, give_back and dead_letter ends it."""

    __slots__ = ("_inbox", "_msg", "fact", "num_delivered", "sequence", "traceparent")

    def __init__(self, inbox: Inbox[F], msg: Msg, fact: F) -> None:
        """Hold a decoded message."""
        self._inbox = inbox
        self._msg = msg
        self.fact = fact
        self.num_delivered = msg.metadata.num_delivered or 1
        self.sequence = msg.metadata.sequence.stream
        self.traceparent = (msg.headers or {}).get("traceparent", "")

    def renew(self, msg: Msg) -> None:
        """Take over the handle of a redelivery of the same message."""
        self._msg = msg
        self.num_delivered = msg.metadata.num_delivered or self.num_delivered

    def ack(self) -> Pending[None]:
        """Say that the message's effect is durable; it never comes again."""
        return self._inbox._settle(self, lambda: self._inbox._ack(self), "acknowledge")

    def give_back(self, delay_s: float) -> Pending[None]:
        """Return the message, to be delivered again (to anybody) after ``delay_s``."""
        return self._inbox._settle(self, lambda: self._inbox._nak(self, delay_s), "give back")

    def dead_letter(self, reason: str, detail: str) -> Pending[None]:
        """Store the message among the dead letters with its reason, then end it."""
        return self._inbox._settle(self, lambda: self._inbox._bury(self._msg, reason, detail, self.fact), "dead-letter")


class _Pull:
    """Pull requests to one consumer over one subscription; the client library's own ``fetch`` waits too long.

    It returns as soon as there is something, never leaves an unfinished request behind that would
    take messages away from an idle reader, and sends a request again when the server came back.
    """

    def __init__(self, bus: Bus, stream: str, consumer: str) -> None:
        self._bus = bus
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._reply = bus._client.new_inbox()
        self._number = 0
        self._arrived: collections.deque[Msg] = collections.deque()
        self._ended: Msg | None = None  # the status message that ended the current request
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()
        self._sub: Subscription | None = None

    async def open(self) -> None:
        self._sub = await self._bus._client.subscribe(f"{self._reply}.*", cb=self._on_message)
        self._bus._wake_on_change.add(self._news)

    async def close(self) -> None:
        self._bus._wake_on_change.discard(self._news)
        if self._sub is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._sub.unsubscribe()

    async def _on_message(self, msg: Msg) -> None:
        if not (msg.headers and "Status" in msg.headers and not msg.data and msg.subject.startswith(self._reply)):
            self._arrived.append(msg)
        elif msg.subject == f"{self._reply}.{self._number}" and msg.headers["Status"] != "100":
            self._ended = msg
        self._news.set()

    async def take(self, max_messages: int, wait_s: float) -> list[Msg]:
        """Take what is there, or wait for the first message; raises _Refused for anything but "nothing there"."""
        async with self._turn:
            deadline = time.monotonic() + wait_s
            if not self._arrived and max_messages > 1:
                until = min(deadline, time.monotonic() + _LINGER_S)
                await self._request({"batch": max_messages, "no_wait": True}, max_messages, until)
            while not self._arrived and (left := deadline - time.monotonic()) > 0:
                # a request that the server forgot (its stream was deleted that moment) is asked again soon
                linger = min(left, _LINGER_S)
                until = min(deadline, time.monotonic() + linger + _LATE_S)
                await self._request({"batch": 1, "expires": int(linger * 1e9)}, 1, until)
            return [self._arrived.popleft() for _ in range(min(max_messages, len(self._arrived)))]

    async def _request(self, body: dict[str, Any], enough: int, deadline: float) -> None:
        """Send one request and wait for its messages, its end, the connection's end, or the deadline."""
        client = self._bus._client
        if not client.is_connected:
            await self._wait_for_news(deadline)
            return
        self._number += 1
        self._ended = None
        await client.publish(self._subject, json.dumps(body).encode(), reply=f"{self._reply}.{self._number}")
        lives = self._bus._num_lives
        while len(self._arrived) < enough and self._ended is None:
            if not await self._wait_for_news(deadline) or lives != self._bus._num_lives:
                return
        if self._ended is not None and self._ended.headers and self._ended.headers["Status"] not in _NOTHING_THERE:
            raise _Refused(self._ended.headers["Status"], self._ended.headers.get("Description", ""))

    async def _wait_for_news(self, deadline: float) -> bool:
        self._news.clear()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._news.wait()
        except TimeoutError:
            return False
        return True


class _Refused(Exception):
    def __init__(self, status: str, description: str) -> None:
        super().__init__(f"{status} {description}")
        self.status = status


class Inbox(Generic[F]):
    """A durable consumer's reader: fetches, keeps alive what is held, refuses poison."""

    def __init__(self, bus: Bus, spec: ConsumerSpec, fact: type[F], pull: _Pull) -> None:
        """Use `Bus.inbox` instead."""
        self._bus = bus
        self._fact = fact
        self._pull = pull
        self._held: dict[int, Delivery[F]] = {}
        self.spec = spec

    def fetch(self, max_messages: int, wait_s: float) -> Pending[list[Delivery[F]]]:
        """Take up to ``max_messages``, waiting at most ``wait_s`` for the first; empty when there is none.

        Returns as soon as there is at least one. While NATS is down the result is empty too, after
        ``wait_s``: the caller's loop goes on and `Bus.down_s` says for how long it has been so.
        Calls on one inbox take turns. Raises MissingStream when the consumer was deleted.
        """
        return self._bus.call(self._fetch(max_messages, wait_s), f"fetch from {self.spec.durable}", wait_s)

    @property
    def num_held(self) -> int:
        """Messages fetched and not yet ended."""
        return len(self._held)

    async def _fetch(self, max_messages: int, wait_s: float) -> list[Delivery[F]]:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                messages = await self._pull.take(max_messages, max(0.0, deadline - time.monotonic()))
            except (_Refused, nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError) as err:
                await self._bus._require_consumer(self.spec)
                log.debug("no messages", consumer=self.spec.durable, reason=str(err))
                await asyncio.sleep(min(wait_s, 0.2))
                messages = []
            # no await from here on: a cancelled fetch must not keep messages that nobody gets
            received = [self._receive(msg) for msg in messages]
            deliveries = [delivery for delivery in received if delivery is not None]
            if deliveries or time.monotonic() >= deadline:
                return deliveries

    def _receive(self, msg: Msg) -> Delivery[F] | None:
        held = self._held.get(msg.metadata.sequence.stream)
        if held is not None:
            held.renew(msg)
            return None
        try:
            fact = decode(msg.data, self._fact)
        except WireError as err:
            log.warning("poison message", subject=msg.subject, error=str(err))
            self._bus._spawn(self._bury_poison(msg, type(err).__name__, str(err)))
            return None
        delivery = Delivery(self, msg, fact)
        self._held[delivery.sequence] = delivery
        return delivery

    async def _bury_poison(self, msg: Msg, reason: str, detail: str) -> None:
        try:
            await self._bury(msg, reason, detail, None)
        except BusError as err:  # it comes again after ack_wait, and with it the next try
            log.warning("could not store a dead letter", subject=msg.subject, error=str(err))

    def _settle(self, delivery: Delivery[F], action: Callable[[], Awaitable[None]], what: str) -> Pending[None]:
        async def run() -> None:
            try:
                await action()
            finally:
                self._held.pop(delivery.sequence, None)

        return self._bus.call(run(), f"{what} a message of {self.spec.durable}", 3 * _ATTEMPT_S)

    async def _ack(self, delivery: Delivery[F]) -> None:
        await self._bus._retry(
            lambda: delivery._msg.ack_sync(timeout=_ATTEMPT_S),
            what=f"acknowledgement to {self.spec.stream}",
            deadline_s=60.0,
        )

    async def _nak(self, delivery: Delivery[F], delay_s: float) -> None:
        self._held.pop(delivery.sequence, None)  # first: it may be back before the next line ends
        with contextlib.suppress(nats.errors.ConnectionClosedError):  # a lost nak is only a later redelivery
            await delivery._msg.nak(delay=delay_s)

    async def _bury(self, msg: Msg, reason: str, detail: str, fact: Fact | None) -> None:
        meta = msg.metadata
        letter = DeadLetter(
            run_id=self.spec.run_id,
            stage=self.spec.stage,
            subject=msg.subject,
            reason=reason,
            detail=detail[:2000],
            group_ids=_group_ids(fact)[:_MAX_LETTER_IDS],
            num_delivered=meta.num_delivered or 1,
            payload=msg.data if len(msg.data) <= _MAX_LETTER_PAYLOAD else b"",
        )
        await self._bus._publish(
            subjects.dead(self.spec.run_id, self.spec.stage),
            letter,
            msg_id=f"{self.spec.stream}:{meta.sequence.stream}",
            deadline_s=60.0,
            traceparent="",
        )
        await self._bus._retry(
            lambda: msg.ack_sync(timeout=_ATTEMPT_S), what=f"acknowledgement to {self.spec.stream}", deadline_s=60.0
        )

    async def keep_alive(self) -> None:
        """Renew every held message, for as long as the bus lives."""
        period = self.spec.ack_wait_s / KEEPALIVES_PER_ACK_WAIT
        while True:
            await asyncio.sleep(period)
            for delivery in list(self._held.values()):
                if self._bus._client.is_connected:  # else the next round renews
                    with contextlib.suppress(nats.errors.Error):
                        await delivery._msg.in_progress()


class KeyValue:
    """One key-value bucket. Values are bytes; compare-and-swap by revision."""

    def __init__(self, bus: Bus, bucket: str, store: NatsKeyValue) -> None:
        """Use `Bus.key_value` instead."""
        self._bus = bus
        self._store = store
        self.bucket = bucket

    def get(self, key: str) -> Pending[Entry | None]:
        """Read a key; None when it is not there."""
        return self._call(lambda: self._get(key), f"read {self.bucket}/{key}")

    def put(self, key: str, value: bytes) -> Pending[int]:
        """Write a key whatever it holds; returns the revision."""
        return self._call(lambda: self._store.put(key, value), f"write {self.bucket}/{key}")

    def swap(self, key: str, value: bytes, expected_revision: int | None) -> Pending[int]:
        """Write a key only if it still has ``expected_revision`` (None: only if it does not exist).

        Raises CompareAndSwapFailed when somebody else was first.
        """
        return self._call(lambda: self._swap(key, value, expected_revision), f"swap {self.bucket}/{key}")

    def delete(self, key: str) -> Pending[bool]:
        """Remove a key."""
        return self._call(lambda: self._store.delete(key), f"delete {self.bucket}/{key}")

    def entries(self) -> Pending[list[Entry]]:
        """Read all keys that are there."""
        return self._call(self._entries, f"list {self.bucket}")

    def _call(self, action: Callable[[], Awaitable[T]], what: str) -> Pending[T]:
        async def run() -> T:
            try:
                async with asyncio.timeout(2 * _ATTEMPT_S):
                    await self._bus._up.wait()
                    return await action()
            except nats.js.errors.NoStreamResponseError:
                raise MissingStream(f"{what}: the bucket is gone; create it with: python -m deploy.bootstrap") from None
            except _NO_ANSWER as err:
                raise BusUnreachable(self._bus._explain(f"{what}: no answer ({type(err).__name__})")) from None

        return self._bus.call(run(), what, 2 * _ATTEMPT_S)

    async def _get(self, key: str) -> Entry | None:
        try:
            entry = await self._store.get(key)
        except nats.js.errors.NotFoundError:
            return None
        return Entry(key, entry.value or b"", entry.revision or 0)

    async def _swap(self, key: str, value: bytes, expected: int | None) -> int:
        try:
            if expected is None:
                return await self._store.create(key, value)
            return await self._store.update(key, value, last=expected)
        except (nats.js.errors.KeyWrongLastSequenceError, nats.js.errors.BadRequestError) as err:
            raise CompareAndSwapFailed(
                f"{self.bucket}/{key}: expected revision {expected}, somebody else moved it ({err})"
            ) from None

    async def _entries(self) -> list[Entry]:
        """One request for all keys (ADR-31); the client library makes a consumer and a request for each key."""
        prefix = f"$KV.{self.bucket}."
        messages = await self._bus._direct_get(f"KV_{self.bucket}", {"multi_last": [f"{prefix}>"], "batch": 10_000})
        return [
            Entry(headers["Nats-Subject"].removeprefix(prefix), msg.data, int(headers["Nats-Sequence"]))
            for msg in messages
            if (headers := msg.headers or {}) and headers.get("KV-Operation") not in {"DEL", "PURGE"}
        ]


class Bus:
    """One connection to NATS, living in its own thread. Close it, or use it as a context manager."""

    def __init__(self, settings: NatsSettings, *, name: str) -> None:
        """Use `Bus.connect` instead."""
        self._settings = settings
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"bus-{name}", daemon=True)
        self._client = Client()
        self._js: JetStreamContext = None  # type: ignore[assignment]
        self._tasks: set[asyncio.Task[Any]] = set()
        self._in_flight = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._up = asyncio.Event()
        self._wake_on_change: set[asyncio.Event] = set()  # set whenever the connection comes or goes
        self._num_lives = 0  # how often it came or went
        self._closing = False
        self._down_since: float | None = None
        self._last_error = ""
        self._denials = 0

    @classmethod
    def connect(cls, settings: NatsSettings, *, name: str, deadline_s: float = 20.0) -> Bus:
        """Connect, waiting at most ``deadline_s``; raises BusUnreachable or BusRefused."""
        bus = cls(settings, name=name)
        bus._thread.start()
        try:
            bus.call(bus._connect(deadline_s), f"connect to {settings.url}", deadline_s).wait()
        except BaseException:
            bus.close()
            raise
        return bus

    def __enter__(self) -> Bus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def down_s(self) -> float:
        """Seconds since the connection was lost; 0.0 while it is up."""
        return 0.0 if self._down_since is None else time.monotonic() - self._down_since

    @property
    def url(self) -> str:
        """Where this bus is connected to, for messages."""
        return self._settings.url

    def call(self, action: Coroutine[Any, Any, T], what: str, deadline_s: float) -> Pending[T]:
        """Run a coroutine on the bus's loop; raises BusUnreachable when the bus is closed."""
        if self._closing or not self._thread.is_alive():
            action.close()
            raise BusUnreachable(f"{what}: the bus is closed")
        running = asyncio.run_coroutine_threadsafe(self._until_closed(action, what), self._loop)
        return Pending(running, what, deadline_s + _LOOP_GRACE_S)

    async def _until_closed(self, action: Coroutine[Any, Any, T], what: str) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await action
        except asyncio.CancelledError:
            if self._closing:
                raise BusUnreachable(f"{what}: the bus was closed meanwhile") from None
            raise
        finally:
            self._tasks.discard(task)

    def publish(
        self,
        subject: str,
        fact: Fact,
        *,
        msg_id: str,
        deadline_s: float = 120.0,
        full_deadline_s: float = 24 * 3600.0,
        traceparent: str = "",
    ) -> Pending[Receipt]:
        """Publish a fact at least once and, thanks to ``msg_id``, at most once within the window.

        Waits up to ``deadline_s`` for the server, and up to ``full_deadline_s`` while the stream is
        full (back-pressure). Raises BusUnreachable, StreamFull, MissingStream, MessageTooLarge.
        """
        return self.call(
            self._publish(
                subject,
                fact,
                msg_id=msg_id,
                deadline_s=deadline_s,
                full_deadline_s=full_deadline_s,
                traceparent=traceparent,
            ),
            f"publish to {subject}",
            deadline_s + full_deadline_s,
        )

    def inbox(self, spec: ConsumerSpec, fact: type[F]) -> Pending[Inbox[F]]:
        """Bind to an existing durable consumer; raises MissingStream when it was not created."""
        return self.call(self._bind(spec, fact), f"bind to {spec.durable} of {spec.stream}", 3 * _ATTEMPT_S)

    def key_value(self, bucket: str) -> Pending[KeyValue]:
        """Bind to an existing key-value bucket; raises MissingStream when it was not created."""
        return self.call(self._bind_bucket(bucket), f"bind to bucket {bucket}", 3 * _ATTEMPT_S)

    def stream_state(self, stream: str) -> Pending[StreamState]:
        """Ask the broker how much a stream holds."""
        return self.call(self._stream_state(stream), f"state of {stream}", 3 * _ATTEMPT_S)

    def consumer_state(self, spec: ConsumerSpec) -> Pending[ConsumerState]:
        """Ask the broker what waits for a consumer and what its readers hold."""
        return self.call(self._consumer_state(spec), f"state of {spec.durable}", 3 * _ATTEMPT_S)

    def reset_consumer(self, spec: ConsumerSpec) -> Pending[None]:
        """Have all unacknowledged messages of a consumer delivered again at once (a reader restarted)."""
        return self.call(self._reset_consumer(spec), f"reset {spec.durable}", 3 * _ATTEMPT_S)

    def tail(
        self, stream: str, subject: str, fact: type[F], on_fact: Callable[[F], None], *, from_start: bool = False
    ) -> Pending[None]:
        """Call ``on_fact`` on the bus's thread for every fact of a limits stream, in order, for ever.

        Undecodable messages are logged and skipped: a tail only watches, it owns nothing.
        """
        return self.call(self._tail(stream, subject, fact, on_fact, from_start), f"tail {subject}", 3 * _ATTEMPT_S)

    def ensure_stream(self, spec: StreamSpec) -> Pending[None]:
        """Create or update a stream (deploy/bootstrap only)."""
        return self.call(self._ensure_stream(spec), f"create stream {spec.name}", 3 * _ATTEMPT_S)

    def ensure_consumer(self, spec: ConsumerSpec) -> Pending[None]:
        """Create or update a durable consumer (deploy/bootstrap only)."""
        return self.call(self._ensure_consumer(spec), f"create consumer {spec.durable}", 3 * _ATTEMPT_S)

    def ensure_bucket(self, spec: BucketSpec) -> Pending[None]:
        """Create a key-value bucket when it is not there (deploy/bootstrap only)."""
        return self.call(self._ensure_bucket(spec), f"create bucket {spec.bucket}", 3 * _ATTEMPT_S)

    def stream_names(self) -> Pending[list[str]]:
        """Return the names of all streams this user may see."""
        return self.call(self._stream_names(), "list the streams", 3 * _ATTEMPT_S)

    def delete_stream(self, stream: str) -> Pending[bool]:
        """Delete a stream and all it holds; False when it was not there."""
        return self.call(self._delete_stream(stream), f"delete stream {stream}", 3 * _ATTEMPT_S)

    def close(self) -> None:
        """Flush and close the connection and end the thread; idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._thread.is_alive():
            closing = asyncio.run_coroutine_threadsafe(self._shut(), self._loop)
            with contextlib.suppress(Exception):
                closing.result(8.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
        if not self._loop.is_running():
            self._loop.close()

    # ── on the bus's own loop ─────────────────────────────────────────────────────────────────

    async def _connect(self, deadline_s: float) -> None:
        options: dict[str, Any] = {}
        if self._settings.user:
            options = {"user": self._settings.user, "password": self._settings.secret()}
        deadline = time.monotonic() + deadline_s
        pause = _RETRY_S
        while True:
            try:
                await self._connect_once(options)
                break
            except Exception as err:  # noqa: BLE001 - the client raises bare OSError, its own errors, and more
                text = f"{self._last_error} {err}".lower()
                if "authorization" in text or "authentication" in text:
                    raise BusRefused(
                        f"NATS at {self._settings.url} refused user {self._settings.user or '(none)'}: "
                        "check nats.user and nats.password (or nats.password_file)"
                    ) from None
                if time.monotonic() + pause > deadline:
                    raise BusUnreachable(
                        f"no NATS server at {self._settings.url} within {deadline_s:.0f} s ({type(err).__name__}: "
                        f"{err}); is it running? For one machine: penstock up"
                    ) from None
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_MAX_S)
        self._js = self._client.jetstream(timeout=_ATTEMPT_S)
        try:
            await self._js.account_info()
        except nats.js.errors.APIError as err:
            if err.code == 503:
                raise BusRefused(
                    f"NATS at {self._settings.url} has JetStream switched off; start it with -js"
                ) from None
        except nats.errors.NoRespondersError:
            raise BusRefused(f"NATS at {self._settings.url} has JetStream switched off; start it with -js") from None
        except nats.errors.TimeoutError:
            log.debug("account info is not readable for this user", url=self._settings.url)

    async def _connect_once(self, options: dict[str, Any]) -> None:
        client = Client()
        try:
            await client.connect(
                self._settings.url,
                name=self._name,
                connect_timeout=2,
                allow_reconnect=False,
                reconnect_time_wait=0.2,  # type: ignore[arg-type]  # a float is fine, the hint is too narrow
                max_reconnect_attempts=1,  # unlimited, the first connection would be tried for ever
                ping_interval=5,
                max_outstanding_pings=3,
                inbox_prefix=f"_INBOX_{self._settings.user or 'any'}.{secrets.token_hex(4)}",
                error_cb=self._on_error,
                disconnected_cb=self._on_down,
                reconnected_cb=self._on_up,
                **options,
            )
        except BaseException:
            await client.close()
            raise
        client.options.update(allow_reconnect=True, max_reconnect_attempts=-1)  # from now on, for ever
        self._client = client
        self._down_since = None
        self._up.set()

    async def _on_error(self, err: Exception) -> None:
        self._last_error = str(err) or type(err).__name__
        if "permissions violation" in self._last_error.lower():
            self._denials += 1
        log.debug("nats", name=self._name, error=self._last_error)

    async def _on_down(self) -> None:
        if self._closing:
            return
        if self._down_since is None:
            self._down_since = time.monotonic()
            log.warning("NATS is away", url=self._settings.url, name=self._name)
        self._up.clear()
        for answer in list(self._client._resp_map.values()):  # they would run into their own timeouts
            if not answer.done():
                answer.set_exception(nats.errors.ConnectionReconnectingError())
        self._changed()

    async def _on_up(self) -> None:
        log.info("NATS is back", url=self._settings.url, name=self._name, away_s=round(self.down_s, 1))
        self._down_since = None
        self._up.set()
        self._changed()

    def _changed(self) -> None:
        self._num_lives += 1
        for event in self._wake_on_change:
            event.set()

    def _explain(self, text: str) -> str:
        away = f"; NATS at {self._settings.url} has been away for {self.down_s:.0f} s" if self._down_since else ""
        last = f"; last error from NATS: {self._last_error}" if self._last_error else ""
        return f"{text}{away}{last}"

    async def _retry(self, attempt: Callable[[], Awaitable[T]], *, what: str, deadline_s: float) -> T:
        deadline = time.monotonic() + deadline_s
        pause = _RETRY_S
        denials = self._denials
        while True:
            try:
                async with asyncio.timeout_at(self._loop.time() + max(0.0, deadline - time.monotonic())):
                    await self._up.wait()
                async with self._in_flight:
                    return await attempt()
            except _NO_ANSWER as err:
                if self._denials > denials:  # the server tells only the connection, not the request
                    raise BusRefused(self._explain(f"{what} was refused")) from None
                if time.monotonic() + pause > deadline or self._client.is_closed:
                    raise BusUnreachable(
                        self._explain(f"no answer to {what} within {deadline_s:.0f} s ({type(err).__name__})")
                    ) from None
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_MAX_S)

    async def _publish(
        self,
        subject: str,
        fact: Fact,
        *,
        msg_id: str,
        deadline_s: float,
        traceparent: str,
        full_deadline_s: float = 24 * 3600.0,
    ) -> Receipt:
        data = encode(fact)
        headers = {"Nats-Msg-Id": msg_id}
        if traceparent:
            headers["traceparent"] = traceparent
        give_up = time.monotonic() + full_deadline_s
        missing_since = 0.0
        warned = 0.0
        pause = _RETRY_S
        while True:
            try:
                ack = await self._retry(
                    lambda: self._js.publish(subject, data, headers=headers, timeout=_ATTEMPT_S),
                    what=f"publication to {subject}",
                    deadline_s=deadline_s,
                )
            except nats.js.errors.NoStreamResponseError:
                # a server that has just come back may not have opened its streams yet
                missing_since = missing_since or time.monotonic()
                if time.monotonic() - missing_since > _MISSING_GRACE_S and self._client.is_connected:
                    raise MissingStream(
                        f"no stream takes {subject}; create the run's streams with: python -m deploy.bootstrap"
                    ) from None
                await asyncio.sleep(_RETRY_S)
            except nats.js.errors.APIError as err:
                if err.err_code not in _ERR_STREAM_FULL:
                    raise BusError(f"publication to {subject} was refused: {err}") from None
                if time.monotonic() > give_up:
                    raise StreamFull(
                        f"{subject} stayed full for {full_deadline_s:.0f} s ({err.description}); "
                        "its readers are down or too slow"
                    ) from None
                if time.monotonic() - warned > 10.0:
                    warned = time.monotonic()
                    log.warning("waiting: stream is full", subject=subject, reason=err.description)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_MAX_S)
            else:
                return Receipt(ack.seq, bool(ack.duplicate))

    async def _bind(self, spec: ConsumerSpec, fact: type[F]) -> Inbox[F]:
        await self._require_consumer(spec)
        pull = _Pull(self, spec.stream, spec.durable)
        await pull.open()
        inbox = Inbox(self, spec, fact, pull)
        self._spawn(inbox.keep_alive())
        return inbox

    async def _require_consumer(self, spec: ConsumerSpec) -> None:
        """Raise MissingStream when NATS answers and the consumer is not there; silent while NATS is away."""
        if not self._client.is_connected:
            return
        try:
            await self._retry(
                lambda: self._js.consumer_info(spec.stream, spec.durable, timeout=_ATTEMPT_S),
                what=f"consumer {spec.durable} of {spec.stream}",
                deadline_s=2 * _ATTEMPT_S,
            )
        except nats.js.errors.NotFoundError:
            raise MissingStream(
                f"stream {spec.stream} has no consumer {spec.durable}; "
                f"create it with: python -m deploy.bootstrap --run {spec.run_id}"
            ) from None

    def _spawn(self, action: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _direct_get(self, stream: str, request: dict[str, Any]) -> list[Msg]:
        """Read messages of a stream without a consumer (ADR-31); the answer ends with a status message."""
        inbox = self._client.new_inbox()
        sub = await self._client.subscribe(inbox)
        found: list[Msg] = []
        try:
            await self._client.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), reply=inbox)
            while True:
                msg = await sub.next_msg(timeout=_ATTEMPT_S)
                status = (msg.headers or {}).get("Status")
                if status == "503":
                    raise nats.js.errors.NoStreamResponseError
                if status is not None:  # 204 end of batch, 404 nothing there
                    return found
                found.append(msg)
        finally:
            with contextlib.suppress(nats.errors.Error):
                await sub.unsubscribe()

    async def _bind_bucket(self, bucket: str) -> KeyValue:
        try:
            store = await self._retry(
                lambda: self._js.key_value(bucket), what=f"bucket {bucket}", deadline_s=2 * _ATTEMPT_S
            )
        except (nats.js.errors.BucketNotFoundError, nats.js.errors.NotFoundError):
            raise MissingStream(f"no bucket {bucket}; create it with: python -m deploy.bootstrap") from None
        return KeyValue(self, bucket, store)

    async def _stream_state(self, stream: str) -> StreamState:
        info = await self._admin(lambda: self._js.stream_info(stream), f"stream {stream}")
        state = info.state
        return StreamState(state.messages, state.bytes, state.first_seq, state.last_seq)

    async def _consumer_state(self, spec: ConsumerSpec) -> ConsumerState:
        info = await self._admin(
            lambda: self._js.consumer_info(spec.stream, spec.durable), f"consumer {spec.durable} of {spec.stream}"
        )
        return ConsumerState(info.num_pending or 0, info.num_ack_pending or 0, info.num_redelivered or 0)

    async def _reset_consumer(self, spec: ConsumerSpec) -> None:
        await self._admin(
            lambda: self._js.reset_consumer(spec.stream, spec.durable), f"consumer {spec.durable} of {spec.stream}"
        )

    async def _admin(self, attempt: Callable[[], Awaitable[T]], what: str) -> T:
        try:
            return await self._retry(attempt, what=what, deadline_s=2 * _ATTEMPT_S)
        except nats.js.errors.NotFoundError:
            raise MissingStream(f"no {what}; create it with: python -m deploy.bootstrap") from None
        except nats.js.errors.APIError as err:
            raise BusError(f"{what}: {err}") from None

    async def _tail(
        self, stream: str, subject: str, fact: type[F], on_fact: Callable[[F], None], from_start: bool
    ) -> None:
        state = await self._stream_state(stream)
        next_sequence = 1 if from_start else state.last_sequence + 1
        self._spawn(self._tail_for_ever(stream, subject, fact, on_fact, next_sequence))

    async def _tail_for_ever(
        self, stream: str, subject: str, fact: type[F], on_fact: Callable[[F], None], next_sequence: int
    ) -> None:
        while True:
            name = f"tail-{secrets.token_hex(6)}"  # gone by itself when nobody pulls
            config = api.ConsumerConfig(
                name=name,
                filter_subject=subject,
                ack_policy=api.AckPolicy.NONE,
                deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=next_sequence,
                inactive_threshold=3 * _TAIL_PULL_S,
                mem_storage=True,
            )
            pull = _Pull(self, stream, name)
            try:
                await self._retry(
                    lambda config=config: self._js.add_consumer(stream, config, timeout=_ATTEMPT_S),
                    what=f"tail of {stream}",
                    deadline_s=3600.0,
                )
                await pull.open()
                lives = self._num_lives
                while lives == self._num_lives:  # the server forgets such a consumer when it ends
                    for msg in await pull.take(256, _TAIL_PULL_S):
                        next_sequence = msg.metadata.sequence.stream + 1
                        _hand_over(msg, fact, on_fact)
            except nats.js.errors.NotFoundError:
                log.warning("a tail ends: its stream was deleted", stream=stream)
                return
            except (_Refused, BusError, nats.errors.Error, nats.js.errors.Error) as err:
                log.debug("tail starts again", stream=stream, reason=str(err))
                await asyncio.sleep(_RETRY_MAX_S / 4)
            finally:
                await pull.close()

    async def _ensure_stream(self, spec: StreamSpec) -> None:
        config = api.StreamConfig(
            name=spec.name,
            subjects=list(spec.subjects),
            storage=api.StorageType.FILE,
            num_replicas=1,
            retention=api.RetentionPolicy.WORK_QUEUE if spec.retention == "workqueue" else api.RetentionPolicy.LIMITS,
            discard=api.DiscardPolicy.NEW if spec.retention == "workqueue" else api.DiscardPolicy.OLD,
            max_msgs=spec.max_msgs,
            max_bytes=spec.max_bytes,
            max_age=spec.max_age_s or None,
            max_msg_size=spec.max_msg_bytes,
            duplicate_window=spec.duplicate_window_s,
        )
        what = f"stream {spec.name}"
        try:
            await self._retry(lambda: self._js.add_stream(config), what=what, deadline_s=2 * _ATTEMPT_S)
        except nats.js.errors.BadRequestError as err:
            if err.err_code != _ERR_OTHER_CONFIG:
                raise BusError(f"{what}: {err}") from None
            await self._admin(lambda: self._js.update_stream(config), what)
        except nats.js.errors.APIError as err:
            raise BusError(f"{what}: {err}") from None

    async def _ensure_consumer(self, spec: ConsumerSpec) -> None:
        config = api.ConsumerConfig(
            durable_name=spec.durable,
            filter_subject=spec.filter_subject,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=spec.ack_wait_s,
            max_ack_pending=spec.max_ack_pending,
            max_deliver=-1,
            deliver_policy=api.DeliverPolicy.ALL,
        )
        await self._admin(lambda: self._js.add_consumer(spec.stream, config), f"consumer {spec.durable}")

    async def _ensure_bucket(self, spec: BucketSpec) -> None:
        config = api.KeyValueConfig(
            bucket=spec.bucket, history=spec.history, ttl=spec.ttl_s or None, max_bytes=64 * 1024 * 1024, direct=True
        )
        try:
            await self._bind_bucket(spec.bucket)
        except MissingStream:
            await self._admin(lambda: self._js.create_key_value(config), f"bucket {spec.bucket}")

    async def _stream_names(self) -> list[str]:
        names: list[str] = []
        while True:
            page = await self._admin(functools.partial(self._js.streams_info, offset=len(names)), "list of streams")
            names += [info.config.name or "" for info in page]
            if len(page) < _STREAMS_PER_PAGE:
                return names

    async def _delete_stream(self, stream: str) -> bool:
        try:
            return bool(await self._admin(lambda: self._js.delete_stream(stream), f"stream {stream}"))
        except MissingStream:
            return False

    async def _shut(self) -> None:
        await _cancel(self._tasks - {asyncio.current_task()})
        if self._client.is_connected:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._client.flush(timeout=2), 3.0)
        await self._client.close()
        await _cancel(asyncio.all_tasks() - {asyncio.current_task()})  # the client does not wait for its own


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _hand_over(msg: Msg, fact: type[F], on_fact: Callable[[F], None]) -> None:
    try:
        on_fact(decode(msg.data, fact))
    except WireError as err:
        log.warning("skipped an unreadable message", subject=msg.subject, error=str(err))


def _group_ids(fact: Fact | None) -> tuple[str, ...]:
    groups = getattr(fact, "tasks", None) or getattr(fact, "groups", None) or ()
    return tuple(getattr(g, "group_id", None) or g.generated.group_id for g in groups)
