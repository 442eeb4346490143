"""Publish a fact until the server has it: at least once, and once per message id."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import nats.js.errors
import structlog

from protocol.errors import BusError, MissingStream, StreamFull
from protocol.facts import Fact, encode
from protocol.transport.nats_connection import ATTEMPT_S, RETRY_MAX_S, RETRY_S, Connection

log = structlog.get_logger("protocol.bus")

FULL_DEADLINE_S = 24 * 3600.0
_MISSING_GRACE_S = 1.0
_WARN_EVERY_S = 10.0
_ERR_STREAM_FULL = (10077, 10023, 10047)  # maximum messages or bytes, insufficient resources


@dataclass(frozen=True, slots=True)
class Receipt:
    """The server's acknowledgement of a published fact."""

    sequence: int
    duplicate: bool  # the message id was already known: nothing was stored twice


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
    give_up = time.monotonic() + full_deadline_s
    missing_since = 0.0
    warned = 0.0
    pause = RETRY_S
    while True:
        try:
            ack = await connection.retry(
                lambda: connection.js.publish(subject, data, headers=headers, timeout=ATTEMPT_S),
                what=f"publication to {subject}",
                deadline_s=deadline_s,
            )
        except nats.js.errors.NoStreamResponseError:
            # a server that has just come back may not have opened its streams yet
            missing_since = missing_since or time.monotonic()
            if time.monotonic() - missing_since > _MISSING_GRACE_S and connection.is_up:
                raise MissingStream(
                    f"no stream takes {subject}; create the run's streams with: python -m deploy.bootstrap"
                ) from None
            await asyncio.sleep(RETRY_S)
        except nats.js.errors.APIError as err:
            if err.err_code not in _ERR_STREAM_FULL:
                raise BusError(f"publication to {subject} was refused: {err}") from None
            if time.monotonic() > give_up:
                raise StreamFull(
                    f"{subject} stayed full for {full_deadline_s:.0f} s ({err.description}); "
                    "its readers are down or too slow"
                ) from None
            if time.monotonic() - warned > _WARN_EVERY_S:
                warned = time.monotonic()
                log.warning("waiting: stream is full", subject=subject, reason=err.description)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_MAX_S)
        else:
            return Receipt(ack.seq, bool(ack.duplicate))
