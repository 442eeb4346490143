"""What must be remembered of a pack between two deliveries: settled groups, and deliveries that were no attempt.

Kept in the run's scoring bucket, so that another replica goes on where this one stopped, and in this
process's memory, for as long as the bucket cannot be written. Only packs that go back have a record: a
pack that is scored at once costs nothing. What was announced before a crash and not yet written down is
announced again, and the trainer drops the doubles by their ids.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import structlog

from penstock.protocol.errors import BusUnreachable
from penstock.protocol.streams import pack_progress_key
from penstock.protocol.transport.key_value import KeyValue

log = structlog.get_logger("reward_service.progress")

MAX_MESSAGES = 10_000  # a message is remembered only while groups of it wait; more is memory for nothing


@dataclass(frozen=True, slots=True)
class PackProgress:
    """What is known of one message; times are seconds since the epoch."""

    settled: frozenset[str] = frozenset()
    excused: Mapping[str, int] = field(default_factory=dict)  # deliveries that were no attempt, by group
    refused_since: Mapping[str, float] = field(default_factory=dict)  # when a group was first not asked about

    def attempt(self, group_id: str, num_delivered: int) -> int:
        """Return which attempt at scoring a group this delivery is, from 1."""
        return max(1, num_delivered - self.excused.get(group_id, 0))

    def settle(self, group_ids: Iterable[str]) -> PackProgress:
        """These groups need nothing more."""
        return replace(self, settled=self.settled | frozenset(group_ids))

    def excuse(self, group_ids: Iterable[str]) -> PackProgress:
        """This delivery was no attempt at scoring these groups."""
        return replace(self, excused={**self.excused, **{name: self.excused.get(name, 0) + 1 for name in group_ids}})

    def refuse(self, group_ids: Iterable[str], now: float) -> PackProgress:
        """Nobody was asked about these groups, and that may not go on for ever."""
        return replace(self, refused_since={**dict.fromkeys(group_ids, now), **self.refused_since})

    def asked(self, group_ids: Iterable[str]) -> PackProgress:
        """Somebody was asked about these groups: their patience begins anew."""
        gone = frozenset(group_ids)
        if not gone & self.refused_since.keys():
            return self
        return replace(self, refused_since={k: v for k, v in self.refused_since.items() if k not in gone})

    def to_json(self) -> bytes:
        """Return what is stored."""
        document = {
            "settled": sorted(self.settled),
            "excused": dict(self.excused),
            "refused_since": dict(self.refused_since),
        }
        return json.dumps(document).encode()

    @classmethod
    def from_json(cls, value: bytes) -> PackProgress:
        """Read what was stored; raises ValueError, KeyError or TypeError for anything else."""
        document = json.loads(value)
        return cls(frozenset(document["settled"]), dict(document["excused"]), dict(document["refused_since"]))


_FRESH = PackProgress()
_CLOCK_SET = time.time() - time.monotonic()


class Progress:
    """The records of a run's packs by their sequence number in the stream."""

    def __init__(self, store: KeyValue, max_messages: int = MAX_MESSAGES) -> None:
        """Remember at most ``max_messages`` here; the one untouched for longest is forgotten first."""
        self._store = store
        self._messages: OrderedDict[int, PackProgress] = OrderedDict()
        self._max_messages = max_messages

    async def load(self, sequence: int, num_delivered: int) -> PackProgress:
        """Return what is known of a message; one that was never delivered before has no record."""
        own = self._messages.get(sequence, _FRESH)
        if num_delivered <= 1:
            return own
        try:
            entry = await self._store.get(pack_progress_key(sequence))
        except BusUnreachable:
            return own
        return _newest(own, _decode(entry.value)) if entry is not None else own

    async def save(self, sequence: int, progress: PackProgress) -> None:
        """Write a record down before its message goes back; with NATS away it stays in memory."""
        if progress == _FRESH:
            return
        self._messages[sequence] = progress
        self._messages.move_to_end(sequence)
        while len(self._messages) > self._max_messages:
            self._messages.popitem(last=False)
        try:
            await self._store.put(pack_progress_key(sequence), progress.to_json())
        except BusUnreachable as err:
            log.warning("progress is only in memory", sequence=sequence, error=str(err))

    async def forget(self, sequence: int, num_delivered: int) -> None:
        """The message was acknowledged and does not come again."""
        known = self._messages.pop(sequence, None)
        if known is None and num_delivered <= 1:
            return
        try:
            await self._store.delete(pack_progress_key(sequence))
        except BusUnreachable as err:  # it vanishes by itself after a day
            log.debug("progress stays behind", sequence=sequence, error=str(err))


def now() -> float:
    """Return the clock that records are written by, in seconds since the epoch.

    It is set once, when this process starts: a wall clock that is put back and then right again would
    otherwise end the patience of a group that was refused in between, an hour early if that was the step.
    """
    return _CLOCK_SET + time.monotonic()


def _newest(own: PackProgress, stored: PackProgress) -> PackProgress:
    """Join what this replica and the others know."""
    names = own.excused.keys() | stored.excused.keys()
    return PackProgress(
        settled=own.settled | stored.settled,
        excused={name: max(own.excused.get(name, 0), stored.excused.get(name, 0)) for name in names},
        refused_since=stored.refused_since if stored.excused else own.refused_since,
    )


def _decode(value: bytes) -> PackProgress:
    try:
        return PackProgress.from_json(value)
    except (ValueError, KeyError, TypeError) as err:
        log.error("unreadable progress, the pack is scored anew", error=str(err))  # noqa: TRY400
        return _FRESH
