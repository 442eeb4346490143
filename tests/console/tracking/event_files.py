"""Reads TensorBoard's event files back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event

from penstock.console.tracking.writers.tensorboard import records


def values(folder: Path) -> Counter[tuple[str, int, float]]:
    """Return how often each value is in a folder's files: tag, step, value."""
    found: Counter[tuple[str, int, float]] = Counter()
    for event in events(folder):
        for one in event.summary.value:
            if one.WhichOneof("value") == "simple_value":
                found[one.tag, event.step, round(one.simple_value, 4)] += 1
    return found


def texts(folder: Path) -> dict[str, str]:
    found = ((one.tag, one.tensor) for event in events(folder) for one in event.summary.value)
    return {tag: tensor.string_val[0].decode() for tag, tensor in found if tensor.string_val}


def events(folder: Path) -> list[Any]:
    return [Event.FromString(record) for path in sorted(folder.glob("events.out.*")) for record in records(path)]
