"""What grows after the warm-up; pure.

| kind                              | must                                                                            |
|-----------------------------------|---------------------------------------------------------------------------------|
| memory of each process            | stay: the medians of the second and the last third of the time differ by at most `MEMORY_SHARE` |
| weights, packs, queues, buckets, checkpoints | stay, within `DISK_SHARE`: retention and limits bound them             |
| of these, weights and packs       | follow the steps per second, since they are kept for a time: compared at the same rate |
| memory of the local S3 server     | grow by at most `S3_STEP_BYTES` a step: rclone keeps about 0.7 kB for each object ever written, deleted or not |
| memory of nats-server             | grow by at most `BLOCK_SHARE` bytes for each byte by which the files that its streams write have become larger; each such file ends at 8 MB, and another begins |
| record, events, logs, metrics     | grow with the steps: they are shown in bytes per step                           |

The first third is the warm-up: caches fill, the first objects expire.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.soak.measure import Sample

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
    """Return the result as a Markdown table."""
    first, last = samples[0], samples[-1]
    rate = (last.step - first.step) / max(last.at_s - first.at_s, 1.0)
    head = f"{last.at_s:.0f} s, {last.step} steps ({rate:.2f}/s)\n\n| what | second third, MB | last third | peak | bytes per step | |\n|---|---|---|---|---|---|"
    rows = [
        f"| {n.name} | {n.first / 1e6:.1f} | {n.last / 1e6:.1f} | {n.peak / 1e6:.1f} | {n.per_step:.0f} "
        f"| {'GROWS' if n.grows else '' if n.bounded else 'with the steps'} |"
        for n in lines
    ]
    return "\n".join([head, *rows])
