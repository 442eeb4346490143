"""Which messages were in progress when their reader was killed, so that none of them kills a third one.

A first delivery costs nothing: that its reader was killed follows from a second delivery which nobody asked for. From
then on the message is marked while it is processed, in the run's scoring bucket, and every reader that returns a message
in an orderly way (a stop, a retry) records that. So only readers that were killed, or lost their connection for longer than
the ack wait, are counted.

| delivery                       | record found                  | readers killed so far           |
|--------------------------------|-------------------------------|---------------------------------|
| first                          | not read                      | 0                               |
| later                          | none                          | 1                               |
| later, after an orderly return | ``started`` is False          | as recorded                     |
| later, its reader was killed   | ``started`` is True           | as recorded, and one more       |

A record is read from any server of a cluster. One that lags may count a killed reader less, then one more is; or one too many,
where a message that was returned a moment ago is delivered again.

At `MOST_KILLED` the message is dead-lettered as `ReaderKilled` and not processed again. All messages that one reader had in
progress at both times are: the trainer issues their groups again under new ids, so an innocent one costs one attempt.
"""

from __future__ import annotations

import json

import structlog

from penstock.protocol.errors import BusError
from penstock.protocol.streams import ConsumerSpec, kill_mark_key
from penstock.protocol.transport.key_value import KeyValue
from penstock.protocol.transport.nats_connection import Connection

MOST_KILLED = 2
log = structlog.get_logger("protocol.bus")


class KillMarks:
    """The records of one consumer's messages. Without NATS none is written, and nothing is quarantined."""

    def __init__(self, connection: Connection, spec: ConsumerSpec) -> None:
        """Bind to the bucket when a record is first needed."""
        self._connection = connection
        self._spec = spec
        self._store: KeyValue | None = None

    @property
    def is_used(self) -> bool:
        """Whether messages of this consumer are marked."""
        return bool(self._spec.marks_bucket)

    async def begin(self, sequence: int, num_delivered: int) -> int:
        """Return how many readers were killed while they processed a message, and mark it; call for each delivery but the first."""
        try:
            store = await self._bound()
            entry = await store.get(self._key(sequence), may_lag=True)
            killed = 1 if entry is None else _killed(entry.value)
            await store.put(self._key(sequence), _record(killed, started=True))
        except BusError as err:
            log.warning("redelivered message not marked", sequence=sequence, error=str(err))
            return 0
        if killed:
            log.warning("message of a reader that was killed", sequence=sequence, killed=killed, delivery=num_delivered)
        return killed

    async def give_back(self, sequence: int, num_delivered: int) -> None:
        """Record that a message is returned in an orderly way, before it is."""
        try:
            store = await self._bound()
            entry = await store.get(self._key(sequence), may_lag=True) if num_delivered > 1 else None
            killed = 0 if entry is None else max(0, _killed(entry.value) - 1)  # this reader's own mark says it started
            await store.put(self._key(sequence), _record(killed, started=False))
        except BusError as err:
            log.debug("return of a message not recorded", sequence=sequence, error=str(err))

    async def forget(self, sequence: int) -> None:
        """Delete the record of a message that is not delivered again."""
        try:
            await (await self._bound()).delete(self._key(sequence))
        except BusError as err:  # it expires after a day
            log.debug("mark not deleted", sequence=sequence, error=str(err))

    async def _bound(self) -> KeyValue:
        if self._store is None:
            self._store = await KeyValue.bind(self._connection, self._spec.marks_bucket)
        return self._store

    def _key(self, sequence: int) -> str:
        return kill_mark_key(self._spec.stage, sequence)


def _record(killed: int, *, started: bool) -> bytes:
    return json.dumps({"killed": killed, "started": started}).encode()


def _killed(value: bytes) -> int:
    """Return how many readers were killed, by a record that an earlier delivery left; 1 for what is no such record."""
    try:
        record = json.loads(value)
        killed, started = record["killed"], record["started"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 1
    is_record = type(killed) is int and 0 <= killed <= MOST_KILLED and type(started) is bool
    return killed + started if is_record else 1
