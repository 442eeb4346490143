"""Watch a stream: all facts, in order, across restarts of the server; or read it without a consumer (ADR-31).

A tail has no consumer on the server, so a role that watches needs no right to create one. The server announces each
stored message to `subjects.stored`; the tail then reads what follows. Neither delivers or acknowledges anything.

Any server that stores the stream answers a direct get. In a cluster that may be one that lags: what it has is
everything up to some sequence number. `read_stream` therefore asks the leader for what follows the last message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg

from penstock.protocol import subjects
from penstock.protocol.errors import BusError, MalformedFact, MissingStream, WireError
from penstock.protocol.facts import Fact, RunEvent, decode
from penstock.protocol.transport.nats_connection import ATTEMPT_S, REQUEST_S, Connection
from penstock.protocol.transport.stream_admin import stream_state

_BATCH = 512  # messages of one answer
_MAX_BYTES = 8 * 1024 * 1024
F = TypeVar("F", bound=Fact)
log = structlog.get_logger("protocol.bus")
# A stream of an older release announces nothing; of a newer one, no announcement is lost on a live connection.
_POLL_S = 30.0
_MAX_MESSAGES = 256  # in one answer to a tail
_READ_S = 3600.0  # how long a read is retried while the server is unreachable
_POLL_CLUSTER_S = 5.0  # of a cluster: one between two servers may be, while the connection to one of them lives
_PAUSE_S = 0.5
_LAG_PAUSE_S = 0.05  # a replica that lags is asked again after this
_LAG_S = 5.0  # and no longer than this for one announcement


@dataclass(frozen=True, slots=True)
class StoredMessage:
    sequence: int
    subject: str
    data: bytes
    at: datetime  # when the server stored it, UTC


async def direct_get(connection: Connection, stream: str, request: dict[str, Any]) -> list[Msg]:
    reply = connection.client.new_inbox()
    sub = await connection.client.subscribe(reply)
    messages: list[Msg] = []
    try:
        await connection.client.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), reply=reply)
        while True:
            msg = await sub.next_msg(timeout=ATTEMPT_S)
            headers = msg.headers or {}
            # A stored message, which the server numbers, may have any other header; its writer chose it.
            status = headers.get("Status") if "Nats-Sequence" not in headers else None
            if status == "503":
                raise nats.js.errors.NoStreamResponseError
            if status is not None:  # 204 end of batch, 404 no message
                return messages
            _stored_message(msg)  # in the request's own try: one with damaged headers is read again
            messages.append(msg)
    finally:
        with contextlib.suppress(nats.errors.Error):
            await sub.unsubscribe()


def _stored_message(msg: Msg) -> StoredMessage:
    headers = msg.headers or {}
    at = datetime.fromisoformat(headers["Nats-Time-Stamp"])
    return StoredMessage(int(headers["Nats-Sequence"]), headers["Nats-Subject"], msg.data, at)


async def read_stream(
    connection: Connection, stream: str, subject: str = ">", *, after: int = 0, most: int | None = None
) -> list[StoredMessage]:
    """Return all messages of a stream, or those of a subject, in order; raises MissingStream or BusUnreachable.

    ``after`` is the sequence number before the first one, ``most`` the number of messages (None: all).
    """
    messages: list[StoredMessage] = []
    while most is None or len(messages) < most:
        request = {
            "seq": (messages[-1].sequence if messages else after) + 1,
            "next_by_subj": subject,
            "batch": _BATCH if most is None else min(_BATCH, most - len(messages)),
            "max_bytes": _MAX_BYTES,
        }
        try:
            batch = await connection.retry(
                lambda request=request: direct_get(connection, stream, request),
                what=f"messages of {stream}",
                deadline_s=REQUEST_S,
            )
        except nats.js.errors.NoStreamResponseError:
            raise MissingStream(
                f"no stream {stream} that can be read; create or update it with: penstock bootstrap run.toml"
            ) from None
        if not batch:
            break
        messages += [_stored_message(msg) for msg in batch]
    if connection.is_clustered and (most is None or len(messages) < most):
        await _read_on(connection, stream, subject, messages, after, most)
    return messages


async def _read_on(
    connection: Connection, stream: str, subject: str, messages: list[StoredMessage], after: int, most: int | None
) -> None:
    """Add the messages that the stream's leader has and that the server which answered does not have yet."""
    while most is None or len(messages) < most:
        sequence = (messages[-1].sequence if messages else after) + 1
        try:
            msg = await connection.retry(
                lambda sequence=sequence: connection.js.get_msg(stream, seq=sequence, subject=subject, next=True),
                what=f"messages of {stream} after {sequence - 1}, of its leader",
                deadline_s=REQUEST_S,
            )
        except nats.js.errors.NotFoundError:
            return
        assert msg.time is not None, "the server dates every message"
        messages.append(StoredMessage(msg.seq or 0, msg.subject or "", msg.data or b"", msg.time))


