"""The whole plane, durable: a worker's put → reward service → the trainer's acknowledgement, beside Ray and Redis.

    python -m benchmarks.plane [--seconds 8] [--peers PYTHON]

Three processes that run the services' own code, real nats-server (every message on disk before it is
acknowledged) and a real S3 server: a worker's `PackAnnouncer`, the reward service itself with a reward that
costs nothing, and the trainer's `Collector`, which acknowledges after each fsynced commit of a step's ids.
Groups are of 8 trajectories of 4096 tokens, and tiny ones of 8 x 24.

CPU is in milliseconds for a group: every process, both servers. *Plumbing* is all of it without the codec
(Parquet written once by the worker, read once by the trainer, its texts once more by the reward service), which is
measured alone in the same run.
``--peers``: a Python that has ray, redis, pyarrow and numpy; `redis-server` must be on the path.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.plane_groups import make_template
from deploy.bootstrap import bootstrap
from deploy.local import LocalStack
from protocol import group_pack
from protocol.activity import Activity
from protocol.connection import NatsSettings, S3Settings
from protocol.trajectory import Group
from protocol.transport.blobs import Blobs
from protocol.transport.bus import Bus
from protocol.versions import PolicyVersion
from rollout_service.announce_pack import PackAnnouncer
from rollout_service.engine_process import process_cpu_seconds
from rollout_service.figures import Figures
from tests.reward_service.processes import Service
from trainer.batcher import Batcher, Drop
from trainer.collect import Collector
from trainer.doors import Doors
from trainer.ledger import Ledger

ROOT = Path(__file__).resolve().parents[1]
GROUPS_PER_STEP = 48
IN_FLIGHT = 8  # packs that a worker stores and announces at a time
_NEVER_STALE = 10**9


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    name: str
    size: str  # of a group, one of SIZES
    groups_per_pack: int


CASES = (
    Case("8 x 4096 tokens, 1 group a pack", "long", 1),
    Case("8 x 4096 tokens, 4 groups a pack", "long", 4),
    Case("8 x 24 tokens, 12 groups a pack", "tiny", 12),
)


# ── the worker ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Given:
    """A delivery that nobody settles: the benchmark begins at the put."""

    traceparent: str = ""
    num_delivered: int = 1


@dataclass(frozen=True, slots=True)
class _Order:
    pack_id: str
    split: str = "train"
    delivery: _Given = _Given()


def produce(run_id: str, nats: NatsSettings, s3: S3Settings, case: Case, num_packs: int) -> dict[str, float]:
    """Announce packs as a worker does, several at a time."""
    templates = [make_template(case.size, seed) for seed in range(8)]
    with Bus.connect(nats, name="bench-worker") as bus:
        announcer = PackAnnouncer(
            bus=bus, blobs=Blobs(s3), activity=Activity(), figures=Figures(), run_id=run_id, worker_id="w0"
        )
        started, cpu = time.time(), time.process_time()
        asyncio.run(_announce_all(announcer, case, num_packs, templates))
        return {"started": started, "cpu_s": time.process_time() - cpu}


async def _announce_all(announcer: PackAnnouncer, case: Case, num_packs: int, templates: Sequence[Group]) -> None:
    numbers = iter(range(num_packs))

    async def announce_some() -> None:
        for number in numbers:
            first = number * case.groups_per_pack
            groups = [
                replace(templates[n % len(templates)], group_id=f"e0.p{n}.a0")
                for n in range(first, first + case.groups_per_pack)
            ]
            await announcer.announce(_Order(f"pack-{number}"), groups)  # type: ignore[arg-type]

    await asyncio.gather(*(announce_some() for _ in range(IN_FLIGHT)))


# ── the trainer ───────────────────────────────────────────────────────────────────────────────────


class _EveryGroup:
    """Stands where the issuer does: everything that comes was asked for."""

    def outstanding(self) -> Collection[str]:
        return ()

    def expects(self, group_id: str, holds: Callable[[str], bool]) -> bool:
        return not holds(group_id)

    def in_last_chance(self, version: PolicyVersion) -> Collection[str]:
        return ()

    def dropped(self, drop: Drop) -> None:
        raise AssertionError(drop)

    refused = dropped


def consume(run_id: str, nats: NatsSettings, s3: S3Settings, folder: Path, num_groups: int) -> dict[str, float]:
    """Take batches as the trainer does, commit their ids, acknowledge."""
    ledger = Ledger()
    batcher = Batcher(groups_per_step=GROUPS_PER_STEP, max_staleness=_NEVER_STALE, ledger=ledger)
    seen: set[str] = set()
    commit_s = 0.0
    with Bus.connect(nats, name="bench-trainer") as bus:
        doors = Doors(run_id, bus, Blobs(s3))
        collector = Collector(doors, batcher=batcher, issued=_EveryGroup(), deadline_s=60.0, max_dead=1)
        (folder / "ready").touch()
        cpu = time.process_time()
        with collector:
            for step in range(num_groups // GROUPS_PER_STEP):
                batch = collector.collect(PolicyVersion(0))
                ids = [group.group_id for group in batch]
                assert not seen & set(ids), "trained twice"
                seen.update(ids)
                ledger.record(PolicyVersion(0), ids, max_staleness=_NEVER_STALE)
                collector.trained(ids)
                settled = collector.settled()
                commit_s -= time.monotonic()
                _commit(folder / f"step{step:08d}", sorted(seen))
                commit_s += time.monotonic()
                collector.acknowledge(settled)
            cpu = time.process_time() - cpu
            ended = time.time()
    assert len(seen) == num_groups, f"{len(seen)} of {num_groups} groups arrived"
    return {"ended": ended, "cpu_s": cpu, "commit_s": commit_s}


def _commit(path: Path, ids: Sequence[str]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump(ids, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


# ── the measurement ───────────────────────────────────────────────────────────────────────────────


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Run one case and return groups per second and CPU milliseconds a group, by process."""
    num_steps = max(2, int(seconds * (150 if case.size == "long" else 1200) / GROUPS_PER_STEP))
    num_groups = num_steps * GROUPS_PER_STEP
    with tempfile.TemporaryDirectory() as name, LocalStack(Path(name)) as stack:
        folder = Path(name)
        with Bus.connect(stack.nats, name="bench") as bus:
            bootstrap(bus, Blobs(stack.s3), "bench")
        reward = Service("bench", stack.nats, stack.s3, folder).ready()
        try:
            servers = dict(zip(("nats-server", "s3 server"), stack.pids, strict=True)) | {"reward service": reward.pid}
            consumer = _role("consume", stack, folder, case, num_groups)
            _wait_for_file(folder / "ready", consumer)
            before = {role: process_cpu_seconds(pid) for role, pid in servers.items()}
            producer = _role("produce", stack, folder, case, num_groups // case.groups_per_pack)
            made, taken = _answer(producer), _answer(consumer)
            cpu = {role: process_cpu_seconds(pid) - before[role] for role, pid in servers.items()}
        finally:
            reward.kill()
    cpu |= {"worker": made["cpu_s"], "trainer": taken["cpu_s"]}
    codec = codec_ms(case)
    split = {role: 1000 * used / num_groups for role, used in cpu.items()}
    return {
        "case": case.name,
        "groups": num_groups,
        "groups_per_s": num_groups / (taken["ended"] - made["started"]),
        "cpu_ms": split,
        "codec_ms": codec,
        "plumbing_ms": sum(split.values()) - codec,
        "commit_ms_a_step": 1000 * taken["commit_s"] / num_steps,
    }


def codec_ms(case: Case) -> float:
    """Return the CPU milliseconds of writing and reading one group's Parquet, and of reading its texts, alone."""
    groups = [replace(make_template(case.size, n), group_id=f"e0.p{n}.a0") for n in range(case.groups_per_pack)]
    repeats = 60
    group_pack.decode(group_pack.encode(groups))
    started = time.process_time()
    for _ in range(repeats):
        data = group_pack.encode(groups)
        group_pack.decode_texts(data, range(len(groups)))
        group_pack.decode(data)
    return 1000 * (time.process_time() - started) / (repeats * len(groups))


def _role(role: str, stack: LocalStack, folder: Path, case: Case, count: int) -> subprocess.Popen[str]:
    given = {
        "nats": stack.nats.model_dump(mode="json") | {"password": stack.nats.secret()},
        "s3": stack.s3.model_dump(mode="json") | {"secret_key": stack.s3.secret()},
    }
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.plane", "--role", role, str(folder), str(CASES.index(case)), str(count)],
        stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PLANE_SERVERS": json.dumps(given)},
    )  # fmt: skip


