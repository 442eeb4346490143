"""What a thousand idle rollout workers cost: latency of a heartbeat and of a task, CPU of nats-server; with a busy disk too.

    python -m benchmarks.idle_workers
    python -m benchmarks.idle_workers --workers 200 1000 --seconds 60 --json idle_workers.json

Each worker is simulated by the parts that a worker has beside its engine: the requests of `TaskSource`, two tails of
the weights stream, and the `HeartbeatWriter`. Most run in one Python process, ten to a connection. Twenty are *observed*:
they run in a process of their own, each with its own connection, as real workers do, so that their latency is that of
NATS and not that of a thousand workers in one interpreter. While all wait, one task a second is issued, which one of
them takes and acknowledges. The busy disk is four processes that write 4 MiB and
sync, without end, on the disk of the NATS store.
Exits with 1 above `HEARTBEAT_P99_MS` or `NATS_CORES`, with or without the busy disk, at a thousand workers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.groups import make_task, make_task_issued

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.local import LocalStack
from penstock.protocol import logs, streams, subjects
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.facts import Heartbeat, TaskIssued, WeightsApplied, WeightsPublished, decode
from penstock.protocol.heartbeats import Activity
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.rollout_service.engines.engine_process import process_cpu_seconds
from penstock.rollout_service.heartbeat import HeartbeatWriter
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.packs.pack_loops import TaskSource

HEARTBEAT_P99_MS = 100.0
NATS_CORES = 0.2
_RUN = "idle"
_PER_CONNECTION = 10
_OBSERVED = 20
_LAST_TASK_S = 12.0  # the longest pause of an idle worker, and some
_OBSERVER_S = 60.0  # until the observed workers have started, and until they have answered
_WAVE, _WAVE_S = 20, 0.5  # workers that start together, and the pause after them
_BUSY = (
    "import os, sys\n"
    "file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
    "data = os.urandom(1 << 20)\n"
    "while True:\n"
    "    os.lseek(file, 0, os.SEEK_SET)\n"
    "    for _ in range(4):\n"
    "        os.write(file, data)\n"
    "    os.fsync(file)\n"
)


@dataclass(frozen=True, slots=True)
class Row:
    workers: int
    busy_disk: bool
    heartbeats_per_s: float
    heartbeat_ms: tuple[float, float, float]  # of the observed workers: median, 99th percentile, longest
    simulated_ms: tuple[float, float, float]  # of those that share a process: the same
    task_ms: tuple[float, float]  # from the beginning of the publication until a worker has it: median, longest
    nats_cores: float
    nats_mb: float
    period_s: float  # that the last heartbeats announced


@dataclass(slots=True)
class Engine:
    """An engine that is always ready and does nothing."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    version: None = None

    async def figures(self) -> dict[str, float]:
        return {}

    def cpu_seconds(self) -> float:
        return 0.0


