"""Watch a stream: every fact, in order, across restarts of the server."""

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

_PULL_S = 30.0
_MAX_MESSAGES = 256  # in one pull
_CREATE_S = 3600.0  # how long creating the consumer is retried while the server is unreachable
_PAUSE_S = 0.5


class Tail(Generic[F]):
    """A watcher of one stream. It acknowledges nothing; messages that do not decode are logged and skipped."""

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
        """Watch in the background what follows a sequence number, or (None) from now on; raises MissingStream."""
        last = (await stream_state(self._connection, self._stream)).last_sequence
        if after is not None and after > last:  # the stream was created again: all its messages are unread
            after = 0
        self._next_sequence = 1 + (last if after is None else after)
        self._connection.spawn(self._watch_until_closed())

    async def _watch_until_closed(self) -> None:
        while True:
            try:
                await self._watch()
            except nats.js.errors.NotFoundError:
                log.warning("tail stopped: its stream was deleted", stream=self._stream)
                return
            except (PullRefused, BusError, nats.errors.Error, nats.js.errors.Error) as err:
                log.debug("tail restarts", stream=self._stream, reason=str(err))
                await asyncio.sleep(_PAUSE_S)

    async def _watch(self) -> None:
        """Read through an ephemeral consumer until the connection is lost: a restarted server no longer has it."""
        name = f"tail-{secrets.token_hex(6)}"  # deleted by the server when it is not pulled from
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
            transitions = self._connection.num_transitions
            while transitions == self._connection.num_transitions:
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
            log.warning("skipped a message that does not decode", subject=subject, error=str(err))
