"""Snapshots of streams: messages with their numbers, and the state of their consumers, as the server writes them.

The server sends a stream as one compressed file in chunks and waits for an answer to each, so that a slow reader slows
it down. It takes the file back in the same way. What is in the file is the server's own format.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from penstock.protocol.errors import BusError, BusRefused, BusUnreachable, MissingStream
from penstock.protocol.transport.nats_connection import NO_ANSWER, REQUEST_S, RETRY_S, Connection
from penstock.protocol.transport.nats_errors import BOOTSTRAP

CHUNK_BYTES = 128 * 1024  # below the smallest message that a server of ours takes
_CHUNK_S = 30.0  # for the next chunk, or for the answer to one; a server under load sends them slowly
_RESTORED_S = 300.0  # after the last chunk the server unpacks the file and writes the stream
_NOT_FOUND = 10059
_EXISTS = 10130


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What describes a snapshot besides its bytes: the stream's configuration and state, in the server's words."""

    config: dict[str, Any]
    state: dict[str, Any]

    @property
    def extent(self) -> tuple[int, int, int]:
        """Number of messages, number of the first, 0 if there is none, and of the last that there was."""
        messages, first, last = (int(self.state.get(name, 0)) for name in ("messages", "first_seq", "last_seq"))
        return messages, first if messages else 0, last


async def save(connection: Connection, stream: str, write: Callable[[bytes], object]) -> Snapshot:
    """Write a snapshot of a stream, chunk by chunk.

    Raises:
        MissingStream: There is no such stream.
        BusRefused: This login may not make snapshots, or the server says why it cannot.
        BusUnreachable: The connection was lost; what was written is not whole.
    """
    what, client = f"snapshot of {stream}", connection.client
    inbox = client.new_inbox()
    chunks = await client.subscribe(inbox)
    try:
        request = {"deliver_subject": inbox, "chunk_size": CHUNK_BYTES}
        answer = await _ask(connection, f"$JS.API.STREAM.SNAPSHOT.{stream}", request, what)
        while True:
            chunk = await _next(connection, chunks.next_msg(timeout=_CHUNK_S), what)
            if not chunk.data:  # the end; a header says so when it is not the end of a whole snapshot
                if status := (chunk.headers or {}).get("Status"):
                    reason = (chunk.headers or {}).get("Description", "")
                    raise BusError(f"{what}: NATS at {connection.url} ended it: {status} {reason}; try again")
                return Snapshot(answer["config"], answer["state"])
            write(chunk.data)
            if chunk.reply:
                await client.publish(chunk.reply, b"")
    finally:
        with contextlib.suppress(nats.errors.Error):
            await chunks.unsubscribe()


async def restore(connection: Connection, stream: str, snapshot: Snapshot, chunks: Iterable[bytes]) -> None:
    """Make a stream from a snapshot.

    Raises:
        BusRefused: The stream exists, this login may not restore, or the server says why it cannot.
        BusError: What was restored has other messages than the snapshot.
        BusUnreachable: The connection was lost; the server removes what is not whole.
    """
    what = f"restore {stream}"
    request = {"config": _config_here(snapshot.config, connection.replicas), "state": snapshot.state}
    target = (await _ask(connection, f"$JS.API.STREAM.RESTORE.{stream}", request, what))["deliver_subject"]
    for chunk in chunks:
        answer = await _next(connection, _send(connection, target, chunk, _CHUNK_S), what)
        if answer.data:
            _decode(connection, answer, what)
    answer = await _next(connection, _send(connection, target, b"", _RESTORED_S), what)
    restored = Snapshot({}, _decode(connection, answer, what)["state"])
    if restored.extent != snapshot.extent:
        raise BusError(
            f"{what}: NATS at {connection.url} restored (messages, first, last) {restored.extent}, the snapshot has "
            f"{snapshot.extent}; remove the stream and restore it again"
        )


def _config_here(config: dict[str, Any], replicas: int) -> dict[str, Any]:
    """Return a stream's configuration with as many replicas as here; those that have some are always synced."""
    is_plain = replicas == 1
    return {key: value for key, value in config.items() if is_plain or key != "persist_mode"} | {
        "num_replicas": replicas
    }


async def _ask(connection: Connection, subject: str, request: dict[str, Any], what: str) -> dict[str, Any]:
    """Send the request that begins; tried once, since a second snapshot would be sent to the same place."""
    data = json.dumps(request).encode()
    answer = await connection.retry(
        lambda: connection.client.request(subject, data, timeout=REQUEST_S), what=what, deadline_s=REQUEST_S
    )
    return _decode(connection, answer, what)


async def _send(connection: Connection, target: str, chunk: bytes, answer_s: float) -> Msg:
    """Send a chunk; in a cluster the server of this connection may not know yet that another one takes it."""
    deadline = time.monotonic() + _CHUNK_S
    while True:
        try:
            async with connection.while_connected():
                return await connection.client.request(target, chunk, timeout=answer_s)
        except nats.errors.NoRespondersError:  # no server has got it
            if not connection.is_clustered or time.monotonic() > deadline:
                raise
            await asyncio.sleep(RETRY_S)


async def _next(connection: Connection, waiting: Awaitable[Msg], what: str) -> Msg:
    try:
        return await waiting
    except NO_ANSWER as err:
        raise BusUnreachable(connection.explain(f"{what}: no answer ({type(err).__name__})")) from None


def _decode(connection: Connection, answer: Msg, what: str) -> dict[str, Any]:
    found = json.loads(answer.data)
    if error := found.get("error"):
        text = f"{what}: NATS at {connection.url} says {error.get('description')} (error {error.get('err_code')})"
        if error.get("err_code") == _NOT_FOUND:
            raise MissingStream(f"no stream {what.rpartition(' ')[2]}; {BOOTSTRAP}")
        if error.get("err_code") == _EXISTS:
            text += "; nothing was changed"
        raise BusRefused(text)
    return found