def _answer(process: subprocess.Popen[str]) -> dict[str, float]:
    output, _ = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(f"a role of the benchmark ended with {process.returncode}")
    return json.loads(output.strip().splitlines()[-1])


def _wait_for_file(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the consumer did not start")
        time.sleep(0.05)


def play(role: str, folder: Path, case: Case, count: int) -> dict[str, float]:
    """Be the worker or the trainer of a measurement."""
    given = json.loads(os.environ["PLANE_SERVERS"])
    nats, s3 = NatsSettings(**given["nats"]), S3Settings(**given["s3"])
    if role == "produce":
        return produce("bench", nats, s3, case, count)
    return consume("bench", nats, s3, folder, count)


def show(result: dict[str, Any]) -> None:
    """Print one result as a line of the table, and where the CPU went."""
    split = ", ".join(f"{role} {ms:.2f}" for role, ms in result["cpu_ms"].items())
    print(
        f"{result['case']:34} {result['groups_per_s']:7.0f} groups/s  CPU {sum(result['cpu_ms'].values()):6.2f} ms a group, "
        f"codec {result['codec_ms']:.2f}, plumbing {result['plumbing_ms']:.2f}\n{'':34} {split}; "
        f"commit {result['commit_ms_a_step']:.1f} ms a step",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="roughly, for each case")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="a Python with ray, redis, pyarrow, numpy, pydantic and structlog")
    parser.add_argument("--role", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, folder, number, count = options.role
        print(json.dumps(play(role, Path(folder), CASES[int(number)], int(count))))
        return
    for repeat in range(options.repeats):
        print(f"run {repeat + 1}, load {os.getloadavg()[0]:.1f}")
        for case in CASES:
            show(measure(case, options.seconds))
        if options.peers:
            command = [str(options.peers), "-m", "benchmarks.peer_plane", "--seconds", str(options.seconds)]
            subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
