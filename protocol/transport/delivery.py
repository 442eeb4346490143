"""One message that this process holds until it acknowledges, gives back or dead-letters it.

`Acks` sends the acknowledgements to one consumer; `KillMarks` counts the readers that a message killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg

from penstock.protocol import subjects, trace_context
from penstock.protocol.errors import BusError, BusUnreachable, MissingStream
from penstock.protocol.facts import DeadLetter, Fact
from penstock.protocol.streams import ConsumerSpec, kill_mark_key
from penstock.protocol.transport.fact_publisher import publish
from penstock.protocol.transport.key_value import KeyValue
from penstock.protocol.transport.loop_thread import Pending
from penstock.protocol.transport.nats_connection import ATTEMPT_S, REQUEST_S, Connection, refusal

DURABLE_S = 60.0  # how long an acknowledgement or a dead letter is tried
log = structlog.get_logger("protocol.bus")
LatestHandle = Callable[[], Msg]  # the current handle of a message; a redelivery replaces it
Redeliver = Callable[[], Awaitable[None]]  # has the server deliver again what it may have lost
MOST_KILLED = 2
F = TypeVar("F", bound=Fact)
_MAX_LETTER_DETAIL = 2000
MAX_LETTER_IDS = 128
_MISSING_GRACE_S = 1.0  # a server that has just restarted may not have opened its streams yet
_RECORD_S = 2.0  # how long the record of an orderly return may delay it


class Acks:
    """Sends acknowledgements to one consumer in batches: those made while one is in flight share the next one.

    A server processes the messages of one connection to one consumer in order, so its answer to the last
    acknowledgement of a series confirms all of them; when the connection was lost in between, the whole series is sent
    again. A request for each would cost four times the CPU. Everything here runs on the connection's event loop.

    A server that was killed may have lost the delivery state of its consumer, which it stores with a delay. It does not
    answer an acknowledgement of such a message until it has redelivered it, or found it deleted. So after every
    reconnect the reader first has the messages that it holds redelivered.
    """

    def __init__(self, connection: Connection, spec: ConsumerSpec, redeliver: Redeliver) -> None:
        self._connection = connection
        self._spec = spec
        self._redeliver = redeliver
        self._known_at: int | None = connection.num_transitions  # when the server last knew all that is held
        self._waiting: list[tuple[LatestHandle, asyncio.Future[None]]] = []
        self._is_sending = False

    async def acknowledge(self, latest: LatestHandle) -> None:
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((latest, confirmed))
        if not self._is_sending:
            self._is_sending = True
            self._connection.spawn(self._send())
        await confirmed

    async def _send(self) -> None:
        try:
            while self._waiting:
                series, self._waiting = self._waiting, []
                await self._confirm(series)
        finally:
            self._is_sending = False

    async def _confirm(self, series: list[tuple[LatestHandle, asyncio.Future[None]]]) -> None:
        handles = [latest for latest, _ in series]
        failure: Exception | None = None
        started = time.monotonic()
        try:
            await self._connection.retry(
                lambda: self._attempt(handles, started),
                what=f"acknowledgement to {self._spec.stream}",
                deadline_s=DURABLE_S,
            )
        except Exception as err:  # noqa: BLE001 the callers that wait raise it
            failure = err
        for _, confirmed in series:
            if confirmed.done():
                continue  # its caller was cancelled
            if failure is None:
                confirmed.set_result(None)
            else:
                confirmed.set_exception(failure)

    async def _attempt(self, handles: list[LatestHandle], started: float) -> None:
        transitions = self._connection.num_transitions
        if transitions != self._known_at:
            await self._redeliver()
        self._known_at = None
        for latest in handles[:-1]:
            await self._connection.client.publish(latest().reply)
        try:
            await self._connection.client.request(handles[-1]().reply, timeout=ATTEMPT_S)
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError):
            if time.monotonic() - started > _MISSING_GRACE_S:
                with contextlib.suppress(BusUnreachable):  # then the next try tells
                    await require_consumer(self._connection, self._spec)
            raise
        if self._connection.num_transitions != transitions:  # the server that answered may not have got the others
            raise nats.errors.ConnectionReconnectingError
        self._known_at = transitions


class KillMarks:
    """Counts how often a message's reader was killed, so that one which causes it is not processed a third time.

    A first delivery costs nothing: that its reader was killed follows from a second delivery that was not asked for.
    From then on the message is marked while it is processed, in the run's scoring bucket, and every reader that returns
    a message in an orderly way (a stop, a retry) records that. So only readers that were killed, or lost their
    connection for longer than the ack wait, are counted.

    | delivery                       | record found                  | readers killed so far           |
    |--------------------------------|-------------------------------|---------------------------------|
    | first                          | not read                      | 0                               |
    | later                          | none                          | 1                               |
    | later, after an orderly return | ``started`` is False          | as recorded                     |
    | later, its reader was killed   | ``started`` is True           | as recorded, and one more       |

    A record is read from any server of a cluster. One that lags may count a killed reader less, then one more is; or
    one too many, where a message that was returned a moment ago is delivered again.

    At `MOST_KILLED` the message is dead-lettered as `ReaderKilled` and not processed again. All messages that one
    reader had in progress at both times are: the trainer issues their groups again, so an innocent one costs little.

    Without NATS no record is written, and no message is dead-lettered for killed readers.
    """

    def __init__(self, connection: Connection, spec: ConsumerSpec) -> None:
        self._connection = connection
        self._spec = spec
        self._store: KeyValue | None = None

    @property
    def is_used(self) -> bool:
        return bool(self._spec.marks_bucket)

    async def begin(self, sequence: int, num_delivered: int) -> int:
        """Return how many readers were killed on a message, and mark it; call for each delivery but the first."""
        try:
            store = await self._bound()
            entry = await store.get(self._key(sequence), may_lag=True)
            killed = 1 if entry is None else _killed(entry.value)
            await store.put(self._key(sequence), _record(killed, started=True))
        except BusError as err:
            log.warning("redelivered message not marked", sequence=sequence, error=str(err))
            return 0
        if killed:
            log.warning("message of a reader that was killed", sequence=sequence, killed=killed, delivery=num_delivered)
        return killed

    async def give_back(self, sequence: int, num_delivered: int) -> None:
        try:
            store = await self._bound()
            entry = await store.get(self._key(sequence), may_lag=True) if num_delivered > 1 else None
            killed = 0 if entry is None else max(0, _killed(entry.value) - 1)  # this reader's mark says it started
            await store.put(self._key(sequence), _record(killed, started=False))
        except BusError as err:
            log.debug("return of a message not recorded", sequence=sequence, error=str(err))

    async def forget(self, sequence: int) -> None:
        try:
            await (await self._bound()).delete(self._key(sequence))
        except BusError as err:  # it expires after a day
            log.debug("mark not deleted", sequence=sequence, error=str(err))

    async def _bound(self) -> KeyValue:
        if self._store is None:
            self._store = await KeyValue.bind(self._connection, self._spec.marks_bucket)
        return self._store

    def _key(self, sequence: int) -> str:
        return kill_mark_key(self._spec.stage, sequence)


def _record(killed: int, *, started: bool) -> bytes:
    return json.dumps({"killed": killed, "started": started}).encode()


def _killed(value: bytes) -> int:
    try:
        record = json.loads(value)
        killed, started = record["killed"], record["started"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 1
    is_record = type(killed) is int and 0 <= killed <= MOST_KILLED and type(started) is bool
    return killed + started if is_record else 1


@dataclass(slots=True, eq=False, repr=False)
class Delivery(Generic[F]):
    """One message held by this process. Exactly one of ack, give_back and dead_letter ends it."""

    connection: Connection
    spec: ConsumerSpec
    acks: Acks
    msg: Msg  # its present handle
    fact: F
    release: Callable[[Delivery[F]], None]  # called when it is no longer held, possibly twice
    marks: KillMarks
    num_delivered: int = field(init=False)
    sequence: int = field(init=False)
    traceparent: str = field(init=False)

    def __post_init__(self) -> None:
        self.num_delivered = self.msg.metadata.num_delivered or 1
        self.sequence = self.msg.metadata.sequence.stream
        self.traceparent = (self.msg.headers or {}).get("traceparent", "")

    def ack(self) -> Pending[None]:
        """Acknowledge the message, once its effect is durable; it is not redelivered."""
        return self._end(lambda: self.acks.acknowledge(lambda: self.msg), "acknowledge")

    @staticmethod
    def ack_all(deliveries: Sequence[Delivery[F]]) -> None:
        """Acknowledge messages of one consumer and wait until all are confirmed; one call costs less than many."""
        if deliveries:
            first = deliveries[0]
            what = f"acknowledge {len(deliveries)} messages of {first.spec.durable}"
            first.connection.call(_ack_each(deliveries), what, DURABLE_S).wait()

    def give_back(self, delay_s: float) -> Pending[None]:
        """Give the message back; it is redelivered, to any reader, after ``delay_s``."""
        return self.connection.call(self._nak(delay_s), f"give back a message of {self.spec.durable}", 2 * DURABLE_S)

    def dead_letter(self, reason: str, detail: str) -> Pending[None]:
        """Publish the message as a dead letter with its reason, then acknowledge it."""
        return self._end(
            lambda: store_dead_letter(
                self.connection, self.spec, self.acks, lambda: self.msg, reason, detail, _group_ids(self.fact)
            ),
            "dead-letter",
        )

    def renew(self, msg: Msg) -> None:
        self.msg = msg
        self.num_delivered = msg.metadata.num_delivered or self.num_delivered

    async def keep_alive(self) -> None:
        """Restart the server's ack wait: this reader still works on the message."""
        with contextlib.suppress(nats.errors.Error):  # the next round renews
            await self.msg.in_progress()

    def _end(self, action: Callable[[], Awaitable[None]], what: str) -> Pending[None]:
        return self.connection.call(self._ended(action), f"{what} a message of {self.spec.durable}", 2 * DURABLE_S)

    async def _ended(self, action: Callable[[], Awaitable[None]]) -> None:
        try:
            await action()
        finally:
            self.release(self)
        if self.marks.is_used and self.num_delivered > 1:
            self.connection.spawn(self.marks.forget(self.sequence))

    async def _nak(self, delay_s: float) -> None:
        if self.marks.is_used:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RECORD_S):
                    await self.marks.give_back(self.sequence, self.num_delivered)
        self.release(self)  # first: it may be redelivered before the next line returns
        with contextlib.suppress(nats.errors.ConnectionClosedError):  # a lost nak is only a later redelivery
            await self.msg.nak(delay=delay_s)


