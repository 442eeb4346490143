"""What a run occupies at one moment: memory of each process, bytes on disk by kind."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from penstock.console.live.run_snapshot import Snapshot
from penstock.deploy.local_run import ProcessView

_PATTERNS = (
    ("objects: weights", r"objects/[^/]+/runs/[^/]+/weights/"),
    ("objects: packs", r"objects/[^/]+/runs/[^/]+/(groups|tasks)/"),
    ("objects: record", r"objects/[^/]+/runs/[^/]+/lineage/"),
    ("objects: other", r"objects/"),
    ("NATS: events", r"nats/jetstream-store/.*/streams/[^/]+-events/"),
    ("NATS: dead letters", r"nats/jetstream-store/.*/streams/[^/]+-dead/"),
    ("NATS: weights", r"nats/jetstream-store/.*/streams/[^/]+-weights/"),
    ("NATS: queues", r"nats/jetstream-store/.*/streams/[^/]+-(tasks|generated|scored)/"),
    ("NATS: buckets", r"nats/jetstream-store/.*/streams/KV_"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment; sizes in bytes."""

    at_s: float  # since the first step
    step: int
    memory: dict[str, int] = field(default_factory=dict)  # by process, with its children: resident
    disk: dict[str, int] = field(default_factory=dict)  # by kind
    blocks: dict[str, int] = field(default_factory=dict)  # by stream: its largest file of messages, in bytes


def take(started: float, snapshot: Snapshot, processes: Iterable[ProcessView], folder: Path) -> Sample:
    """Measure now."""
    memory = {view.name: resident(view.pid) for view in processes if view.alive}
    return Sample(time.monotonic() - started, snapshot.step, memory, disk(folder), stream_blocks(folder))


def resident(pid: int) -> int:
    """Return the resident bytes of a process and its children; 0 if it has exited."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
    return total


def disk(folder: Path) -> dict[str, int]:
    """Return the bytes that are allocated below a run's folder, by kind."""
    found: Counter[str] = Counter()
    for path, size in _files(folder):
        found[_kind(path)] += size
    return dict(found)


def stream_blocks(folder: Path) -> dict[str, int]:
    """Return the bytes of the largest file of messages of each stream; nats-server keeps the one that it writes in memory."""
    largest: dict[str, int] = {}
    for path in folder.glob("store/nats/jetstream-store/jetstream/*/streams/*/msgs/*.blk"):
        with contextlib.suppress(OSError):  # removed meanwhile
            stream = path.parent.parent.name
            largest[stream] = max(largest.get(stream, 0), path.stat().st_size)
    return largest


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    for inside, _, names in os.walk(folder):
        for name in names:
            path = Path(inside, name)
            with contextlib.suppress(OSError):  # removed meanwhile
                yield str(path.relative_to(folder)), path.lstat().st_blocks * 512


def _kind(path: str) -> str:
    if path.startswith("store/"):
        inside = path.removeprefix("store/")
        return next((kind for kind, pattern in _PATTERNS if re.match(pattern, inside)), "NATS: other")
    return {"checkpoints": "checkpoints", "logs": "logs"}.get(path.split("/", maxsplit=1)[0], "other files of the run")
