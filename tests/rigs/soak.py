"""Run at full speed for a long time and show what grows: memory of every process, bytes on disk by kind.

    make soak                                     # an hour
    make soak SOAK_S=900
    python -m tests.rigs.soak --seconds 900 --json soak.json

One run of the quickstart's services on its tiny model, which trains several steps a second and never ends by itself.
`[retention]` and `trainer.weights_grace_s` are a twelfth of the time, so that what they bound is bounded within the run. The first third is the warm-up.
Exits with 1 when the memory of a process, or a kind of bytes on disk that is bounded, grows after it (`judge`):

| kind                              | must                                                                            |
|-----------------------------------|---------------------------------------------------------------------------------|
| memory of each process            | stay: the medians of the second and the last third of the time differ by at most `MEMORY_SHARE` |
| weights, packs, queues, buckets, checkpoints | stay, within `DISK_SHARE`: retention and limits bound them             |
| of these, weights and packs       | follow the steps per second, since they are kept for a time: compared at the same rate |
| memory of the local S3 server     | grow by at most `S3_STEP_BYTES` a step: rclone keeps about 0.7 kB for each object ever written, deleted or not |
| memory of nats-server             | grow by at most `BLOCK_SHARE` bytes for each byte by which the files that its streams write have become larger; each such file ends at 8 MB, and another begins |
| record, events, logs, metrics     | grow with the steps: they are shown in bytes per step                           |
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from penstock.console.live.panel import LivePanel
from penstock.console.live.run_snapshot import Snapshot
from penstock.deploy.local_run import TRAINER, LocalRun
from penstock.deploy.processes.child import Child, DeployError
from penstock.protocol import logs
from penstock.protocol.transport.bus import Bus
from tests.small_run import write_small_run

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
    at_s: float  # since the first step
    step: int
    memory: dict[str, int] = field(default_factory=dict)  # by process, with its children: resident
    disk: dict[str, int] = field(default_factory=dict)  # by kind
    blocks: dict[str, int] = field(default_factory=dict)  # by stream: its largest file of messages, in bytes


def take(started: float, snapshot: Snapshot, processes: Iterable[Child], folder: Path) -> Sample:
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


MEMORY_SHARE = 0.03
MEMORY_BYTES = 4_000_000  # a smaller difference is noise of the allocator
NATS_SERVER = "nats-server"
BLOCK_SHARE = 3.0  # measured: 25 MB for the 8 MB that one stream writes, then level (soak.md)
S3_SERVER = "s3-server"
S3_STEP_BYTES = 20_000  # a step of the run writes some ten objects, and Go's heap follows its contents in jumps
DISK_SHARE = 0.10
DISK_BYTES = 8_000_000  # NATS writes in blocks of this size
BOUNDED = ("objects: weights", "objects: packs", "NATS: queues", "NATS: buckets", "NATS: other", "checkpoints")
BY_TIME = ("objects: weights", "objects: packs")


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the result; sizes in bytes."""

    name: str
    first: float  # median of the second third of the time
    last: float  # median of the last third
    peak: float
    per_step: float  # between the two medians
    bounded: bool
    grows: bool


def judge(samples: Sequence[Sample]) -> list[Line]:
    """Return a line for each process and each kind of bytes on disk."""
    third = len(samples) // 3
    parts = samples[third : 2 * third], samples[2 * third :]
    steps = statistics.median(s.step for s in parts[1]) - statistics.median(s.step for s in parts[0])
    written = _largest_blocks(samples)
    larger = statistics.median(written[2 * third :]) - statistics.median(written[third : 2 * third])
    speed_up = _rate(parts[1]) / max(_rate(parts[0]), 1e-9)

    def line(name: str, size: Callable[[Sample], int], *, share: float, least: float, bounded: bool) -> Line:
        first, last = (statistics.median(size(sample) for sample in part) for part in parts)
        expected = first * max(speed_up, 1.0) if name in BY_TIME else first
        allowed = share * first
        if name == f"memory: {S3_SERVER}":
            allowed = S3_STEP_BYTES * max(steps, 0)
        elif name == f"memory: {NATS_SERVER}":
            allowed += BLOCK_SHARE * larger
        grows = bounded and last - expected > max(allowed, least)
        return Line(name, first, last, max(map(size, samples)), (last - first) / max(steps, 1), bounded, grows)

    memory = sorted({name for sample in samples for name in sample.memory})
    kinds = sorted({kind for sample in samples for kind in sample.disk})
    return [
        line(f"memory: {n}", lambda s, n=n: s.memory.get(n, 0), share=MEMORY_SHARE, least=MEMORY_BYTES, bounded=True)
        for n in memory
    ] + [
        line(k, lambda s, k=k: s.disk.get(k, 0), share=DISK_SHARE, least=DISK_BYTES, bounded=k in BOUNDED)
        for k in kinds
    ]


