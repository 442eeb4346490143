"""One message that this process holds until it acknowledges, gives back or dead-letters it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

import nats.errors
from nats.aio.msg import Msg

from penstock.protocol import subjects, trace_context
from penstock.protocol.facts import DeadLetter, Fact
from penstock.protocol.streams import ConsumerSpec
from penstock.protocol.transport.acks import DURABLE_S, Acks, LatestHandle
from penstock.protocol.transport.fact_publisher import publish
from penstock.protocol.transport.kill_marks import KillMarks
from penstock.protocol.transport.nats_connection import Connection
from penstock.protocol.transport.pending import Pending

F = TypeVar("F", bound=Fact)

_MAX_LETTER_DETAIL = 2000
MAX_LETTER_IDS = 128
_RECORD_S = 2.0  # how long the record of an orderly return may delay it


class Delivery(Generic[F]):
    """One message held by this process. Exactly one of ack, give_back and dead_letter ends it."""

    __slots__ = (
        "_acks",
        "_connection",
        "_marks",
        "_msg",
        "_release",
        "_spec",
        "fact",
        "num_delivered",
        "sequence",
        "traceparent",
    )

    def __init__(
        self,
        connection: Connection,
        spec: ConsumerSpec,
        acks: Acks,
        msg: Msg,
        fact: F,
        release: Callable[[Delivery[F]], None],
        marks: KillMarks,
    ) -> None:
        """Hold a decoded message; ``release`` is called when it is no longer held, possibly twice."""
        self._connection = connection
        self._spec = spec
        self._acks = acks
        self._msg = msg
        self._release = release
        self._marks = marks
        self.fact = fact
        self.num_delivered = msg.metadata.num_delivered or 1
        self.sequence = msg.metadata.sequence.stream
        self.traceparent = (msg.headers or {}).get("traceparent", "")

    def ack(self) -> Pending[None]:
        """Acknowledge the message, once its effect is durable; it is not redelivered."""
        return self._end(lambda: self._acks.acknowledge(lambda: self._msg), "acknowledge")

    @staticmethod
    def ack_all(deliveries: Sequence[Delivery[F]]) -> None:
        """Acknowledge messages of one consumer and wait until all are confirmed; one call costs less than many."""
        if deliveries:
            first = deliveries[0]
            what = f"acknowledge {len(deliveries)} messages of {first._spec.durable}"
            first._connection.call(_ack_each(deliveries), what, DURABLE_S).wait()

    def give_back(self, delay_s: float) -> Pending[None]:
        """Give the message back; it is redelivered, to any reader, after ``delay_s``."""
        return self._connection.call(self._nak(delay_s), f"give back a message of {self._spec.durable}", 2 * DURABLE_S)

    def dead_letter(self, reason: str, detail: str) -> Pending[None]:
        """Publish the message as a dead letter with its reason, then acknowledge it."""
        return self._end(
            lambda: store_dead_letter(
                self._connection, self._spec, self._acks, lambda: self._msg, reason, detail, _group_ids(self.fact)
            ),
            "dead-letter",
        )

    def renew(self, msg: Msg) -> None:
        """Use the handle of a redelivery of the same message from now on."""
        self._msg = msg
        self.num_delivered = msg.metadata.num_delivered or self.num_delivered

    async def keep_alive(self) -> None:
        """Restart the server's ack wait: this reader still works on the message."""
        with contextlib.suppress(nats.errors.Error):  # the next round renews
            await self._msg.in_progress()

    def _end(self, action: Callable[[], Awaitable[None]], what: str) -> Pending[None]:
        return self._connection.call(self._ended(action), f"{what} a message of {self._spec.durable}", 2 * DURABLE_S)

    async def _ended(self, action: Callable[[], Awaitable[None]]) -> None:
        try:
            await action()
        finally:
            self._release(self)
        if self._marks.is_used and self.num_delivered > 1:
            self._connection.spawn(self._marks.forget(self.sequence))

    async def _nak(self, delay_s: float) -> None:
        if self._marks.is_used:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RECORD_S):
                    await self._marks.give_back(self.sequence, self.num_delivered)
        self._release(self)  # first: it may be redelivered before the next line returns
        with contextlib.suppress(nats.errors.ConnectionClosedError):  # a lost nak is only a later redelivery
            await self._msg.nak(delay=delay_s)


async def _ack_each(deliveries: Sequence[Delivery[F]]) -> None:
    def acknowledged(delivery: Delivery[F]) -> Coroutine[Any, Any, None]:
        return delivery._ended(lambda: delivery._acks.acknowledge(lambda: delivery._msg))

    await asyncio.gather(*map(acknowledged, deliveries))


async def store_dead_letter(
    connection: Connection,
    spec: ConsumerSpec,
    acks: Acks,
    latest: LatestHandle,
    reason: str,
    detail: str,
    group_ids: tuple[str, ...] = (),
) -> None:
    """Publish a message as a dead letter of its run, once however often this is tried, then acknowledge it."""
    msg = latest()
    meta = msg.metadata
    letter = DeadLetter(
        run_id=spec.run_id,
        stage=spec.stage,
        subject=msg.subject,
        reason=reason,
        detail=detail[:_MAX_LETTER_DETAIL],
        group_ids=group_ids[:MAX_LETTER_IDS],
        num_delivered=meta.num_delivered or 1,
        payload=msg.data,
    )
    msg_id = (
        f"{spec.stream}:{meta.sequence.stream}:{trace_context.trace_id((msg.headers or {}).get('traceparent', ''))}"
    )
    await publish(connection, subjects.dead(spec.run_id, spec.stage), letter, msg_id=msg_id, deadline_s=DURABLE_S)
    await acks.acknowledge(latest)


def _group_ids(fact: Fact) -> tuple[str, ...]:
    groups = getattr(fact, "tasks", None) or getattr(fact, "groups", None) or ()
    return tuple(getattr(g, "group_id", None) or g.generated.group_id for g in groups)
