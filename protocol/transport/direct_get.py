"""Read the messages of a stream without a consumer (ADR-31), so that none is delivered or acknowledged.

Any server that stores the stream answers a direct get. In a cluster that may be one that lags: what it has is everything up to
some sequence number. `read_stream` therefore asks the leader for what follows the last message.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg

from penstock.protocol.errors import MissingStream
from penstock.protocol.transport.nats_connection import ATTEMPT_S, REQUEST_S, Connection

_BATCH = 512  # messages of one answer
_BATCH_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One message as it is stored in its stream."""

    sequence: int
    subject: str
    data: bytes
    at: datetime  # when the server stored it, UTC


async def direct_get(connection: Connection, stream: str, request: dict[str, Any]) -> list[Msg]:
    """Send one request and return its batch of messages, which a status message ends."""
    reply = connection.client.new_inbox()
    sub = await connection.client.subscribe(reply)
    found: list[Msg] = []
    try:
        await connection.client.publish(f"$JS.API.DIRECT.GET.{stream}", json.dumps(request).encode(), reply=reply)
        while True:
            msg = await sub.next_msg(timeout=ATTEMPT_S)
            headers = msg.headers or {}
            # A stored message, which the server numbers, may have any other header; its writer chose it.
            status = headers.get("Status") if "Nats-Sequence" not in headers else None
            if status == "503":
                raise nats.js.errors.NoStreamResponseError
            if status is not None:  # 204 end of batch, 404 no message
                return found
            found.append(msg)
    finally:
        with contextlib.suppress(nats.errors.Error):
            await sub.unsubscribe()


async def read_stream(
    connection: Connection, stream: str, subject: str = ">", *, after: int = 0, most: int | None = None
) -> list[StoredMessage]:
    """Return all messages of a stream, or those of a subject, in order; raises MissingStream or BusUnreachable.

    ``after`` is the sequence number before the first one, ``most`` the number of messages (None: all).
    """
    found: list[StoredMessage] = []
    while most is None or len(found) < most:
        request = {
            "seq": (found[-1].sequence if found else after) + 1,
            "next_by_subj": subject,
            "batch": _BATCH if most is None else min(_BATCH, most - len(found)),
            "max_bytes": _BATCH_BYTES,
        }
        try:
            batch = await connection.retry(
                lambda request=request: direct_get(connection, stream, request),
                what=f"messages of {stream}",
                deadline_s=REQUEST_S,
            )
        except nats.js.errors.NoStreamResponseError:
            raise MissingStream(
                f"no stream {stream} that can be read; create or update it with: penstock bootstrap run.toml"
            ) from None
        if not batch:
            break
        for msg in batch:
            headers = msg.headers or {}
            at = datetime.fromisoformat(headers["Nats-Time-Stamp"])
            found.append(StoredMessage(int(headers["Nats-Sequence"]), headers["Nats-Subject"], msg.data, at))
    if connection.is_clustered and (most is None or len(found) < most):
        await _read_on(connection, stream, subject, found, after, most)
    return found


async def _read_on(
    connection: Connection, stream: str, subject: str, found: list[StoredMessage], after: int, most: int | None
) -> None:
    """Add the messages that the stream's leader has and that the server which answered does not have yet."""
    while most is None or len(found) < most:
        sequence = (found[-1].sequence if found else after) + 1
        try:
            msg = await connection.retry(
                lambda sequence=sequence: connection.js.get_msg(stream, seq=sequence, subject=subject, next=True),
                what=f"messages of {stream} after {sequence - 1}, of its leader",
                deadline_s=REQUEST_S,
            )
        except nats.js.errors.NotFoundError:
            return
        assert msg.time is not None, "the server dates every message"
        found.append(StoredMessage(msg.seq or 0, msg.subject or "", msg.data or b"", msg.time))