def _largest_blocks(samples: Sequence[Sample]) -> list[int]:
    """Return, for each moment, the sum over all streams of the largest file of messages that each has had, in bytes."""
    largest: dict[str, int] = {}
    sums: list[int] = []
    for sample in samples:
        largest |= {stream: max(size, largest.get(stream, 0)) for stream, size in sample.blocks.items()}
        sums.append(sum(largest.values()))
    return sums


def _rate(samples: Sequence[Sample]) -> float:
    """Return the steps per second of a part of the run."""
    first, last = samples[0], samples[-1]
    return (last.step - first.step) / max(last.at_s - first.at_s, 1e-9)


def show(samples: Sequence[Sample], lines: Sequence[Line]) -> str:
    first, last = samples[0], samples[-1]
    rate = (last.step - first.step) / max(last.at_s - first.at_s, 1.0)
    head = f"{last.at_s:.0f} s, {last.step} steps ({rate:.2f}/s)\n\n| what | second third, MB | last third | peak | bytes per step | |\n|---|---|---|---|---|---|"
    rows = [
        f"| {n.name} | {n.first / 1e6:.1f} | {n.last / 1e6:.1f} | {n.peak / 1e6:.1f} | {n.per_step:.0f} "
        f"| {'GROWS' if n.grows else '' if n.bounded else 'with the steps'} |"
        for n in lines
    ]
    return "\n".join([head, *rows])


_NUM_PROMPTS = 20_000
_START_S = 300.0
_SAMPLES = 240  # over the whole run
_RETENTION_SHARE = 1 / 12


def soak(folder: Path, seconds: float, overrides: Sequence[str] = ()) -> list[Sample]:
    """Run for so long after the first step; return the samples. Raises DeployError when the run ends before."""
    kept_s = seconds * _RETENTION_SHARE
    run_file = write_small_run(
        folder,
        "soak",
        num_train=_NUM_PROMPTS,
        num_eval=24,
        eval={"every": 100, "at_start": False},
        retention={"trained_packs_h": kept_s / 3600, "unused_packs_h": 1.0},
        rollout={"groups_per_step": 24, "group_size": 8, "groups_per_message": 6, "max_staleness": 2},
        trainer={"steps": 10_000_000, "lr": 5e-4, "checkpoint_every": 10, "weights_grace_s": kept_s},
    )
    samples = []
    with LocalRun([str(run_file), *overrides]) as run:
        run.start()
        with Bus.connect(run.nats, name="soak") as bus, LivePanel(run.run_id, bus, mode="quiet") as panel:
            if not panel.wait(lambda snapshot: snapshot.step > 0, deadline_s=_START_S):
                raise DeployError(f"no step within {_START_S:.0f} s\n{run.log_tail(TRAINER)}")
            started = time.monotonic()
            while time.monotonic() - started < seconds:
                if run.wait(seconds / _SAMPLES) is not None:
                    raise DeployError(f"the trainer ended\n{run.log_tail(TRAINER)}")
                samples.append(take(started, panel.snapshot(), run.processes(), run.folder))
    return samples


def main() -> int:
    """Run, print the table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    parser.add_argument("--keep", type=Path, help="keep the run's folder here")
    parser.add_argument("overrides", nargs="*", help="section.key=value for all services")
    options = parser.parse_args()
    logs.configure("soak", level="error")
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        samples = soak(folder, options.seconds, options.overrides)
    if options.json:
        options.json.write_text(json.dumps([asdict(sample) for sample in samples]))
    print(f"machine: {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[2]:.1f}\n")
    lines = judge(samples)
    print(show(samples, lines))
    return 1 if any(line.grows for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
