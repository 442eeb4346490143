"""Reports each step once its weights are submitted: the step's event, drops since the step before, the heartbeat's figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from penstock.trainer.telemetry.event_writer import EventWriter
from penstock.trainer.telemetry.heartbeat import HeartbeatWriter


class StepReporter:
    """Writes the events of steps; for the training thread only."""

    def __init__(self, events: EventWriter, heartbeat: HeartbeatWriter, dropped: Mapping[str, int]) -> None:
        """``dropped`` are the groups that earlier sessions dropped, by reason."""
        self._events = events
        self._heartbeat = heartbeat
        self._dropped = Counter(dropped)  # as last reported

    def report(self, step: int, fields: Mapping[str, Any], groups: Mapping[str, Any]) -> None:
        """Write the events of a step; ``groups`` are the run's groups by outcome."""
        dropped = Counter(groups["dropped"])
        if dropped != self._dropped:
            self._events.write("drop", {"step": step, "groups": dict(dropped - self._dropped)})
            self._dropped = dropped
        self._events.write("step", {**fields, "groups": groups})
        self._heartbeat.figures = {
            "step": float(step),
            "groups_trained": float(groups["trained"]),
            "groups_outstanding": float(groups["outstanding"]),
        }
