"""The record of a pack between two deliveries: settled groups, and deliveries that do not count as attempts.

It is stored in the run's scoring bucket, so that another replica continues where this one stopped, and in memory while
the bucket cannot be written. Only requeued packs have a record. Groups that were announced before a crash and not yet
recorded are announced again, and the trainer drops the duplicates by their ids.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import structlog
from pydantic import PlainSerializer, TypeAdapter

from penstock.protocol.errors import BusUnreachable
from penstock.protocol.streams import pack_progress_key
from penstock.protocol.transport.key_value import KeyValue

log = structlog.get_logger("reward_service.progress")

MAX_MESSAGES = 10_000  # a message is remembered only while groups of it wait; the bound only limits memory
_CLOCK_SET = time.time() - time.monotonic()


@dataclass(frozen=True, slots=True)
class PackProgress:
    """The record of one message; times are seconds since the epoch. Field names are the stored keys."""

    settled: Annotated[frozenset[str], PlainSerializer(sorted)] = frozenset()
    excused: Mapping[str, int] = field(default_factory=dict)  # deliveries that do not count as attempts, by group
    refused_since: Mapping[str, float] = field(default_factory=dict)  # since when no endpoint was called for a group

    def attempt(self, group_id: str, num_delivered: int) -> int:
        return max(1, num_delivered - self.excused.get(group_id, 0))

    def settle(self, group_ids: Iterable[str]) -> PackProgress:
        return replace(self, settled=self.settled | frozenset(group_ids))

    def excuse(self, group_ids: Iterable[str]) -> PackProgress:
        """Return the record with one more delivery that does not count as an attempt for these groups."""
        return replace(self, excused={**self.excused, **{name: self.excused.get(name, 0) + 1 for name in group_ids}})

    def not_called(self, group_ids: Iterable[str], now: float) -> PackProgress:
        """Return the record in which no endpoint has been called for these groups since ``now``, or an earlier time."""
        return replace(self, refused_since={**dict.fromkeys(group_ids, now), **self.refused_since})

    def called(self, group_ids: Iterable[str]) -> PackProgress:
        ids = frozenset(group_ids)
        if not ids & self.refused_since.keys():
            return self
        return replace(self, refused_since={k: v for k, v in self.refused_since.items() if k not in ids})


_STORED = TypeAdapter(PackProgress)
_FRESH = PackProgress()


class ProgressStore:
    def __init__(self, store: KeyValue, max_messages: int = MAX_MESSAGES) -> None:
        """Keep at most ``max_messages`` in memory; the least recently saved is dropped first."""
        self._store = store
        self._messages: OrderedDict[int, PackProgress] = OrderedDict()
        self._max_messages = max_messages

    async def load(self, sequence: int, num_delivered: int) -> PackProgress:
        local = self._messages.get(sequence, _FRESH)
        if num_delivered <= 1:
            return local
        try:
            entry = await self._store.get(pack_progress_key(sequence), may_lag=True)
        except BusUnreachable:
            return local
        return _newest(local, _decode(entry.value)) if entry is not None else local

    async def save(self, sequence: int, progress: PackProgress) -> None:
        """Store a record before its message is requeued; while NATS is unreachable it stays in memory."""
        if progress == _FRESH:
            return
        self._messages[sequence] = progress
        self._messages.move_to_end(sequence)
        while len(self._messages) > self._max_messages:
            self._messages.popitem(last=False)
        try:
            await self._store.put(pack_progress_key(sequence), _STORED.dump_json(progress))
        except BusUnreachable as err:
            log.warning("NATS unreachable: progress kept in memory only", sequence=sequence, error=str(err))

    async def forget(self, sequence: int, num_delivered: int) -> None:
        known = self._messages.pop(sequence, None)
        if known is None and num_delivered <= 1:
            return
        try:
            await self._store.delete(pack_progress_key(sequence))
        except BusUnreachable as err:  # it expires after a day
            log.debug("progress not deleted", sequence=sequence, error=str(err))


def now() -> float:
    """Return the clock that records are written by, in seconds since the epoch.

    It is set once, when this process starts: a wall clock that is set back and then corrected would otherwise shorten
    the wait of a group that was recorded in between by that step.
    """
    return _CLOCK_SET + time.monotonic()


def _newest(local: PackProgress, stored: PackProgress) -> PackProgress:
    names = local.excused.keys() | stored.excused.keys()
    return PackProgress(
        settled=local.settled | stored.settled,
        excused={name: max(local.excused.get(name, 0), stored.excused.get(name, 0)) for name in names},
        refused_since=stored.refused_since if stored.excused else local.refused_since,
    )


def _decode(value: bytes) -> PackProgress:
    try:
        return _STORED.validate_json(value)
    except ValueError as err:
        log.error("progress unreadable: the pack is scored from the start", error=str(err))  # noqa: TRY400
        return _FRESH
