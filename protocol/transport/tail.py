"""Watch a stream: every fact, in order, for ever, whatever happens to the server meanwhile."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Generic, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.js import api

from penstock.protocol.errors import BusError, WireError
from penstock.protocol.facts import Fact, decode
from penstock.protocol.transport.nats_connection import ATTEMPT_S, Connection
from penstock.protocol.transport.pull import Pull, PullRefused
from penstock.protocol.transport.stream_admin import stream_state

F = TypeVar("F", bound=Fact)
log = structlog.get_logger("protocol.bus")

_PULL_S = 10.0
_MAX_MESSAGES = 256  # in one pull
_CREATE_S = 3600.0  # how long the server may be away before a watcher tries from the start
_PAUSE_S = 0.5


class Tail(Generic[F]):
    """A watcher of one stream. It owns nothing: what does not decode is logged and skipped."""

    def __init__(
        self, connection: Connection, stream: str, subject: str, fact: type[F], on_fact: Callable[[F, int], None]
    ) -> None:
        """Use `Bus.tail` instead."""
        self._connection = connection
        self._stream = stream
        self._subject = subject
        self._fact = fact
        self._on_fact = on_fact
        self._next_sequence = 1

    async def start(self, *, after: int | None) -> None:
        """Watch in the background what comes after a sequence number, or (None) from now on; raises MissingStream."""
        last = (await stream_state(self._connection, self._stream)).last_sequence
        if after is not None and after > last:  # the stream was made anew: all it holds is unread
            after = 0
        self._next_sequence = 1 + (last if after is None else after)
        self._connection.spawn(self._watch_for_ever())

    async def _watch_for_ever(self) -> None:
        while True:
            try:
                await self._watch()
            except nats.js.errors.NotFoundError:
                log.warning("a tail ends: its stream was deleted", stream=self._stream)
                return
            except (PullRefused, BusError, nats.errors.Error, nats.js.errors.Error) as err:
                log.debug("tail starts again", stream=self._stream, reason=str(err))
                await asyncio.sleep(_PAUSE_S)

    async def _watch(self) -> None:
        """Read through a consumer of this tail's own, until the connection goes: the server forgets it then."""
        name = f"tail-{secrets.token_hex(6)}"  # gone by itself when nobody pulls
        config = api.ConsumerConfig(
            name=name,
            filter_subject=self._subject,
            ack_policy=api.AckPolicy.NONE,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self._next_sequence,
            inactive_threshold=3 * _PULL_S,
            mem_storage=True,
        )
        pull = Pull(self._connection, self._stream, name)
        try:
            await self._connection.retry(
                lambda: self._connection.js.add_consumer(self._stream, config, timeout=ATTEMPT_S),
                what=f"tail of {self._stream}",
                deadline_s=_CREATE_S,
            )
            await pull.open()
            lives = self._connection.num_lives
            while lives == self._connection.num_lives:
                for msg in await pull.take(_MAX_MESSAGES, _PULL_S):
                    sequence = msg.metadata.sequence.stream
                    self._next_sequence = sequence + 1
                    self._hand_over(msg.subject, msg.data, sequence)
        finally:
            await pull.close()

    def _hand_over(self, subject: str, data: bytes, sequence: int) -> None:
        try:
            self._on_fact(decode(data, self._fact), sequence)
        except WireError as err:
            log.warning("skipped an unreadable message", subject=subject, error=str(err))
