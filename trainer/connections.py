"""What every part of the trainer that talks to the outside holds: the run, NATS, and the object store."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus


@dataclass(frozen=True, slots=True)
class Connections:
    """The two doors, and the run whose subjects and keys go through them."""

    run_id: str
    bus: Bus
    blobs: Blobs
