"""Create streams, consumers and buckets from their specs, query their state, delete them.

Snapshots of streams: messages with their numbers, and the state of their consumers, as the server writes them.

The server sends a stream as one compressed file in chunks and waits for an answer to each, so that a slow reader slows
it down. It takes the file back in the same way. What is in the file is the server's format.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import nats.errors
import nats.js.errors
import structlog
from nats.aio.msg import Msg
from nats.js import api

from penstock.protocol import subjects
from penstock.protocol.errors import BusError, BusRefused, BusUnreachable, MissingStream
from penstock.protocol.streams import BucketSpec, ConsumerSpec, StreamSpec
from penstock.protocol.transport.nats_connection import (
    BOOTSTRAP,
    NO_ANSWER,
    REQUEST_S,
    RETRY_S,
    Connection,
    reason_of,
    refusal,
)

T = TypeVar("T")
log = structlog.get_logger("protocol.stream_admin")

_STREAMS_PER_PAGE = 256  # the server's limit for one answer
_FORMER_BUCKET_BYTES = 64 * 1024 * 1024  # of every bucket that an older version made
_BUCKET_DUPLICATE_WINDOW_S = 120.0  # within it a repeated message is recognised
_MAX_WAITING = 20_000  # pull requests of one consumer; the server's default of 512 is less than a large run has workers
_ERR_OTHER_CONFIG = 10058  # the stream exists with another configuration
CHUNK_BYTES = 128 * 1024  # below the smallest message that a server of ours takes
_CHUNK_S = 30.0  # for the next chunk, or for the answer to one; a server under load sends them slowly
_RESTORED_S = 300.0  # after the last chunk the server unpacks the file and writes the stream
_NOT_FOUND = 10059
_EXISTS = 10130


@dataclass(frozen=True, slots=True)
class StreamState:
    num_messages: int
    num_bytes: int
    first_sequence: int
    last_sequence: int
    max_messages: int  # 0 or less: no limit
    max_bytes: int


@dataclass(frozen=True, slots=True)
class ConsumerState:
    num_pending: int
    num_ack_pending: int
    num_redelivered: int


@dataclass(frozen=True, slots=True)
class StoreState:
    """Bytes on disk of all streams of the account, and what they may be at most; ``limit`` is None without one."""

    used: int
    limit: int | None


async def store_state(connection: Connection) -> StoreState:
    async def read() -> StoreState:
        info = await connection.js.account_info()
        # Limits by tier, as hosted NATS has them, are not summed up: no limit rather than a wrong one.
        limit = info.limits.max_storage or 0
        return StoreState(info.storage, limit if limit > 0 else None)

    return await ask(connection, read, "JetStream's account")


async def stream_state(connection: Connection, stream: str) -> StreamState:
    async def read() -> StreamState:
        info = await connection.js.stream_info(stream)
        state, limits = info.state, info.config
        return StreamState(
            state.messages, state.bytes, state.first_seq, state.last_seq, limits.max_msgs or 0, limits.max_bytes or 0
        )

    return await ask(connection, read, f"stream {stream}")


async def consumer_state(connection: Connection, spec: ConsumerSpec) -> ConsumerState:
    info = await ask(
        connection,
        lambda: connection.js.consumer_info(spec.stream, spec.durable),
        f"consumer {spec.durable} of {spec.stream}",
    )
    return ConsumerState(info.num_pending or 0, info.num_ack_pending or 0, info.num_redelivered or 0)


async def reset_consumer(connection: Connection, spec: ConsumerSpec) -> None:
    await ask(
        connection,
        lambda: connection.js.reset_consumer(spec.stream, spec.durable),
        f"consumer {spec.durable} of {spec.stream}",
    )


async def stream_names(connection: Connection) -> list[str]:
    names: list[str] = []
    while True:
        page = await ask(connection, partial(_names, connection, len(names)), "list of streams")
        names += page
        if len(page) < _STREAMS_PER_PAGE:
            return names


async def _names(connection: Connection, offset: int) -> list[str]:
    return [info.config.name or "" for info in await connection.js.streams_info(offset=offset)]


async def ensure_stream(connection: Connection, spec: StreamSpec) -> None:
    """Create a stream, or update the existing one to its spec and remove what it stores under other subjects."""
    config = api.StreamConfig(
        name=spec.name,
        subjects=list(spec.subjects),
        storage=api.StorageType.FILE,
        num_replicas=connection.replicas,
        retention=api.RetentionPolicy.WORK_QUEUE if spec.retention == "workqueue" else api.RetentionPolicy.LIMITS,
        discard=api.DiscardPolicy.NEW if spec.retention == "workqueue" else api.DiscardPolicy.OLD,
        max_msgs=spec.max_msgs,
        max_bytes=spec.max_bytes,
        max_age=spec.max_age_s or None,
        max_msg_size=spec.max_msg_bytes,
        duplicate_window=spec.duplicate_window_s,
        allow_direct=True,  # an audit reads waiting messages without consuming them
        consumer_limits=api.StreamConsumerLimits(inactive_threshold=spec.consumer_idle_s)
        if spec.consumer_idle_s
        else None,
        republish=_announcement(spec),
    )
    what = f"stream {spec.name}"
    try:
        await connection.retry(lambda: connection.js.add_stream(config), what=what, deadline_s=REQUEST_S)
    except nats.js.errors.BadRequestError as err:
        if err.err_code != _ERR_OTHER_CONFIG:
            raise refusal(err, what, connection.url) from None
        await ask(connection, lambda: connection.js.update_stream(config), what)
        await _remove_other_subjects(connection, spec)
    except nats.js.errors.APIError as err:
        raise refusal(err, f"{what}, which reserves {spec.max_bytes / 1e6:.0f} MB", connection.url) from None


async def _remove_other_subjects(connection: Connection, spec: StreamSpec) -> None:
    if spec.retention != "workqueue" or any("*" in subject for subject in spec.subjects):
        return
    what = f"stream {spec.name}"
    info = await ask(connection, lambda: connection.js.stream_info(spec.name, subjects_filter=">"), what)
    others = {subject: num for subject, num in (info.state.subjects or {}).items() if subject not in spec.subjects}
    for subject, num in others.items():
        await ask(connection, partial(connection.js.purge_stream, spec.name, subject=subject), what)
        log.warning("messages without a reader removed", stream=spec.name, subject=subject[:200], num_messages=num)


def _announcement(spec: StreamSpec) -> api.RePublish | None:
    if not spec.announces:
        return None
    (subject,) = spec.subjects
    return api.RePublish(src=subject, dest=subjects.stored(subject).replace("*", "{{wildcard(1)}}"), headers_only=True)


async def ensure_consumer(connection: Connection, spec: ConsumerSpec) -> None:
    config = api.ConsumerConfig(
        durable_name=spec.durable,
        filter_subject=spec.filter_subject,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=spec.ack_wait_s,
        max_ack_pending=spec.max_ack_pending,
        max_deliver=-1,
        max_waiting=_MAX_WAITING,
        deliver_policy=api.DeliverPolicy.ALL,
    )
    what = f"consumer {spec.durable}"
    try:
        known = await ask(connection, lambda: connection.js.consumer_info(spec.stream, spec.durable), what)
    except MissingStream:
        pass
    else:  # the server cannot change it
        config.max_waiting = known.config.max_waiting
    await ask(connection, lambda: connection.js.add_consumer(spec.stream, config), what)


async def ensure_bucket(connection: Connection, spec: BucketSpec) -> None:
    """Create a bucket unless it exists.

    It is created without the client library, which has no parameter for the persist mode, and allows the header
    ``Nats-Rollup: all``: by it a role that may write one key removes all others. A bucket that allows it is changed.
    One that should not be synced but is, or the reverse, is made again without its values: the server cannot change
    that. One that has the former size gets its own, unless it is half full; a size that an operator chose stays.
    """
    what, stream, config = f"bucket {spec.bucket}", f"KV_{spec.bucket}", _bucket_config(spec, connection.replicas)
    try:
        info = await ask(connection, lambda: connection.js.stream_info(stream), what)
        stored = info.config
    except MissingStream:
        await ask(connection, lambda: connection.js.add_stream(config), what)
        return
    if not spec.synced and _is_async(stored) != _is_async(config):
        await delete_stream(connection, stream)
        await ask(connection, lambda: connection.js.add_stream(config), what)
        return
    is_former_size = stored.max_bytes == _FORMER_BUCKET_BYTES and 2 * info.state.bytes <= spec.max_bytes
    has_other_replicas = stored.num_replicas != config.num_replicas
    if stored.allow_rollup_hdrs or has_other_replicas or (is_former_size and spec.max_bytes != _FORMER_BUCKET_BYTES):
        stored.allow_rollup_hdrs = False
        stored.num_replicas = config.num_replicas
        stored.max_bytes = spec.max_bytes if is_former_size else stored.max_bytes
        await ask(connection, lambda: connection.js.update_stream(stored), what)


def _is_async(config: api.StreamConfig) -> bool:
    return config.persist_mode == api.PersistMode.ASYNC


def _bucket_config(spec: BucketSpec, replicas: int) -> api.StreamConfig:
    """Return the configuration; with replicas the server takes no other than the synced mode."""
    return api.StreamConfig(
        name=f"KV_{spec.bucket}",
        subjects=[f"$KV.{spec.bucket}.>"],
        storage=api.StorageType.FILE,
        persist_mode=None if spec.synced or replicas > 1 else api.PersistMode.ASYNC,
        num_replicas=replicas,
        max_msgs_per_subject=spec.history,
        max_bytes=spec.max_bytes,
        max_age=spec.ttl_s or None,
        discard=api.DiscardPolicy.NEW,
        duplicate_window=min(spec.ttl_s or _BUCKET_DUPLICATE_WINDOW_S, _BUCKET_DUPLICATE_WINDOW_S),
        deny_delete=True,
        allow_direct=True,
        allow_msg_ttl=spec.key_ttls,
    )


async def delete_stream(connection: Connection, stream: str) -> bool:
    try:
        return bool(await ask(connection, lambda: connection.js.delete_stream(stream), f"stream {stream}"))
    except MissingStream:
        return False


async def ask(connection: Connection, attempt: Callable[[], Awaitable[T]], what: str) -> T:
    """Return the answer to a request; raises MissingStream where ``what`` does not exist, else `refusal`."""
    try:
        return await connection.retry(attempt, what=what, deadline_s=REQUEST_S)
    except nats.js.errors.NotFoundError:
        raise MissingStream(f"no {what}; {BOOTSTRAP}") from None
    except nats.js.errors.APIError as err:
        raise refusal(err, what, connection.url) from None


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
    """Write a snapshot of a stream, chunk by chunk; raises MissingStream.

    Raises BusRefused if this login may not make snapshots, or the server says why it cannot; BusUnreachable if the
    connection was lost: what was written is not whole.
    """
    what, client = f"snapshot of {stream}", connection.client
    inbox = client.new_inbox()
    chunks = await client.subscribe(inbox)
    try:
        request = {"deliver_subject": inbox, "chunk_size": CHUNK_BYTES}
        answer = await _ask_snapshot(connection, f"$JS.API.STREAM.SNAPSHOT.{stream}", request, what, "config", "state")
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

    Raises BusRefused if it exists, this login may not restore, or the server says why it cannot; BusError if what was
    restored has other messages than the snapshot; BusUnreachable if the connection was lost: nothing is left then.
    """
    what = f"restore {stream}"
    request = {"config": _config_here(snapshot.config, connection.replicas), "state": snapshot.state}
    subject = f"$JS.API.STREAM.RESTORE.{stream}"
    target = (await _ask_snapshot(connection, subject, request, what, "deliver_subject"))["deliver_subject"]
    for chunk in chunks:
        answer = await _next(connection, _send(connection, target, chunk, _CHUNK_S), what)
        if answer.data:
            _snapshot_answer(connection, answer, what)
    answer = await _next(connection, _send(connection, target, b"", _RESTORED_S), what)
    restored = Snapshot({}, _snapshot_answer(connection, answer, what, "state")["state"])
    if restored.extent != snapshot.extent:
        raise BusError(
            f"{what}: NATS at {connection.url} restored (messages, first, last) {restored.extent}, the snapshot has "
            f"{snapshot.extent}; remove the stream and restore it again"
        )


