"""A key-value bucket: values are bytes; `change_value` changes one of several writers, by compare-and-swap."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

import nats.js.errors
import structlog
from nats.js.api import Header
from nats.js.kv import KeyValue as NatsKeyValue

from penstock.protocol.errors import BusUnreachable, CompareAndSwapFailed, MissingStream, StorageFull
from penstock.protocol.streams import BucketSpec
from penstock.protocol.transport import store_errors, stream_admin
from penstock.protocol.transport.loop_thread import Pending
from penstock.protocol.transport.nats_connection import (
    ATTEMPT_S,
    BOOTSTRAP,
    ERR_FULL,
    ERR_OTHER_REVISION,
    ERR_STORAGE_FULL,
    ERR_SWAP_UNDER_WAY,
    NO_ANSWER,
    REQUEST_S,
    RETRY_S,
    Connection,
    reason_of,
    refusal,
)
from penstock.protocol.transport.tail import direct_get

T = TypeVar("T")
log = structlog.get_logger("protocol.bus")

_MAX_ENTRIES = 10_000
_REMOVED = frozenset({"DEL", "PURGE"})  # the values of the header KV-Operation of a key that was deleted
V = TypeVar("V")
_SWAPS = 16  # that many writers would have to meet in a few milliseconds


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a key-value bucket; ``revision`` is what compare-and-swap compares."""

    key: str
    value: bytes
    revision: int
    is_outlived: bool = False  # older than its bucket lets keys be, by the server's clock
    age_s: float = field(default=0.0, compare=False)  # by the server's clock, where `KeyValue.entries` was asked for it


@dataclass(frozen=True, slots=True)
class BucketState:
    """What a bucket holds; ``num_keys`` counts deleted keys until they expire, ``ttl_s`` 0 means that keys do not."""

    num_keys: int
    ttl_s: float


