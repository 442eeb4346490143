"""What of a run is kept how long, and which of its objects may go. Pure rules; whoever holds the lease acts.

| what                          | how long                                                            |
|-------------------------------|---------------------------------------------------------------------|
| packs of trained groups       | `retention.trained_packs_h`; 0, the default: until the run is removed |
| packs of a rescored input     | until it is removed, by `penstock runs rm` of its name                |
| packs and task lists that nothing names | `retention.unused_packs_h` after they were written: dropped groups, repeated attempts |
| events, dead letters          | `retention.events_h`, `retention.dead_letters_h`, the streams' own age; 0: until they are full |
| checkpoints, weights          | `trainer.keep_checkpoints`, `trainer.keep_versions` and what `trainer/publishing/weight_retention.py` says |
| the record (lineage)          | until the run is removed, by `penstock runs rm`                     |

With the defaults a finished run stays replayable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime

from pydantic import Field, field_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.streams import StreamLimits
from penstock.protocol.transport.blobs import BlobStat

_HOUR_S = 3600.0


class RetentionSettings(Section):
    """Section ``retention``."""

    trained_packs_h: float = Field(
        default=0.0,
        ge=0.0,
        description="Hours that packs of trained groups stay; 0: until the run is removed, so that it can be replayed.",
    )
    unused_packs_h: float = Field(
        default=24.0,
        ge=1.0,
        description="Hours that packs and task lists stay which no step, no queue and no dead letter names.",
    )
    events_h: float = Field(
        default=0.0, ge=0.0, description="Hours, at least 1, that events stay in their stream; 0: no limit."
    )
    dead_letters_h: float = Field(
        default=0.0, ge=0.0, description="Hours, at least 1, that dead letters stay and can be sent again; 0: no limit."
    )

    @field_validator("events_h", "dead_letters_h")
    @classmethod
    def _longer_than_repetitions_are_known(cls, value: float) -> float:
        if 0.0 < value < 1.0:
            raise ValueError(f"must be 0 or at least 1 hour, got {value}")
        return value

    def limits(self) -> StreamLimits:
        """Return the limits of the run's streams, with the ages that are set here."""
        return StreamLimits(events_age_s=self.events_h * _HOUR_S, dead_age_s=self.dead_letters_h * _HOUR_S)


def expired(
    stored: Iterable[BlobStat],
    *,
    named: Collection[str],
    trained: Collection[str],
    settings: RetentionSettings,
    now: datetime,
) -> list[str]:
    """Return the keys of the packs and task lists that may go.

    Args:
        stored: All that are stored.
        named: Keys that a message of a work queue or a dead letter names; they stay, however old.
        trained: Keys that a step of the committed record names.
        settings: How long.
        now: The time of day, by the object store's clock as well as it is known.
    """
    doomed = []
    for stat in stored:
        if stat.key in named:
            continue
        hours = settings.trained_packs_h if stat.key in trained else settings.unused_packs_h
        if hours and (now - stat.modified).total_seconds() > hours * _HOUR_S:
            doomed.append(stat.key)
    return doomed
