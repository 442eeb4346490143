"""The connections of the trainer: NATS and the object store, with the id of the run."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.protocol.traces.traces import HeldGroups
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus


@dataclass(frozen=True, slots=True)
class Connections:
    run_id: str
    bus: Bus
    blobs: Blobs
    traced: HeldGroups = field(default_factory=HeldGroups, compare=False)
