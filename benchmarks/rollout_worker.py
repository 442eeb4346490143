"""Measure the cost of a rollout worker without its engine: CPU milliseconds per pack and per weight version.

    python -m benchmarks.rollout_worker [--packs 300] [--versions 30]

A worker process, real NATS and S3 servers, and an engine with negligible cost (the fake engine of
the tests, attached by URL). A pack is 12 groups of 8 completions of up to 9 tokens, as the quickstart issues them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.groups import make_task
from tests.rollout_service.engines.faulty_engine import FaultyEngine
from tests.rollout_service.trainer_side import TrainerSide, attached, worker_process
from tests.servers import start_nats, start_s3

from penstock.deploy.bootstrap import bootstrap
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.rollout_service.engines.engine_process import process_cpu_seconds

GROUPS, GROUP_SIZE, PROMPT_TOKENS, MAX_NEW_TOKENS = 12, 8, 18, 9


def issue_packs(trainer_side: TrainerSide, name: str, count: int) -> None:
    """Issue packs of the quickstart's size."""
    for pack in range(count):
        tasks = [
            make_task(
                f"{name}.p{pack}.g{group}",
                prompt_ids=[*range(5, 4 + PROMPT_TOKENS), group],
                group_size=GROUP_SIZE,
                max_new_tokens=MAX_NEW_TOKENS,
            )
            for group in range(GROUPS)
        ]
        trainer_side.issue(f"{name}-{pack}", tasks)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=int, default=300)
    parser.add_argument("--versions", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nats, s3 = start_nats(folder), start_s3(folder)
        blobs = Blobs(s3.settings)
        try:
            with Bus.connect(nats.settings, name="benchmark") as bus, FaultyEngine() as engine:
                bootstrap(bus, blobs, "bench")
                trainer_side = TrainerSide(bus, blobs, "bench", folder)
                trainer_side.publish(0)
                worker = worker_process(folder, "bench", "w0", nats.settings, s3.settings, *attached(engine))
                try:
                    measure(trainer_side, worker.pid, options.packs, options.versions)
                finally:
                    worker.stop()
        finally:
            nats.stop()
            s3.stop()


def measure(trainer_side: TrainerSide, worker_pid: int, num_packs: int, num_versions: int) -> None:
    """Print CPU and wall milliseconds of the worker for packs and for versions."""
    issue_packs(trainer_side, "warm", 5)
    trainer_side.collect(5, 60)
    cpu, wall = process_cpu_seconds(worker_pid), time.monotonic()
    issue_packs(trainer_side, "measured", num_packs)
    trainer_side.collect(num_packs, 600)
    show(f"a pack of {GROUPS} groups of {GROUP_SIZE}", worker_pid, cpu, wall, num_packs)
    cpu, wall = process_cpu_seconds(worker_pid), time.monotonic()
    for version in range(1, num_versions + 1):
        trainer_side.publish(version)
        trainer_side.wait_applied("w0", version)
    show("a version of 0.5 MB", worker_pid, cpu, wall, num_versions)


def show(what: str, pid: int, cpu: float, wall: float, count: int) -> None:
    """Print the cost of one of ``count`` operations since ``cpu`` and ``wall``."""
    cpu_ms = 1000 * (process_cpu_seconds(pid) - cpu) / count
    wall_ms = 1000 * (time.monotonic() - wall) / count
    print(f"{what}: {cpu_ms:.1f} ms CPU in the worker, {wall_ms:.1f} ms wall")


if __name__ == "__main__":
    main()