class TimedBucket:
    """The live bucket, with the seconds that each write took."""

    def __init__(self, store: KeyValue, taken: list[tuple[float, float]]) -> None:
        self._store = store
        self._taken = taken

    async def put(self, key: str, value: bytes, **options: Any) -> int:
        began = time.perf_counter()
        revision = await self._store.put(key, value, **options)
        self._taken.append((time.monotonic(), time.perf_counter() - began))
        return revision

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class TimedBus:
    def __init__(self, bus: Bus, taken: list[tuple[float, float]]) -> None:
        self._bus = bus
        self._taken = taken

    async def key_value(self, bucket: str) -> TimedBucket:
        return TimedBucket(await self._bus.key_value(bucket), self._taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


@dataclass(slots=True)
class Idle:
    """All simulated workers, in this process."""

    heartbeats: list[tuple[float, float]] = field(
        default_factory=list
    )  # when each was stored (monotonic), seconds taken
    taken: dict[str, float] = field(default_factory=dict)  # when a worker had a task, by its pack

    async def run(self, bus: Bus, number: int) -> None:
        inboxes = {
            split: await bus.inbox(streams.tasks_consumer(_RUN, split), TaskIssued) for split in ("eval", "train")
        }
        weights = streams.stream_name(_RUN, "weights")
        await bus.tail(weights, subjects.weights_published(_RUN), WeightsPublished, lambda _: None)
        await bus.tail(weights, subjects.weights_applied(_RUN), WeightsApplied, lambda _: None)
        engine: Any = Engine()
        engine.ready.set()
        source = TaskSource(inboxes, engine, asyncio.Event(), period_s=lambda: writer.period_s)  # type: ignore[arg-type]
        metrics = WorkerMetrics()
        timed: Any = TimedBus(bus, self.heartbeats)
        writer = HeartbeatWriter(
            bus=timed, engine=engine, activity=Activity(),
            figures=lambda: {**metrics.snapshot(), "packs_held": float(source.num_held)},
            needs_version=lambda: None, run_id=_RUN, worker_id=f"w{number}" if number >= 0 else f"o{-number}",
        )  # fmt: skip
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(writer.run())
            tasks.create_task(self._take(source))

    async def _take(self, source: TaskSource) -> None:
        while (received := await source.take()) is not None:
            self.taken[received.pack_id] = time.monotonic()
            await received.delivery.ack()


async def measure(stack: LocalStack, workers: int, settle_s: float, seconds: float, *, scratch: Path | None) -> Row:
    """Measure one number of workers; ``scratch`` is where the disk is kept busy."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as open_buses:
        nats = stack.nats
        observer = open_buses.enter_context(_observer(nats, _OBSERVED))
        num_buses = max(1, (workers - _OBSERVED) // _PER_CONNECTION)
        buses = [open_buses.enter_context(Bus.connect(nats, name=f"w{n}")) for n in range(num_buses)]
        idle = Idle()
        tasks: list[asyncio.Task[None]] = []
        for number in range(workers - _OBSERVED):
            tasks.append(loop.create_task(idle.run(buses[number % num_buses], number)))
            if number % _WAVE == _WAVE - 1:
                await _quiet(tasks, _WAVE_S)
        await _quiet(tasks, settle_s)
        busy = contextlib.ExitStack()
        try:
            if scratch is not None:
                busy.enter_context(_busy_disk(scratch))
                await _quiet(tasks, 3.0)
            nats_pid = stack.pids[0]
            cpu, began = process_cpu_seconds(nats_pid), time.monotonic()
            issued = await _issue_tasks(buses[0], f"p{workers}.{scratch is not None}", seconds, tasks)
            wall = time.monotonic() - began
            cores = (process_cpu_seconds(nats_pid) - cpu) / wall
            ended = time.monotonic()
            await _quiet(tasks, _LAST_TASK_S)
        finally:
            busy.close()
        entries = await (await buses[0].key_value(streams.live_bucket(_RUN).bucket)).entries()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        observer.send("end")
        if not observer.poll(_OBSERVER_S):
            raise SystemExit(f"the observed workers did not answer within {_OBSERVER_S:.0f} s")
        observed, taken = observer.recv()
    idle.taken |= taken
    apart, together = (_between(found, began, ended) for found in (observed, idle.heartbeats))
    missing = [pack for pack in issued if pack not in idle.taken]
    if missing:
        raise SystemExit(f"{len(missing)} tasks were not taken, first {missing[0]}")
    delays = sorted(idle.taken[pack] - at for pack, at in issued.items())
    return Row(
        workers, scratch is not None, (len(apart) + len(together)) / wall, _three(apart), _three(together),
        (1e3 * _at(delays, 0.5), 1e3 * delays[-1]), cores, _resident_mb(nats_pid), _longest_period(entries),
    )  # fmt: skip


async def _issue_tasks(bus: Bus, name: str, seconds: float, workers: Sequence[asyncio.Task[None]]) -> dict[str, float]:
    """Issue one task a second; return when each was issued, by pack."""
    issued: dict[str, float] = {}
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        pack = f"{name}.{len(issued)}"
        issued[pack] = time.monotonic()
        fact = make_task_issued(_RUN, pack, [make_task(f"e0.{pack}.a0")])
        await bus.publish(subjects.tasks(_RUN, "train"), fact, msg_id=pack)
        await _quiet(workers, 1.0)
    return issued


async def _quiet(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Wait; raises what a worker raised."""
    for task in (await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION))[0]:
        task.result()


