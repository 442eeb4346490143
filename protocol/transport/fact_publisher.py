"""Publish a fact until the server has stored it: at least once, and once per message id."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import nats.js.errors
import structlog

from penstock.protocol import subjects
from penstock.protocol.errors import MissingStream, StreamFull
from penstock.protocol.facts import Fact, encode
from penstock.protocol.transport import store_errors
from penstock.protocol.transport.nats_connection import (
    ATTEMPT_S,
    ERR_FULL,
    ERR_STORAGE_FULL,
    RETRY_MAX_S,
    RETRY_S,
    Connection,
    refusal,
)

log = structlog.get_logger("protocol.bus")

FULL_DEADLINE_S = 24 * 3600.0
_MISSING_GRACE_S = 1.0
_WARN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Receipt:
    sequence: int
    duplicate: bool  # the message id was known: the message was not stored again


async def publish(
    connection: Connection,
    subject: str,
    fact: Fact,
    *,
    msg_id: str,
    deadline_s: float,
    full_deadline_s: float = FULL_DEADLINE_S,
    traceparent: str = "",
) -> Receipt:
    """Publish, waiting up to ``deadline_s`` for the server and up to ``full_deadline_s`` while the stream is full.

    Raises BusUnreachable, BusRefused, StreamFull, MissingStream, MessageTooLarge.
    """
    data = encode(fact)
    headers = {"Nats-Msg-Id": msg_id}
    if traceparent:
        headers["traceparent"] = traceparent
    missing_since = 0.0
    backlog = _Backlog(connection, subject, full_deadline_s)
    while True:
        try:
            ack = await connection.retry(
                lambda: connection.js.publish(subject, data, headers=headers, timeout=ATTEMPT_S),
                what=f"publication to {subject}",
                deadline_s=deadline_s,
            )
        except nats.js.errors.NoStreamResponseError:
            # a server that has just restarted may not have opened its streams yet
            missing_since = missing_since or time.monotonic()
            if time.monotonic() - missing_since > _MISSING_GRACE_S and connection.is_up:
                raise MissingStream(
                    f"no stream takes {subject}; create the run's streams with: penstock bootstrap run.toml"
                ) from None
            await asyncio.sleep(RETRY_S)
        except nats.js.errors.APIError as err:
            if err.err_code == ERR_FULL:
                await backlog.wait(f"stream is full: {err.description}", subjects.reader(subject))
            elif err.err_code in ERR_STORAGE_FULL:
                store_errors.count("nats", "full")
                await backlog.wait(f"{err.description}", f"storage of NATS at {connection.url}")
            else:
                raise refusal(err, f"publication to {subject}", connection.url) from None
        else:
            return Receipt(ack.seq, bool(ack.duplicate))


@dataclass(slots=True)
class _Backlog:
    connection: Connection
    subject: str
    deadline_s: float
    started: float = field(default_factory=time.monotonic)
    warned: float = float("-inf")
    pause_s: float = RETRY_S

    async def wait(self, reason: str, waits_for: str) -> None:
        now = time.monotonic()
        if now - self.started > self.deadline_s:
            raise StreamFull(
                f"{self.subject} stayed full for {self.deadline_s:.0f} s ({reason}); "
                f"its readers are down or too slow: waited for {waits_for}"
            )
        if now - self.warned > _WARN_EVERY_S:
            self.warned = now
            log.warning("stream is full, waiting", subject=self.subject, waits_for=waits_for, reason=reason)
        with self.connection.waiting_for(waits_for):
            await asyncio.sleep(self.pause_s)
        self.pause_s = min(2 * self.pause_s, RETRY_MAX_S)
