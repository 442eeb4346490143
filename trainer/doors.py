"""What every part of the trainer that talks to the outside holds: the run, NATS, and the object store."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.transport.blobs import Blobs
from protocol.transport.bus import Bus


@dataclass(frozen=True, slots=True)
class Doors:
    """The two doors, and the run whose subjects and keys go through them."""

    run_id: str
    bus: Bus
    blobs: Blobs
