"""Acknowledgements to one consumer, batched: those that arrive while one is under way share the next confirmation.

A server processes the messages of one connection to one consumer in order, so its answer to the last acknowledgement
of a series confirms all of them; when the connection was lost in between, the whole series is sent again. A request
for each would cost four times the CPU. Everything here runs on the connection's event loop.

A server that was killed may have lost the delivery state of its consumer, which it stores with a delay. It does not
answer an acknowledgement of such a message until it has redelivered it, or found it deleted. So after every
reconnect the reader first has the messages that it holds redelivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import nats.errors
from nats.aio.msg import Msg

from penstock.protocol.streams import ConsumerSpec
from penstock.protocol.transport.nats_connection import ATTEMPT_S, Connection

DURABLE_S = 60.0  # how long an acknowledgement or a dead letter is tried
LatestHandle = Callable[[], Msg]  # the current handle of a message; a redelivery replaces it
Redeliver = Callable[[], Awaitable[None]]  # has the server deliver again what it may have lost


class Acks:
    """The acknowledgements of one reader to one consumer."""

    def __init__(self, connection: Connection, spec: ConsumerSpec, redeliver: Redeliver) -> None:
        """Start with none pending."""
        self._connection = connection
        self._spec = spec
        self._redeliver = redeliver
        self._known_at: int | None = connection.num_transitions  # when the server last knew all that is held
        self._waiting: list[tuple[LatestHandle, asyncio.Future[None]]] = []
        self._is_sending = False

    async def acknowledge(self, latest: LatestHandle) -> None:
        """Acknowledge a message and wait for the server's confirmation; raises BusUnreachable or BusRefused."""
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
        try:
            await self._connection.retry(
                lambda: self._attempt(handles), what=f"acknowledgement to {self._spec.stream}", deadline_s=DURABLE_S
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

    async def _attempt(self, handles: list[LatestHandle]) -> None:
        transitions = self._connection.num_transitions
        if transitions != self._known_at:
            await self._redeliver()
        self._known_at = None
        for latest in handles[:-1]:
            await self._connection.client.publish(latest().reply)
        await self._connection.client.request(handles[-1]().reply, timeout=ATTEMPT_S)
        if self._connection.num_transitions != transitions:  # the server that answered may not have got the others
            raise nats.errors.ConnectionReconnectingError
        self._known_at = transitions
