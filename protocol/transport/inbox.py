"""The reader of a durable consumer: fetch messages, renew those that are held, dead-letter those that do not decode."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Generic, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg

from penstock.protocol.errors import BusError, BusUnreachable, MalformedFact, MissingStream, ReaderKilled, WireError
from penstock.protocol.facts import Fact, decode
from penstock.protocol.streams import KEEPALIVES_PER_ACK_WAIT, ConsumerSpec
from penstock.protocol.transport.acks import Acks
from penstock.protocol.transport.delivery import Delivery, store_dead_letter
from penstock.protocol.transport.kill_marks import MOST_KILLED, KillMarks
from penstock.protocol.transport.nats_connection import ATTEMPT_S, REQUEST_S, Connection
from penstock.protocol.transport.nats_errors import refusal
from penstock.protocol.transport.pending import Pending
from penstock.protocol.transport.pull import Pull, PullRefused

F = TypeVar("F", bound=Fact)
log = structlog.get_logger("protocol.bus")


class Inbox(Generic[F]):
    """The messages of one durable consumer, which several processes may share."""

    def __init__(self, connection: Connection, spec: ConsumerSpec, fact: type[F]) -> None:
        """Use `Bus.inbox` instead."""
        self._connection = connection
        self._fact = fact
        self._held: dict[int, Delivery[F]] = {}
        self._pull = Pull(connection, spec.stream, spec.durable, self._renews)
        self._acks = Acks(connection, spec, lambda: self._pull.redeliver(max(1, len(self._held))))
        self._marks = KillMarks(connection, spec)
        self.spec = spec

    @classmethod
    async def bind(cls, connection: Connection, spec: ConsumerSpec, fact: type[F]) -> Inbox[F]:
        """Bind to an existing consumer; raises MissingStream when it was not created."""
        await _require_consumer(connection, spec)
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
                    await _require_consumer(self._connection, self.spec)
                log.debug("no messages", consumer=self.spec.durable, reason=str(err))
                await asyncio.sleep(min(wait_s, 0.2))
                messages = []
            # no await from here on, but for redeliveries: a cancelled fetch must not hold messages that no caller gets
            received = [self._receive(msg) for msg in messages]
            deliveries = await self._not_quarantined([delivery for delivery in received if delivery is not None])
            if deliveries or time.monotonic() >= deadline:
                return deliveries

    async def _not_quarantined(self, deliveries: list[Delivery[F]]) -> list[Delivery[F]]:
        """Mark the redelivered messages; dead-letter those that were in progress when readers were killed."""
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
        try:
            await delivery.dead_letter(ReaderKilled.__name__, text)
        except BusError as err:  # it is redelivered after ack_wait, and this is tried again
            log.warning("could not store a dead letter", sequence=delivery.sequence, error=str(err))

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
            _require_run(fact, self.spec)
        except WireError as err:
            log.warning("message does not decode", subject=msg.subject, error=str(err))
            self._connection.spawn(self._dead_letter_undecodable(msg, err))
            return None
        delivery = Delivery(self._connection, self.spec, self._acks, msg, fact, self._release, self._marks)
        self._held[delivery.sequence] = delivery
        return delivery

    def _release(self, delivery: Delivery[F]) -> None:
        if self._held.get(delivery.sequence) is delivery:  # given back, it may have been redelivered already
            del self._held[delivery.sequence]

    async def _dead_letter_undecodable(self, msg: Msg, error: WireError) -> None:
        try:
            await store_dead_letter(
                self._connection, self.spec, self._acks, lambda: msg, type(error).__name__, str(error)
            )
        except BusError as err:  # it is redelivered after ack_wait, and this is tried again
            log.warning("could not store a dead letter", subject=msg.subject, error=str(err))

    async def _keep_alive(self) -> None:
        """Renew every message that is held or not yet fetched by a caller, until the bus is closed."""
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


def _require_run(fact: Fact, spec: ConsumerSpec) -> None:
    """Raise MalformedFact for a message of another run."""
    run_id = getattr(fact, "run_id", spec.run_id)
    if run_id != spec.run_id:
        raise MalformedFact(f"a message of run {run_id!r} in a stream of run {spec.run_id!r}")


async def _require_consumer(connection: Connection, spec: ConsumerSpec) -> None:
    """Raise MissingStream when NATS answers and the consumer does not exist; return while NATS is unreachable."""
    if not connection.is_up:
        return
    try:
        await connection.retry(
            lambda: connection.js.consumer_info(spec.stream, spec.durable, timeout=ATTEMPT_S),
            what=f"consumer {spec.durable} of {spec.stream}",
            deadline_s=REQUEST_S,
        )
    except nats.js.errors.NotFoundError:
        raise MissingStream(
            f"stream {spec.stream} has no consumer {spec.durable}; "
            f"create it with: penstock bootstrap run.id={spec.run_id}"
        ) from None
    except nats.js.errors.APIError as err:
        raise refusal(err, f"consumer {spec.durable} of stream {spec.stream}", connection.url) from None
