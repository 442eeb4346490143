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
import concurrent.futures
import contextlib
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import nats
import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
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
_LOOP_GRACE_S = 30.0  # a call that outlives its own deadline by this much has lost its thread
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
        return self._inbox._settle(self, self._inbox._ack(self), "acknowledge")

    def give_back(self, delay_s: float) -> Pending[None]:
        """Return the message, to be delivered again (to anybody) after ``delay_s``."""
        return self._inbox._settle(self, self._inbox._nak(self, delay_s), "give back")

    def dead_letter(self, reason: str, detail: str) -> Pending[None]:
        """Store the message among the dead letters with its reason, then end it."""
        return self._inbox._settle(
            self,
            self._inbox._bury(self._msg, reason, detail, self.fact),
            "dead-letter",
        )


class Inbox(Generic[F]):
    """A durable consumer's reader: fetches, keeps alive what is held, refuses poison."""

    def __init__(self, bus: Bus, spec: ConsumerSpec, fact: type[F], sub: JetStreamContext.PullSubscription) -> None:
        """Use `Bus.inbox` instead."""
        self._bus = bus
        self._fact = fact
        self._sub = sub
        self._held: dict[int, Delivery[F]] = {}
        self.spec = spec

    def fetch(self, max_messages: int, wait_s: float) -> Pending[list[Delivery[F]]]:
        """Take up to ``max_messages``, waiting at most ``wait_s`` for the first; empty when there is none.

        While NATS is down the result is empty too, after ``wait_s``: the caller's loop goes on and
        `Bus.down_s` says for how long it has been so.
        """
        return self._bus.call(self._fetch(max_messages, wait_s), f"fetch from {self.spec.durable}", wait_s)

    @property
    def num_held(self) -> int:
        """Messages fetched and not yet ended."""
        return len(self._held)

    async def _fetch(self, max_messages: int, wait_s: float) -> list[Delivery[F]]:
        try:
            messages = await self._sub.fetch(max_messages, timeout=wait_s)
        except (TimeoutError, nats.errors.TimeoutError):
            return []
        except (
            nats.errors.ConnectionClosedError,
            nats.errors.ConnectionReconnectingError,
            nats.errors.NoServersError,
            nats.js.errors.ServiceUnavailableError,
            nats.errors.NoRespondersError,
        ):
            await asyncio.sleep(min(wait_s, 0.5))
            return []
        except nats.js.errors.APIError as err:
            if err.code in {404, 409}:
                raise MissingStream(
                    f"consumer {self.spec.durable} of stream {self.spec.stream} is gone ({err.description}); "
                    f"create it with: python -m deploy.bootstrap --run {self.spec.run_id}"
                ) from None
            raise BusError(f"fetch from {self.spec.durable}: {err}") from None
        deliveries = []
        for msg in messages:
            delivery = await self._receive(msg)
            if delivery is not None:
                deliveries.append(delivery)
        return deliveries

    async def _receive(self, msg: Msg) -> Delivery[F] | None:
        held = self._held.get(msg.metadata.sequence.stream)
        if held is not None:
            held.renew(msg)
            return None
        try:
            fact = decode(msg.data, self._fact)
        except WireError as err:
            log.warning("poison message", subject=msg.subject, error=str(err))
            await self._bury(msg, type(err).__name__, str(err), None)
            return None
        delivery = Delivery(self, msg, fact)
        self._held[delivery.sequence] = delivery
        return delivery

    def _settle(self, delivery: Delivery[F], action: Coroutine[Any, Any, None], what: str) -> Pending[None]:
        async def run() -> None:
            try:
                await action
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
            group_ids=_group_ids(fact),
            num_delivered=meta.num_delivered or 1,
            payload=msg.data if len(msg.data) < 48 * 1024 else b"",
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
                with contextlib.suppress(nats.errors.Error):  # not connected: the next round renews
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
        return self._call(self._get(key), f"read {self.bucket}/{key}")

    def put(self, key: str, value: bytes) -> Pending[int]:
        """Write a key whatever it holds; returns the revision."""
        return self._call(self._store.put(key, value), f"write {self.bucket}/{key}")

    def swap(self, key: str, value: bytes, expected_revision: int | None) -> Pending[int]:
        """Write a key only if it still has ``expected_revision`` (None: only if it does not exist).

        Raises CompareAndSwapFailed when somebody else was first.
        """
        return self._call(self._swap(key, value, expected_revision), f"swap {self.bucket}/{key}")

    def delete(self, key: str) -> Pending[bool]:
        """Remove a key."""
        return self._call(self._store.delete(key), f"delete {self.bucket}/{key}")

    def entries(self) -> Pending[list[Entry]]:
        """Read all keys that are there."""
        return self._call(self._entries(), f"list {self.bucket}")

    def _call(self, action: Awaitable[T], what: str) -> Pending[T]:
        async def run() -> T:
            try:
                return await asyncio.wait_for(action, 2 * _ATTEMPT_S)
            except (
                TimeoutError,
                nats.errors.TimeoutError,
                nats.errors.NoRespondersError,
                nats.js.errors.NoStreamResponseError,
                nats.errors.ConnectionClosedError,
            ) as err:
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
        try:
            keys = await self._store.keys()
        except nats.js.errors.NoKeysError:
            return []
        found = [await self._get(key) for key in keys]
        return [entry for entry in found if entry is not None]


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
        self._tasks: set[asyncio.Task[None]] = set()
        self._down_since: float | None = None
        self._last_error = ""

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
        """Run a coroutine on the bus's loop."""
        if self._loop.is_closed() or not self._thread.is_alive():
            action.close()
            raise BusUnreachable(f"{what}: the bus is closed")
        return Pending(asyncio.run_coroutine_threadsafe(action, self._loop), what, deadline_s + _LOOP_GRACE_S)

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

    def delete_stream(self, stream: str) -> Pending[bool]:
        """Delete a stream and all it holds; False when it was not there."""
        return self.call(self._delete_stream(stream), f"delete stream {stream}", 3 * _ATTEMPT_S)

    def close(self) -> None:
        """Flush and close the connection and end the thread; idempotent."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            closing = asyncio.run_coroutine_threadsafe(self._shut(), self._loop)
            with contextlib.suppress(Exception):
                closing.result(5.0)
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
                self._client = await nats.connect(
                    self._settings.url,
                    name=self._name,
                    connect_timeout=2,
                    allow_reconnect=True,
                    reconnect_time_wait=0.2,
                    max_reconnect_attempts=-1,
                    ping_interval=5,
                    max_outstanding_pings=3,
                    inbox_prefix=f"_INBOX_{self._settings.user or 'any'}_{secrets.token_hex(4)}",
                    error_cb=self._on_error,
                    disconnected_cb=self._on_down,
                    reconnected_cb=self._on_up,
                    **options,
                )
                break
            except Exception as err:
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
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
            log.debug("account info is not readable for this user", url=self._settings.url)

    async def _on_error(self, err: Exception) -> None:
        self._last_error = str(err) or type(err).__name__
        log.debug("nats", name=self._name, error=self._last_error)

    async def _on_down(self) -> None:
        if self._down_since is None:
            self._down_since = time.monotonic()
            log.warning("NATS is away", url=self._settings.url, name=self._name)

    async def _on_up(self) -> None:
        log.info("NATS is back", url=self._settings.url, name=self._name, away_s=round(self.down_s, 1))
        self._down_since = None

    def _explain(self, text: str) -> str:
        away = f"; NATS at {self._settings.url} has been away for {self.down_s:.0f} s" if self._down_since else ""
        last = f"; last error from NATS: {self._last_error}" if self._last_error else ""
        return f"{text}{away}{last}"

    async def _retry(self, attempt: Callable[[], Awaitable[T]], *, what: str, deadline_s: float) -> T:
        deadline = time.monotonic() + deadline_s
        pause = _RETRY_S
        while True:
            try:
                return await attempt()
            except (
                TimeoutError,
                nats.errors.TimeoutError,
                nats.errors.NoRespondersError,
                nats.errors.ConnectionClosedError,
                nats.errors.OutboundBufferLimitError,
            ) as err:
                if "permission" in self._last_error.lower():
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
                if self._client.is_connected and self._down_since is None:
                    raise MissingStream(
                        f"no stream takes {subject}; create the run's streams with: python -m deploy.bootstrap"
                    ) from None
                await asyncio.sleep(pause)
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
        hint = f"create it with: python -m deploy.bootstrap --run {spec.run_id}"
        try:
            await self._retry(
                lambda: self._js.consumer_info(spec.stream, spec.durable, timeout=_ATTEMPT_S),
                what=f"consumer {spec.durable} of {spec.stream}",
                deadline_s=2 * _ATTEMPT_S,
            )
        except nats.js.errors.NotFoundError:
            raise MissingStream(f"stream {spec.stream} has no consumer {spec.durable}; {hint}") from None
        sub = await self._js.pull_subscribe_bind(consumer=spec.durable, stream=spec.stream)
        inbox = Inbox(self, spec, fact, sub)
        self._spawn(inbox.keep_alive())
        return inbox

    def _spawn(self, action: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
        policy = api.DeliverPolicy.ALL if from_start else api.DeliverPolicy.NEW

        async def receive(msg: Msg) -> None:
            try:
                on_fact(decode(msg.data, fact))
            except WireError as err:
                log.warning("skipped an unreadable message", subject=msg.subject, error=str(err))

        try:
            await self._js.subscribe(subject, stream=stream, ordered_consumer=True, deliver_policy=policy, cb=receive)
        except nats.js.errors.NotFoundError:
            raise MissingStream(f"no stream {stream}; create it with: python -m deploy.bootstrap") from None

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
        try:
            await self._js.add_stream(config)
        except nats.js.errors.BadRequestError as err:
            if err.err_code != 10058:  # exists with another configuration
                raise BusError(f"stream {spec.name}: {err}") from None
            await self._admin(lambda: self._js.update_stream(config), f"stream {spec.name}")
        except nats.js.errors.APIError as err:
            raise BusError(f"stream {spec.name}: {err}") from None

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
        try:
            await self._js.key_value(spec.bucket)
        except (nats.js.errors.BucketNotFoundError, nats.js.errors.NotFoundError):
            await self._js.create_key_value(
                api.KeyValueConfig(
                    bucket=spec.bucket, history=spec.history, ttl=spec.ttl_s or None, max_bytes=64 * 1024 * 1024
                )
            )

    async def _delete_stream(self, stream: str) -> bool:
        try:
            return bool(await self._js.delete_stream(stream))
        except nats.js.errors.NotFoundError:
            return False

    async def _shut(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._client.is_connected:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._client.flush(timeout=2), 3.0)
        await self._client.close()


def _group_ids(fact: Fact | None) -> tuple[str, ...]:
    groups = getattr(fact, "tasks", None) or getattr(fact, "groups", None) or ()
    return tuple(getattr(g, "group_id", None) or g.generated.group_id for g in groups)
