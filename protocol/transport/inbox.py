"""The reader of a durable consumer: fetch messages, renew those that are held, dead-letter those that do not decode."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.protocol.errors import BusError, BusUnreachable, MalformedFact, ReaderKilled, WireError
from penstock.protocol.facts import Fact, decode
from penstock.protocol.streams import KEEPALIVES_PER_ACK_WAIT, ConsumerSpec
from penstock.protocol.transport.delivery import (
    MOST_KILLED,
    Acks,
    Delivery,
    KillMarks,
    require_consumer,
    store_dead_letter,
)
from penstock.protocol.transport.loop_thread import Pending
from penstock.protocol.transport.nats_connection import Connection

_LINGER_S = 5.0  # the longest single pull request
_LATE_S = 0.25  # how late the server's status of an expired request may arrive
_GATHER_S = 0.01  # between two requests of which the first got messages, and fewer than it asked for
_REDELIVER_S = 1.0  # deadline of a redelivery; the acknowledgement is retried anyway
_NO_MESSAGES = ("404", "408")
log = structlog.get_logger("protocol.bus")
F = TypeVar("F", bound=Fact)


class PullRefused(Exception):
    """The server ended a pull request for another reason than that there are no messages."""


class Pull:
    """Sends pull requests to one consumer over one subscription; the client library's ``fetch`` waits too long.

    A pull returns as soon as there is a message, never leaves an unfinished request that would take
    messages from another reader, and sends its request again after a reconnect.

    While messages arrive one by one, the next request is sent a few milliseconds later: those that arrive meanwhile come
    with one request and one wake-up of the reader, which cost more than a message does. The first one after a pause never waits.
    """

    def __init__(
        self, connection: Connection, stream: str, consumer: str, renews: Callable[[Msg], bool] = lambda _: False
    ) -> None:
        """Prepare for a consumer; `open` subscribes. ``renews`` returns True for a redelivery of a held message, whose handle it replaces."""
        self._connection = connection
        self._renews = renews
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._reply = connection.client.new_inbox()
        self._number = 0
        self._arrived: collections.deque[Msg] = collections.deque()
        self._ended: Msg | None = None  # the status message that ended the current request
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._next_at = 0.0  # of time.monotonic(): when the next request is sent
        self._sub: Subscription | None = None

    async def open(self) -> None:
        self._sub = await self._connection.client.subscribe(f"{self._reply}.*", cb=self._on_message)
        self._connection.watch(self._changed)

    async def close(self) -> None:
        self._connection.unwatch(self._changed)
        if self._sub is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._sub.unsubscribe()

    async def take(self, max_messages: int, wait_s: float) -> list[Msg]:
        """Return the available messages, or wait for the first; raises PullRefused for a status other than "no messages".

        Returns when the server has ended the request, which is ``wait_s`` and the way there and back: a message
        that the server sent in its last moment would otherwise wait here until the next call.
        """
        async with self._turn:
            deadline = time.monotonic() + wait_s
            if not self._arrived and (pause_s := min(self._next_at, deadline) - time.monotonic()) > 0.0:
                await asyncio.sleep(pause_s)
            if not self._arrived and max_messages > 1:
                # with no_wait and expires the server waits for the first message, sends those available, and ends the request
                await self._ask({"batch": max_messages, "no_wait": True}, max_messages, deadline)
            while not self._arrived and deadline > time.monotonic():
                await self._ask({"batch": 1}, 1, deadline)
            taken = [self._arrived.popleft() for _ in range(min(max_messages, len(self._arrived)))]
            if 0 < len(taken) < max_messages:
                self._next_at = time.monotonic() + _GATHER_S
            return taken

    @property
    def waiting(self) -> list[Msg]:
        return list(self._arrived)

    async def redeliver(self, num_messages: int) -> None:
        """Pull up to so many messages that the server no longer counts as delivered; those not held wait for `take`.

        For a restarted server, whose consumer may have lost its delivery state.
        """
        client = self._connection.client
        answers = await client.subscribe(client.new_inbox())
        try:
            request = json.dumps({"batch": num_messages, "no_wait": True}).encode()
            await client.publish(self._subject, request, reply=answers.subject)
            with contextlib.suppress(nats.errors.TimeoutError):  # it has no more
                for _ in range(num_messages):
                    msg = await answers.next_msg(timeout=_REDELIVER_S)
                    if msg.subject == answers.subject:  # a status message: there are no more
                        break
                    if not self._renews(msg):
                        self._arrived.append(msg)
                        self._changed.set()
        finally:
            await answers.unsubscribe()

    async def _ask(self, body: dict[str, Any], enough: int, deadline: float) -> None:
        """Send a request that expires: one that the server lost (its stream was deleted) is sent again soon."""
        linger = min(max(0.0, deadline - time.monotonic()), _LINGER_S)
        until = time.monotonic() + linger + _LATE_S
        expires = {"expires": int(linger * 1e9)} if linger > 0 else {}
        await self._request(body | expires, enough, until)

    async def _on_message(self, msg: Msg) -> None:
        if not (msg.headers and "Status" in msg.headers and not msg.data and msg.subject.startswith(self._reply)):
            try:
                _ = msg.metadata
            except (
                nats.errors.Error,
                ValueError,
                LookupError,
            ) as err:  # the server delivers it again after the ack wait
                log.warning("a delivery whose address cannot be read", subject=msg.subject[:200], error=str(err))
            else:
                self._arrived.append(msg)
        elif msg.subject == f"{self._reply}.{self._number}" and msg.headers["Status"] != "100":
            self._ended = msg
        self._changed.set()

    async def _request(self, body: dict[str, Any], enough: int, deadline: float) -> None:
        if not self._connection.is_up:
            await self._wait_for_change(deadline)
            return
        self._number += 1
        self._ended = None
        reply = f"{self._reply}.{self._number}"
        await self._connection.client.publish(self._subject, json.dumps(body).encode(), reply=reply)
        transitions = self._connection.num_transitions
        while len(self._arrived) < enough and self._ended is None:
            if not await self._wait_for_change(deadline) or transitions != self._connection.num_transitions:
                return
        if self._ended is not None and self._ended.headers and self._ended.headers["Status"] not in _NO_MESSAGES:
            raise PullRefused(f"{self._ended.headers['Status']} {self._ended.headers.get('Description', '')}")

    async def _wait_for_change(self, deadline: float) -> bool:
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True


class Inbox(Generic[F]):
    def __init__(self, connection: Connection, spec: ConsumerSpec, fact: type[F]) -> None:
        self._connection = connection
        self._fact = fact
        self._held: dict[int, Delivery[F]] = {}
        self._pull = Pull(connection, spec.stream, spec.durable, self._renews)
        self._acks = Acks(connection, spec, lambda: self._pull.redeliver(max(1, len(self._held))))
        self._marks = KillMarks(connection, spec)
        self.spec = spec

    @classmethod
    async def bind(cls, connection: Connection, spec: ConsumerSpec, fact: type[F]) -> Inbox[F]:
        await require_consumer(connection, spec)
        inbox = cls(connection, spec, fact)
        await inbox._pull.open()
        connection.spawn(inbox._keep_alive())
        return inbox

    def fetch(self, max_messages: int, wait_s: float) -> Pending[list[Delivery[F]]]:
        """Return up to ``max_messages``, waiting at most ``wait_s`` for the first; empty when there is none.

        Returns as soon as there is at least one. While NATS is unreachable the result is empty too, after
        ``wait_s``: the caller's loop continues, and `Bus.down_s` is the length of the outage.
        Calls on one inbox take turns. Raises MissingStream when the consumer was deleted.
        """
        return self._connection.call(self._fetch(max_messages, wait_s), f"fetch from {self.spec.durable}", wait_s)

    @property
    def num_held(self) -> int:
        """Messages fetched and not yet acknowledged, given back or dead-lettered."""
        return len(self._held)

    async def _fetch(self, max_messages: int, wait_s: float) -> list[Delivery[F]]:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                messages = await self._pull.take(max_messages, max(0.0, deadline - time.monotonic()))
            except (PullRefused, nats.errors.ConnectionClosedError, nats.errors.OutboundBufferLimitError) as err:
                with contextlib.suppress(BusUnreachable):  # a cluster that elects a leader is one, too
                    await require_consumer(self._connection, self.spec)
                log.debug("no messages", consumer=self.spec.durable, reason=str(err))
                await asyncio.sleep(min(wait_s, 0.2))
                messages = []
            # no await from here on, but for redeliveries: a cancelled fetch must not hold messages that no caller gets
            received = [self._receive(msg) for msg in messages]
            deliveries = await self._not_quarantined([delivery for delivery in received if delivery is not None])
            if deliveries or time.monotonic() >= deadline:
                return deliveries

    async def _not_quarantined(self, deliveries: list[Delivery[F]]) -> list[Delivery[F]]:
        again = [delivery for delivery in deliveries if delivery.num_delivered > 1] if self._marks.is_used else []
        if not again:
            return deliveries
        try:
            killed = await asyncio.gather(*(self._marks.begin(d.sequence, d.num_delivered) for d in again))
        except BaseException:
            for delivery in deliveries:
                self._release(delivery)
            raise
        guilty = [delivery for delivery, num in zip(again, killed, strict=True) if num >= MOST_KILLED]
        for delivery in guilty:
            log.error("message quarantined: two of its readers were killed", sequence=delivery.sequence)
            self._connection.spawn(self._quarantine(delivery))
        return [delivery for delivery in deliveries if delivery not in guilty]

    async def _quarantine(self, delivery: Delivery[F]) -> None:
        text = (
            f"{MOST_KILLED} readers of {self.spec.durable} were killed, or lost NATS, while they processed message "
            f"{delivery.sequence} of {self.spec.stream}; it is not processed again. Look into their logs, then send it again "
            "with `penstock dead-letters`"
        )
        await _stored(delivery.dead_letter(ReaderKilled.__name__, text), delivery.msg)

    def _renews(self, msg: Msg) -> bool:
        held = self._held.get(msg.metadata.sequence.stream)
        if held is not None:
            held.renew(msg)
        return held is not None

    def _receive(self, msg: Msg) -> Delivery[F] | None:
        if self._renews(msg):
            return None
        try:
            fact = decode(msg.data, self._fact)
            run_id = getattr(fact, "run_id", self.spec.run_id)
            if run_id != self.spec.run_id:
                raise MalformedFact(f"a message of run {run_id!r} in a stream of run {self.spec.run_id!r}")
        except WireError as err:
            log.warning("message does not decode", subject=msg.subject, error=str(err))
            letter = (lambda: msg, type(err).__name__, str(err))
            self._connection.spawn(_stored(store_dead_letter(self._connection, self.spec, self._acks, *letter), msg))
            return None
        delivery = Delivery(self._connection, self.spec, self._acks, msg, fact, self._release, self._marks)
        self._held[delivery.sequence] = delivery
        return delivery

    def _release(self, delivery: Delivery[F]) -> None:
        if self._held.get(delivery.sequence) is delivery:  # given back, it may have been redelivered already
            del self._held[delivery.sequence]

    async def _keep_alive(self) -> None:
        period = self.spec.ack_wait_s / KEEPALIVES_PER_ACK_WAIT
        while True:
            await asyncio.sleep(period)
            for delivery in list(self._held.values()):
                if self._connection.is_up:  # else the next round does
                    await delivery.keep_alive()
            for msg in self._pull.waiting:
                if self._connection.is_up:
                    with contextlib.suppress(nats.errors.Error):
                        await msg.in_progress()


async def _stored(letter: Awaitable[None], msg: Msg) -> None:
    try:
        await letter
    except BusError as err:  # the message is redelivered after ack_wait, and this is tried again
        log.warning("could not store a dead letter", subject=msg.subject, error=str(err))
