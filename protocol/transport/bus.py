"""The connection to NATS JetStream, as services use it.

The bus runs in a separate thread and event loop, so a training step of thirty seconds cannot stop
heartbeats, keep-alives or acknowledgements. Every call returns a `Pending`: threads call
``.wait()``, coroutines ``await`` it. Every call has a deadline whose error names what it waited for.

Guarantees:

- `publish` is at-least-once with a message id: it retries until the server has acknowledged, and a
  full stream makes it wait (back-pressure), never drop.
- A fetched `Delivery` is renewed until it is acknowledged, given back or dead-lettered, however long
  the work takes; when the reader exits, the message is redelivered.
- A redelivery of a message that this inbox still holds replaces its handle; it is not returned twice.
- A message that does not decode is dead-lettered with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.errors import WireError
from penstock.protocol.facts import Fact
from penstock.protocol.streams import BucketSpec, ConsumerSpec, StreamSpec
from penstock.protocol.transport import fact_publisher, key_value, stream_admin, tail
from penstock.protocol.transport.fact_publisher import FULL_DEADLINE_S, Receipt
from penstock.protocol.transport.inbox import Inbox
from penstock.protocol.transport.key_value import KeyValue
from penstock.protocol.transport.loop_thread import Pending
from penstock.protocol.transport.nats_connection import Connection
from penstock.protocol.transport.stream_admin import ConsumerState, Snapshot, StoreState, StreamState
from penstock.protocol.transport.tail import StoredMessage, Tail

F = TypeVar("F", bound=Fact)

_SCAN_S = 300.0  # a full stream is read within this
_SNAPSHOT_S = 3600.0  # a full stream is copied within this; each part of it has a separate, shorter deadline


class Bus:
    """One connection to NATS, in a separate thread. Close it, or use it as a context manager."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, settings: NatsSettings, *, name: str, deadline_s: float = 20.0) -> Bus:
        """Connect, waiting at most ``deadline_s``; raises BusUnreachable or BusRefused."""
        connection = Connection(settings, name=name)
        connection.open(deadline_s)
        return cls(connection)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Bus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def down_s(self) -> float:
        """Seconds since the connection was lost; 0.0 while it is up."""
        return self._connection.down_s

    @property
    def num_transitions(self) -> int:
        return self._connection.num_transitions

    @property
    def waits_for(self) -> str:
        return self._connection.waits_for

    @property
    def url(self) -> str:
        return self._connection.url

    def publish(
        self,
        subject: str,
        fact: Fact,
        *,
        msg_id: str,
        deadline_s: float = 120.0,
        full_deadline_s: float = FULL_DEADLINE_S,
        traceparent: str = "",
    ) -> Pending[Receipt]:
        """Publish a fact at least once and, thanks to ``msg_id``, at most once within the window.

        Waits up to ``deadline_s`` for the server, and up to ``full_deadline_s`` while the stream is
        full (back-pressure). Raises BusUnreachable, StreamFull, MissingStream, MessageTooLarge.
        """
        publishing = fact_publisher.publish(
            self._connection,
            subject,
            fact,
            msg_id=msg_id,
            deadline_s=deadline_s,
            full_deadline_s=full_deadline_s,
            traceparent=traceparent,
        )
        return self._connection.call(publishing, f"publish to {subject}", deadline_s + full_deadline_s)

    def inbox(self, spec: ConsumerSpec, fact: type[F]) -> Pending[Inbox[F]]:
        binding = Inbox.bind(self._connection, spec, fact)
        return self._connection.call(binding, f"bind to {spec.durable} of {spec.stream}")

    def key_value(self, bucket: str) -> Pending[KeyValue]:
        return self._connection.call(KeyValue.bind(self._connection, bucket), f"bind to bucket {bucket}")

    def tail(
        self,
        stream: str,
        subject: str,
        fact: type[F],
        on_fact: Callable[[F], None],
        *,
        from_start: bool = False,
        on_unreadable: Callable[[WireError], None] = lambda _: None,
        gather_s: float = 0.0,
    ) -> Pending[None]:
        """Call ``on_fact`` on the bus's thread for every fact of a limits stream, in order, until the bus is closed.

        Messages that do not decode are logged and skipped, with a call of ``on_unreadable``; a tail acknowledges nothing.
        A message is read ``gather_s`` after it was stored, by one request with those that followed it.
        """
        tail = Tail(self._connection, stream, subject, fact, lambda found, *_: on_fact(found), on_unreadable, gather_s)
        return self._connection.call(tail.start(after=0 if from_start else None), f"tail {subject}")

    def follow(
        self, stream: str, subject: str, fact: type[F], on_fact: Callable[[F, int, str], None], *, after: int
    ) -> Pending[None]:
        """Like `tail`, from the first message after a sequence number; ``on_fact`` also gets each message's number and subject.

        For a reader whose checkpoint holds the position.
        """
        tail = Tail(self._connection, stream, subject, fact, on_fact)
        return self._connection.call(tail.start(after=after), f"follow {subject}")

    def stream_state(self, stream: str) -> Pending[StreamState]:
        return self._connection.call(stream_admin.stream_state(self._connection, stream), f"state of {stream}")

    def read_stream(
        self, stream: str, subject: str = ">", *, after: int = 0, most: int | None = None
    ) -> Pending[list[StoredMessage]]:
        """Read all messages of a stream, or those of a subject, without consuming them; raises MissingStream.

        ``after`` is the sequence number before the first one, ``most`` the number of messages (None: all).
        """
        reading = tail.read_stream(self._connection, stream, subject, after=after, most=most)
        return self._connection.call(reading, f"read {stream}", _SCAN_S)

    def consumer_state(self, spec: ConsumerSpec) -> Pending[ConsumerState]:
        return self._connection.call(stream_admin.consumer_state(self._connection, spec), f"state of {spec.durable}")

    def store_state(self) -> Pending[StoreState]:
        return self._connection.call(stream_admin.store_state(self._connection), "state of the account")

    def reset_consumer(self, spec: ConsumerSpec) -> Pending[None]:
        """Have all unacknowledged messages of a consumer redelivered at once, after a restart of its reader."""
        return self._connection.call(stream_admin.reset_consumer(self._connection, spec), f"reset {spec.durable}")

    def stream_names(self) -> Pending[list[str]]:
        return self._connection.call(stream_admin.stream_names(self._connection), "list the streams")

    def ensure_stream(self, spec: StreamSpec) -> Pending[None]:
        """Create or update a stream (deploy/bootstrap only)."""
        return self._connection.call(stream_admin.ensure_stream(self._connection, spec), f"create stream {spec.name}")

    def ensure_consumer(self, spec: ConsumerSpec) -> Pending[None]:
        """Create or update a durable consumer (deploy/bootstrap only)."""
        creating = stream_admin.ensure_consumer(self._connection, spec)
        return self._connection.call(creating, f"create consumer {spec.durable}")

    def ensure_bucket(self, spec: BucketSpec) -> Pending[None]:
        """Create a key-value bucket unless it exists, and remove keys that outlived it (deploy/bootstrap only)."""
        creating = key_value.ensure_bucket(self._connection, spec)
        return self._connection.call(creating, f"create bucket {spec.bucket}")

    def delete_stream(self, stream: str) -> Pending[bool]:
        return self._connection.call(stream_admin.delete_stream(self._connection, stream), f"delete stream {stream}")

    def save_stream(self, stream: str, write: Callable[[bytes], object]) -> Pending[Snapshot]:
        """Write a snapshot of a stream with its consumers, in chunks on the bus's thread; raises MissingStream, BusRefused."""
        saving = stream_admin.save(self._connection, stream, write)
        return self._connection.call(saving, f"snapshot of {stream}", _SNAPSHOT_S)

    def restore_stream(self, stream: str, snapshot: Snapshot, chunks: Iterable[bytes]) -> Pending[None]:
        """Make a stream from a snapshot's chunks; raises BusRefused when it exists."""
        restoring = stream_admin.restore(self._connection, stream, snapshot, chunks)
        return self._connection.call(restoring, f"restore {stream}", _SNAPSHOT_S)