@contextlib.contextmanager
def _busy_disk(folder: Path) -> Iterator[None]:
    writers = [subprocess.Popen([sys.executable, "-c", _BUSY, str(folder / f"busy-{n}")]) for n in range(4)]
    try:
        yield
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()


@contextlib.contextmanager
def _observer(nats: NatsSettings, workers: int) -> Iterator[Connection]:
    """Run workers in a process of their own; sent anything, it answers with their heartbeats and the packs they took."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_observe, args=(nats, workers, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(_OBSERVER_S):
            raise SystemExit(f"the observed workers did not start within {_OBSERVER_S:.0f} s")
        ours.recv()
        yield ours
    finally:
        process.kill()
        process.join()


def _observe(nats: NatsSettings, workers: int, parent: Connection) -> None:
    logs.configure("idle", level="error")
    asyncio.run(_be_observed(nats, workers, parent))


async def _be_observed(nats: NatsSettings, workers: int, parent: Connection) -> None:
    idle, loop = Idle(), asyncio.get_running_loop()
    with contextlib.ExitStack() as open_buses:
        buses = [open_buses.enter_context(Bus.connect(nats, name=f"o{n}")) for n in range(workers)]
        tasks = [loop.create_task(idle.run(bus, -1 - number)) for number, bus in enumerate(buses)]
        parent.send("started")
        answer = loop.run_in_executor(None, parent.recv)
        await asyncio.wait([*tasks, answer], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise next(error for task in tasks if task.done() and (error := task.exception()))
        parent.send((idle.heartbeats, idle.taken))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _between(found: Sequence[tuple[float, float]], began: float, ended: float) -> list[float]:
    """Return the seconds of the heartbeats that were stored in an interval, in order of their length."""
    return sorted(seconds for at, seconds in found if began <= at <= ended)


def _three(ordered: Sequence[float]) -> tuple[float, float, float]:
    return 1e3 * _at(ordered, 0.5), 1e3 * _at(ordered, 0.99), 1e3 * ordered[-1]


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _longest_period(entries: Sequence[Any]) -> float:
    return max((decode(entry.value, Heartbeat).period_s or 1.0 for entry in entries), default=0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1000])
    parser.add_argument("--settle-s", type=float, default=75.0, help="until the periods and the pauses have adapted")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args()
    logs.configure("idle", level="error")
    print(f"machine: {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}\n")
    print(
        "| workers | disk | heartbeats/s | period s | heartbeat ms: p50, p99, max | in one process | task ms: p50, max "
        "| nats-server cores | MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for workers in options.workers:
        for is_busy in (False, True):
            with tempfile.TemporaryDirectory() as name, LocalStack(Path(name)) as stack:
                with Bus.connect(stack.nats, name="bench") as bus:
                    bootstrap(bus, Blobs(stack.s3), _RUN)
                scratch = Path(name) if is_busy else None
                row = asyncio.run(measure(stack, workers, options.settle_s, options.seconds, scratch=scratch))
            rows.append(row)
            beat, together = (", ".join(f"{x:.1f}" for x in ms) for ms in (row.heartbeat_ms, row.simulated_ms))
            task = ", ".join(f"{x:.0f}" for x in row.task_ms)
            print(
                f"| {row.workers} | {'busy' if is_busy else 'quiet'} | {row.heartbeats_per_s:.0f} | {row.period_s:.1f} "
                f"| {beat} | {together} | {task} | {row.nats_cores:.3f} | {row.nats_mb:.0f} |", flush=True
            )  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    missed = [r for r in rows if r.heartbeat_ms[1] > HEARTBEAT_P99_MS or r.nats_cores > NATS_CORES]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
