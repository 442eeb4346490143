"""How long each part of a run is kept, and which of its objects may be deleted. Pure rules; the trainer with the lease deletes.

| what                          | how long                                                            |
|-------------------------------|---------------------------------------------------------------------|
| packs of trained groups       | `retention.trained_packs_h`; 0, the default: until the run is removed |
| log-probabilities of a step   | as long as its packs; those of a step that a crash rolled back: as unused packs |
| packs of a rescored input     | until it is removed by `penstock runs rm` of its name                |
| packs and task lists that nothing references | `retention.unused_packs_h` after they were written: dropped groups, repeated attempts |
| events, dead letters          | `retention.events_h`, `retention.dead_letters_h`, the streams' own age; 0: until they are full |
| checkpoints                   | `trainer.keep_checkpoints`                                          |
| weights                       | `trainer.keep_versions`, `keep_best`, `keep_milestones`, the rule in `trainer/publishing/weight_retention.py` |
| the record (lineage)          | until the run is removed by `penstock runs rm`                      |

With the defaults a finished run can be replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Protocol

from pydantic import Field, field_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.streams import StreamLimits

_HOUR_S = 3600.0


class StoredObject(Protocol):
    """One object of a listing, as `Blobs.list` yields it."""

    @property
    def key(self) -> str:
        """The object key."""
        ...

    @property
    def modified(self) -> datetime:
        """Time of the last write, by the object store's clock."""
        ...


class RetentionSettings(Section):
    """How long the parts of a run are kept."""

    trained_packs_h: float = Field(
        default=0.0,
        ge=0.0,
        description="Hours to keep the packs of trained groups, and the log-probabilities of their steps; 0: until the run is "
        "removed, so that it can be replayed.",
    )
    unused_packs_h: float = Field(
        default=24.0,
        ge=1.0,
        description="Hours to keep packs and task lists that no step, queue or dead letter references.",
    )
    events_h: float = Field(
        default=0.0, ge=0.0, description="Hours, at least 1, to keep events in their stream; 0: no limit."
    )
    dead_letters_h: float = Field(
        default=0.0,
        ge=0.0,
        description="Hours, at least 1, to keep dead letters, which can be sent again until then; 0: no limit.",
    )

    @field_validator("events_h", "dead_letters_h")
    @classmethod
    def _at_least_the_duplicate_window(cls, value: float) -> float:
        if 0.0 < value < 1.0:
            raise ValueError(f"must be 0 or at least 1 hour, got {value}")
        return value

    def limits(self) -> StreamLimits:
        """Return the limits of the run's streams with these maximum ages."""
        return StreamLimits(events_age_s=self.events_h * _HOUR_S, dead_age_s=self.dead_letters_h * _HOUR_S)


def expired(
    stored: Iterable[StoredObject],
    *,
    named: Collection[str],
    trained: Collection[str],
    settings: RetentionSettings,
    now: datetime,
) -> list[str]:
    """Return the keys of the packs, task lists and log-probabilities that may be deleted.

    Args:
        stored: All of these of the run.
        named: Keys that a message of a work queue or a dead letter references; kept at any age.
        trained: Keys that a step of the committed record references, and those of its log-probabilities.
        settings: The retention times.
        now: The current time; compared with times of the object store's clock.
    """
    found = []
    for stat in stored:
        if stat.key in named:
            continue
        hours = settings.trained_packs_h if stat.key in trained else settings.unused_packs_h
        if hours and (now - stat.modified).total_seconds() > hours * _HOUR_S:
            found.append(stat.key)
    return found