class KeyValue:
    """One key-value bucket. A read is retried while NATS is unreachable; a write is not, since it may have happened."""

    def __init__(self, connection: Connection, bucket: str, store: NatsKeyValue) -> None:
        self._connection = connection
        self._store = store
        self._ttl_s = math.nan  # of the bucket; not known yet
        self.bucket = bucket

    @classmethod
    async def bind(cls, connection: Connection, bucket: str) -> KeyValue:
        store = await stream_admin.ask(connection, lambda: connection.js.key_value(bucket), f"bucket {bucket}")
        return cls(connection, bucket, store)

    @property
    def num_transitions(self) -> int:
        """How often the connection was lost or restored; a read that is retried shows an outage only here."""
        return self._connection.num_transitions

    def get(self, key: str, *, may_lag: bool = False) -> Pending[Entry | None]:
        """Read a key; None when it does not exist.

        In a cluster the leader of the bucket is asked, which has every write that was acknowledged. A read that
        ``may_lag`` is answered by any server, maybe with a former value; it needs no right but to read the one key.
        """
        newest = self._connection.is_clustered and not may_lag
        return self._read(lambda: self._get_newest(key) if newest else self._get(key), f"read {self.bucket}/{key}")

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> Pending[int]:
        """Write a key unconditionally; returns the revision. It expires after ``ttl_s``, if the bucket's is longer."""
        return self._write(lambda: self._put(key, value, ttl_s), f"write {self.bucket}/{key}")

    def state(self) -> Pending[BucketState]:
        return self._read(self._state, f"state of {self.bucket}")

    def swap(self, key: str, value: bytes, expected_revision: int | None) -> Pending[int]:
        """Write a key only if it still has ``expected_revision`` (None: only if it does not exist).

        Raises CompareAndSwapFailed when the key has another revision.
        """
        return self._write(lambda: self._swap(key, value, expected_revision), f"swap {self.bucket}/{key}")

    def delete(self, key: str, revision: int | None = None) -> Pending[bool]:
        """Delete a key, if it still has the ``revision`` that is given; raises CompareAndSwapFailed when it has another."""
        return self._write(lambda: self._delete(key, revision), f"delete {self.bucket}/{key}")

    def entries(self, prefix: str = "", *, outlived: bool = False, aged: bool = False) -> Pending[list[Entry]]:
        """Read all keys, or those below a ``prefix`` that ends with a dot; in a cluster the answer may lag, see `get`.

        A key that is older than the bucket's TTL, which a TTL of its own may keep, is left out unless ``outlived``.
        ``aged``: with `Entry.age_s`, by which owners and readers with different clocks agree on what is current.
        """
        return self._read(lambda: self._entries(prefix, outlived, aged), f"list {self.bucket}/{prefix}")

    def _read(self, action: Callable[[], Awaitable[T]], what: str) -> Pending[T]:
        deadline_s = REQUEST_S - RETRY_S  # the last try must end before the call does, so that its error is raised
        return self._call(lambda: self._connection.retry(action, what=what, deadline_s=deadline_s), what)

    def _write(self, action: Callable[[], Awaitable[T]], what: str) -> Pending[T]:
        async def once() -> T:
            async with self._connection.while_connected():
                return await action()

        return self._call(once, what)

    def _call(self, action: Callable[[], Awaitable[T]], what: str) -> Pending[T]:
        async def run() -> T:
            try:
                async with asyncio.timeout(REQUEST_S):
                    await self._connection.wait_until_up()
                    return await action()
            except nats.js.errors.NoStreamResponseError:
                if self._connection.is_clustered:
                    raise BusUnreachable(
                        f"{what}: no server of the cluster takes it: the bucket does not exist, or more than half of "
                        f"the servers that store it are down; NATS at {self._connection.url}"
                    ) from None
                raise MissingStream(f"{what}: the bucket does not exist; {BOOTSTRAP}") from None
            except nats.js.errors.APIError as err:
                if err.err_code == ERR_FULL or err.err_code in ERR_STORAGE_FULL:
                    store_errors.count("nats", "full")
                if err.err_code == ERR_FULL:
                    raise await self._full(what, err) from None
                raise refusal(err, what, self._connection.url) from None
            except NO_ANSWER as err:
                raise BusUnreachable(self._connection.explain(f"{what}: no answer ({reason_of(err)})")) from None

        return self._connection.call(run(), what, REQUEST_S)

    async def _full(self, what: str, err: nats.js.errors.APIError) -> StorageFull:
        holds, stream = "", f"KV_{self.bucket}"
        with contextlib.suppress(*NO_ANSWER, nats.js.errors.Error):  # the user may lack this right
            info = await self._connection.js.stream_info(stream)
            holds = f", {info.state.bytes} of its {info.config.max_bytes} bytes in {info.state.messages} keys"
        return StorageFull(
            f"{what}: bucket {self.bucket} is full{holds}: NATS at {self._connection.url} says {err.description} "
            f"(error {err.err_code}). Nothing was written and nothing was lost. Raise its limit: nats stream edit "
            f"{stream} --max-bytes SIZE, or remove keys: nats kv purge {self.bucket} KEY"
        )

    async def _put(self, key: str, value: bytes, ttl_s: float | None) -> int:
        ttl = None if ttl_s is None else math.ceil(ttl_s)  # the server knows whole seconds
        return (await self._connection.js.publish(f"$KV.{self.bucket}.{key}", value, msg_ttl=ttl)).seq

    async def _state(self) -> BucketState:
        info = await self._connection.js.stream_info(f"KV_{self.bucket}")
        return BucketState(info.state.messages, info.config.max_age or 0.0)

    async def _get(self, key: str) -> Entry | None:
        try:
            entry = await self._store.get(key)
        except nats.js.errors.NotFoundError:
            return None
        return Entry(key, entry.value or b"", entry.revision or 0)

    async def _get_newest(self, key: str) -> Entry | None:
        try:
            msg = await self._connection.js.get_last_msg(f"KV_{self.bucket}", f"$KV.{self.bucket}.{key}")
        except nats.js.errors.NotFoundError:
            return None
        if (msg.headers or {}).get("KV-Operation") in _REMOVED:
            return None
        return Entry(key, msg.data or b"", msg.seq or 0)

    async def _delete(self, key: str, revision: int | None) -> bool:
        try:
            return await self._store.delete(key, revision)
        except nats.js.errors.APIError as err:
            if err.err_code != ERR_OTHER_REVISION:
                raise
            raise self._failed_swap(key, revision, err) from None

    async def _swap(self, key: str, value: bytes, expected: int | None) -> int:
        headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(expected or 0)}
        while True:  # until the call's deadline
            try:
                return (await self._connection.js.publish(f"$KV.{self.bucket}.{key}", value, headers=headers)).seq
            except nats.js.errors.APIError as err:
                if err.err_code not in {ERR_SWAP_UNDER_WAY, ERR_OTHER_REVISION}:
                    raise
                if err.err_code == ERR_OTHER_REVISION:
                    if expected is None:
                        try:
                            return await self._store.create(key, value)
                        except nats.js.errors.KeyWrongLastSequenceError as err:
                            raise self._failed_swap(key, None, err) from None
                    raise self._failed_swap(key, expected, err) from None
            await asyncio.sleep(RETRY_S)

    def _failed_swap(self, key: str, expected: int | None, err: nats.js.errors.APIError) -> CompareAndSwapFailed:
        return CompareAndSwapFailed(
            f"{self.bucket}/{key}: expected revision {expected}, another writer changed it ({err})"
        )

    async def _entries(self, below: str, outlived: bool, aged: bool) -> list[Entry]:
        """Read all keys by one request (ADR-31); the client library would use a consumer and a request for each key."""
        prefix = f"$KV.{self.bucket}."
        request = {"multi_last": [f"{prefix}{below}>"], "batch": _MAX_ENTRIES}
        messages = await direct_get(self._connection, f"KV_{self.bucket}", request)
        now = await self._now() if messages and (aged or self._ttl_s != 0.0) else None
        entries: list[Entry] = []
        for msg in messages:
            headers = msg.headers or {}
            if headers and headers.get("KV-Operation") not in _REMOVED:
                key, revision = headers["Nats-Subject"].removeprefix(prefix), int(headers["Nats-Sequence"])
                age_s = (now - datetime.fromisoformat(headers["Nats-Time-Stamp"])).total_seconds() if now else 0.0
                entries.append(Entry(key, msg.data, revision, 0.0 < self._ttl_s < age_s, age_s))
        return [entry for entry in entries if outlived or not entry.is_outlived]

    async def _now(self) -> datetime:
        """Return the time by the server's clock; sets the bucket's TTL."""
        answer = await self._connection.client.request(f"$JS.API.STREAM.INFO.KV_{self.bucket}", timeout=ATTEMPT_S)
        info = json.loads(answer.data)
        self._ttl_s = info["config"].get("max_age", 0) / 1e9
        return datetime.fromisoformat(info["ts"])