async def _ack_each(deliveries: Sequence[Delivery[F]]) -> None:
    def acknowledged(delivery: Delivery[F]) -> Coroutine[Any, Any, None]:
        return delivery._ended(lambda: delivery.acks.acknowledge(lambda: delivery.msg))

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
    trace_id = trace_context.trace_id((msg.headers or {}).get("traceparent", ""))
    msg_id = f"{spec.stream}:{meta.sequence.stream}:{trace_id}"
    await publish(connection, subjects.dead(spec.run_id, spec.stage), letter, msg_id=msg_id, deadline_s=DURABLE_S)
    await acks.acknowledge(latest)


def _group_ids(fact: Fact) -> tuple[str, ...]:
    groups = getattr(fact, "tasks", None) or getattr(fact, "groups", None) or ()
    return tuple(getattr(g, "group_id", None) or g.generated.group_id for g in groups)


async def require_consumer(connection: Connection, spec: ConsumerSpec) -> None:
    """Raise MissingStream if the server is reached and has no such consumer or stream."""
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
            f"stream {spec.stream} has no consumer {spec.durable}; create it with: "
            f"penstock bootstrap run.id={spec.run_id}"
        ) from None
    except nats.js.errors.APIError as err:
        raise refusal(err, f"consumer {spec.durable} of stream {spec.stream}", connection.url) from None