@dataclass(eq=False)
class Tail(Generic[F]):
    """A watcher of one stream. It acknowledges nothing; messages that do not decode are reported and skipped."""

    connection: Connection
    stream: str
    subject: str
    fact: type[F]
    on_fact: Callable[[F, int, str], None]
    on_unreadable: Callable[[WireError], None] = lambda _: None
    gather_s: float = 0.0

    def __post_init__(self) -> None:
        self._next_sequence = 1
        self._stored = asyncio.Event()  # there may be messages that are not read yet
        self._announced = 0  # highest sequence number that was announced

    async def start(self, *, after: int | None) -> None:
        last = (await stream_state(self.connection, self.stream)).last_sequence
        if after is not None and after > last:  # the stream was created again: all its messages are unread
            after = 0
        self._next_sequence = 1 + (last if after is None else after)
        self.connection.spawn(self._watch_until_closed())

    async def _watch_until_closed(self) -> None:
        announced = await self.connection.client.subscribe(subjects.stored(self.subject), cb=self._on_announcement)
        self.connection.watch(self._stored)
        try:
            while True:
                self._stored.clear()
                if not await self._read():
                    log.warning("tail stopped: its stream was deleted", stream=self.stream)
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_CLUSTER_S if self.connection.is_clustered else _POLL_S):
                        await self._stored.wait()
                if self.gather_s:
                    await asyncio.sleep(self.gather_s)
        finally:
            self.connection.unwatch(self._stored)
            with contextlib.suppress(nats.errors.Error):
                await announced.unsubscribe()

    async def _on_announcement(self, msg: Msg) -> None:
        self._announced = max(self._announced, int((msg.headers or {}).get("Nats-Sequence", 0)))
        self._stored.set()

    async def _read(self) -> bool:
        """Hand over all messages from the position on; return False if the stream was deleted.

        The leader of a stream announces; another of its servers may answer, and have the message a moment later.
        """
        give_up = time.monotonic() + _LAG_S
        while True:
            try:
                what = f"tail of {self.stream}"
                messages = await self.connection.retry(self._next_messages, what=what, deadline_s=_READ_S)
            except (BusError, nats.errors.Error, nats.js.errors.Error) as err:
                log.debug("tail restarts", stream=self.stream, reason=str(err))
                await asyncio.sleep(_PAUSE_S)
                if await self._is_deleted():
                    return False
                continue
            for stored in map(_stored_message, messages):
                self._next_sequence = stored.sequence + 1
                self._hand_over(stored)
            if not messages or (messages[-1].headers or {}).get("Nats-Num-Pending") == "0":
                if time.monotonic() > give_up:  # it may have been removed: later reads do not wait for it again
                    self._announced = 0
                if self._next_sequence > self._announced:
                    return True
                await asyncio.sleep(_LAG_PAUSE_S)

    async def _next_messages(self) -> list[Msg]:
        limits = {"batch": _MAX_MESSAGES, "max_bytes": _MAX_BYTES}
        request = {"seq": self._next_sequence, "next_by_subj": self.subject, **limits}
        return await direct_get(self.connection, self.stream, request)

    async def _is_deleted(self) -> bool:
        try:
            await stream_state(self.connection, self.stream)
        except MissingStream:
            return True
        except BusError:  # unreachable, or refused: the next read tells
            return False
        return False

    def _hand_over(self, stored: StoredMessage) -> None:
        subject = stored.subject
        try:
            fact = decode(stored.data, self.fact)
            if isinstance(fact, RunEvent) and fact.kind != subjects.kind_of_event(subject):
                raise MalformedFact(f"an event of kind {fact.kind[:40]!r} was published to {subject}")
        except WireError as err:
            log.warning("skipped a message that does not decode", subject=subject, error=str(err))
            self.on_unreadable(err)
            return
        try:
            self.on_fact(fact, stored.sequence, subject)
        except Exception:  # a reader that cannot use one message still gets the others
            log.exception("a reader failed on a message", subject=subject, sequence=stored.sequence)
