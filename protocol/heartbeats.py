"""How often a service writes its heartbeat, and when one that stopped counts as lost. Pure.

A heartbeat announces its own period, and readers decide by it. All workers of a run together write about
`TOTAL_PER_S` heartbeats a second: the more there are, the longer the period of each.

| after the last heartbeat                     | then                                                     |
|----------------------------------------------|----------------------------------------------------------|
| `lost_after_s`: 4 periods                    | a reader that watches reports the service as lost         |
| state `EXITED`                               | it exited regularly: it is not lost                      |
| `expires_after_s`: 6 periods, 10 s or more   | its key expires: the service no longer counts as running  |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from penstock.protocol.errors import WireError
from penstock.protocol.facts import Heartbeat, decode

EXITED = "exited"  # the state in the last heartbeat of a service that was asked to stop, or has finished
EXITED_TTL_S = 5.0  # of that heartbeat: readers that poll once a second get its totals
PERIOD_S = 1.0  # unless there are many workers
TOTAL_PER_S = 100.0
LIVE_TTL_S = 60.0  # of the bucket: the longest that a key may last
_LOST_PERIODS = 4
_EXPIRY_PERIODS = 6
_LEAST_EXPIRY_S = 10.0  # a service that is suspended for seconds still counts


def readable(values: Iterable[bytes]) -> list[Heartbeat]:
    """Return the heartbeats among the values of a bucket; any service may have written another value there."""
    beats = []
    for value in values:
        with contextlib.suppress(WireError):
            beats.append(decode(value, Heartbeat))
    return beats


def worker_period_s(num_services: int, bucket_ttl_s: float) -> float:
    """Return the period of a worker's heartbeats in seconds, given how many services write to its bucket."""
    longest = max(PERIOD_S, bucket_ttl_s / _EXPIRY_PERIODS)
    return min(max(PERIOD_S, num_services / TOTAL_PER_S), longest)


def lost_after_s(beat: Heartbeat) -> float:
    """Return for how long nothing may follow this heartbeat, in seconds."""
    return _LOST_PERIODS * (beat.period_s or PERIOD_S)


def expires_after_s(period_s: float) -> float:
    """Return for how long a heartbeat is kept, in seconds."""
    return max(_LEAST_EXPIRY_S, _EXPIRY_PERIODS * period_s)