async def ensure_bucket(connection: Connection, spec: BucketSpec) -> None:
    """Create or update a bucket, and remove keys that their own TTL, such as `never`, keeps beyond the bucket's."""
    await stream_admin.ensure_bucket(connection, spec)
    if not spec.ttl_s:
        return
    store = await KeyValue.bind(connection, spec.bucket)
    outlived = [entry.key for entry in await store.entries(outlived=True) if entry.is_outlived]
    for key in outlived:
        await connection.js.purge_stream(f"KV_{spec.bucket}", subject=f"$KV.{spec.bucket}.{key}")
    if outlived:
        log.warning(
            "keys older than the bucket's TTL removed", bucket=spec.bucket, num_keys=len(outlived), first=outlived[0]
        )


async def change_value(
    store: KeyValue,
    key: str,
    read: Callable[[], Awaitable[tuple[V, int | None]]],
    change: Callable[[V], V],
    write: Callable[[V], bytes],
) -> tuple[V, int | None]:
    """Return the changed value and its revision; ``change`` is called again with what another process wrote meanwhile.

    ``read`` returns the present value and its revision, None: it does not exist; ``write`` returns a value as bytes.
    Nothing is written for an equal value. Raises CompareAndSwapFailed, and what ``read`` and ``change`` raise.
    """
    tries_left = _SWAPS
    while True:
        before, revision = await read()
        after = change(before)
        if after == before:
            return before, revision
        tries_left -= 1
        try:
            return after, await store.swap(key, write(after), revision)
        except CompareAndSwapFailed:
            if not tries_left:
                raise