def _config_here(config: dict[str, Any], replicas: int) -> dict[str, Any]:
    """Return a stream's configuration with as many replicas as here; those that have some are always synced."""
    kept = {key: value for key, value in config.items() if replicas == 1 or key != "persist_mode"}
    return kept | {"num_replicas": replicas}


async def _ask_snapshot(
    connection: Connection, subject: str, request: dict[str, Any], what: str, *fields: str
) -> dict[str, Any]:
    """Send the request that begins; tried once, since a second snapshot would be sent to the same place."""
    data = json.dumps(request).encode()
    answer = await connection.retry(
        lambda: connection.client.request(subject, data, timeout=REQUEST_S), what=what, deadline_s=REQUEST_S
    )
    return _snapshot_answer(connection, answer, what, *fields)


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
        raise BusUnreachable(connection.explain(f"{what}: no answer ({reason_of(err)})")) from None


def _snapshot_answer(connection: Connection, answer: Msg, what: str, *fields: str) -> dict[str, Any]:
    try:
        reply = json.loads(answer.data)
        error = reply.get("error")
        if not error:
            return {field: reply[field] for field in fields}
        text = f"{what}: NATS at {connection.url} says {error.get('description')} (error {error.get('err_code')})"
    except (ValueError, LookupError, TypeError, AttributeError):
        raise BusUnreachable(
            f"{what}: NATS at {connection.url} sent a reply that cannot be read: {answer.data[:160]!r}; try again"
        ) from None
    if error.get("err_code") == _NOT_FOUND:
        raise MissingStream(f"no stream {what.rpartition(' ')[2]}; {BOOTSTRAP}")
    raise BusRefused(text + ("; nothing was changed" if error.get("err_code") == _EXISTS else ""))
