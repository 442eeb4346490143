"""Acknowledgements to one consumer: those that come while one is under way share the next confirmation.

A server takes what one connection sends to one consumer in order, so its answer to the last acknowledgement of a
series confirms all of them; when the connection was lost in between, the whole series is sent again. A request for
each would cost four times the CPU. Everything here runs on the connection's own loop.

A server that died may have forgotten what its consumer had delivered: it writes that down a moment later. It then
answers no acknowledgement of such a message, until it has delivered it once more, or found it gone. So after every
loss of the connection the reader has itself reminded first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import nats.errors
from nats.aio.msg import Msg

from penstock.protocol.streams import ConsumerSpec
from penstock.protocol.transport.nats_connection import ATTEMPT_S, Connection

DURABLE_S = 60.0  # how long an acknowledgement or a dead letter is tried
Newest = Callable[[], Msg]  # the handle of a message, which a redelivery renews
Remind = Callable[[], Awaitable[None]]  # has delivered again what is held and the server may have forgotten


class Acks:
    """What one reader has to acknowledge to one consumer."""

    def __init__(self, connection: Connection, spec: ConsumerSpec, remind: Remind) -> None:
        """Start with nothing to say."""
        self._connection = connection
        self._spec = spec
        self._remind = remind
        self._lives: int | None = connection.num_lives  # of the connection, when the server knew all that is held
        self._waiting: list[tuple[Newest, asyncio.Future[None]]] = []
        self._is_sending = False

    async def acknowledge(self, newest: Newest) -> None:
        """End a message and see the server confirm it; raises BusUnreachable or BusRefused when it does not."""
        confirmed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((newest, confirmed))
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

    async def _confirm(self, series: list[tuple[Newest, asyncio.Future[None]]]) -> None:
        handles = [newest for newest, _ in series]
        failure: Exception | None = None
        try:
            await self._connection.retry(
                lambda: self._attempt(handles), what=f"acknowledgement to {self._spec.stream}", deadline_s=DURABLE_S
            )
        except Exception as err:  # noqa: BLE001 whoever waits raises it
            failure = err
        for _, confirmed in series:
            if confirmed.done():
                continue  # nobody waits any more
            if failure is None:
                confirmed.set_result(None)
            else:
                confirmed.set_exception(failure)

    async def _attempt(self, handles: list[Newest]) -> None:
        lives = self._connection.num_lives
        if lives != self._lives:
            await self._remind()
        self._lives = None
        for newest in handles[:-1]:
            await self._connection.client.publish(newest().reply)
        await self._connection.client.request(handles[-1]().reply, timeout=ATTEMPT_S)
        if self._connection.num_lives != lives:  # the server that answered may not have seen the others
            raise nats.errors.ConnectionReconnectingError
        self._lives = lives
