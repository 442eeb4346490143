"""Seconds and CPU of fetching buckets, verified, from a local S3 server and from shared memory, in turn; and of storing them there.

python -m benchmarks.weights.shared_part [--buckets 16] [--mb 64] [--rounds 5]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.local import LocalStack
from penstock.protocol import logs
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.protocol.weights.version_reader import for_buckets


def timed(action: Callable[[int], object], numbers: range) -> tuple[float, float]:
    started, cpu = time.perf_counter(), time.process_time()
    for_buckets(numbers, action)
    return time.perf_counter() - started, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=int, default=16)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    logs.configure("shared_part")
    random, numbers = np.random.default_rng(0), range(arguments.buckets)
    data = [random.integers(0, 256, arguments.mb << 20, np.uint8).tobytes() for _ in numbers]
    names = [hashlib.sha256(bucket).hexdigest() for bucket in data]
    with tempfile.TemporaryDirectory() as folder, LocalStack(Path(folder)) as stack:
        with Bus.connect(stack.nats, name="shared_part") as bus:
            bootstrap(bus, Blobs(stack.s3), "shared-part")
        blobs, worker, trainer = Blobs(stack.s3), SharedSegments("shared-part"), SharedSegments("shared-part")
        refs = [blobs.put(f"runs/shared-part/{name}", bucket) for name, bucket in zip(names, data, strict=True)]
        worker.join()

        def from_s3(number: int) -> None:
            blobs.get_range(refs[number], 0, len(data[number]), names[number])

        def from_memory(number: int) -> None:
            worker.fetch(names[number], len(data[number]), lambda: bytes(1 // 0))

        def stored(number: int) -> None:
            trainer.offer(names[number], data[number])

        def hashed(number: int) -> None:
            hashlib.sha256(data[number]).digest()

        ways = {"s3": from_s3, "stored": stored, "shared_memory": from_memory, "sha256": hashed}
        rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for path in worker.folder.iterdir():
                if len(path.name) == 64:
                    path.unlink()
            for name, way in ways.items():
                rounds[name].append(timed(way, numbers))
        worker.close()
    for name, found in rounds.items():
        wall, cpu = (statistics.median(values) for values in zip(*found, strict=True))
        print(json.dumps({"way": name, "wall_s": round(wall, 3), "cpu_s": round(cpu, 3)}))
    ratios = [memory[0] / s3[0] for s3, memory in zip(rounds["s3"], rounds["shared_memory"], strict=True)]
    print(json.dumps({"memory_over_s3": [round(ratio, 3) for ratio in ratios]}))


if __name__ == "__main__":
    main()
