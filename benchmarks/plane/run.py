"""Measure the durable path from a worker's put through the reward service to the trainer's acknowledgement, and Ray and Redis.

    python -m benchmarks.plane [--seconds 6] [--repeats 3] [--peers PYTHON | --tls]

Processes that run the services' own code, real nats-server (every message on disk before it is acknowledged) and a
real S3 server: a worker's `PackAnnouncer`, the reward service itself with a reward of negligible cost, and the
trainer's `Collector`, which acknowledges after each fsynced commit of a step's ids. *Direct* leaves the reward
service out. Groups are of 8 trajectories of 4096 tokens, and tiny ones of 8 x 24. The peers do the same job
(`peers.py`), case by case in the same minute.

CPU is in milliseconds per group: every process, both servers. *Other* is all of it without the codec
(Parquet written once by the worker, read once by the trainer, its texts once more by the scorer), which is
measured alone in the same run.
``--tls``: each case once more with TLS on NATS and S3, in turn, and the ratio of the CPU.
``--peers``: a Python that has ray, redis, pyarrow and numpy; `redis-server` must be on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.plane.groups import CASES, GROUPS_PER_STEP, Case, codec_ms
from benchmarks.plane.worker import RUN_ID
from tests.reward_service.processes import Service

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.local import LocalStack
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.rollout_service.engines.engine_process import process_cpu_seconds

ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
_ROLE_S = 300.0
_PEERS_S = 600.0


class Role:
    """A process of the benchmark that prints "ready", waits for a line, and ends with its measurements."""

    def __init__(self, module: str, given: Mapping[str, Any]) -> None:
        """Start it and wait until it is ready."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(given)],
            stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT, env=_ENVIRONMENT,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit(f"{module} did not start")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """Kill it at any point of its work; idempotent."""
        self._process.kill()
        self._process.wait()

    def answer(self) -> dict[str, float]:
        """Start its work, if it waits for that, and return its measurements."""
        output, _ = self._process.communicate("\n", timeout=_ROLE_S)
        if self._process.returncode:
            raise SystemExit(f"a process of the benchmark exited with code {self._process.returncode}")
        return json.loads(output.strip().splitlines()[-1])


def measure(case: Case, seconds: float, *, tls: bool = False) -> dict[str, Any]:
    """Run one case and return groups per second and CPU milliseconds per group, by process."""
    num_groups = case.num_groups(seconds)
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        stack = running.enter_context(LocalStack(folder, tls=tls))
        with Bus.connect(stack.nats, name="bench") as bus:
            bootstrap(bus, Blobs(stack.s3), RUN_ID)
        servers = dict(zip(("nats-server", "s3 server"), stack.pids, strict=True))
        if case.hop:
            reward = Service(RUN_ID, stack.nats, stack.s3, folder)
            running.callback(reward.kill)
            servers["reward service"] = reward.ready().pid
        given = {
            "nats": stack.nats.model_dump(mode="json") | {"password": stack.nats.secret(), "password_file": None},
            "s3": stack.s3.model_dump(mode="json") | {"secret_key": stack.s3.secret(), "secret_key_file": None},
            "folder": str(folder),
            "case": asdict(case),
        }
        trainer = Role("benchmarks.plane.trainer", given | {"count": num_groups})
        running.callback(trainer.kill)
        worker = Role("benchmarks.plane.worker", given | {"count": num_groups // case.groups_per_pack})
        running.callback(worker.kill)
        before = {role: process_cpu_seconds(pid) for role, pid in servers.items()}
        made, taken = worker.answer(), trainer.answer()
        cpu = {role: process_cpu_seconds(pid) - before[role] for role, pid in servers.items()}
    cpu |= {"worker": made["cpu_s"], "trainer": taken["cpu_s"]}
    split = {role: 1000 * used / num_groups for role, used in cpu.items()}
    return {
        "system": "Penstock, TLS" if tls else "Penstock",
        "case": case.name,
        "groups_per_s": num_groups / (taken["ended"] - made["started"]),
        "cpu_ms": sum(split.values()),
        "codec_ms": codec_ms(case),
        "note": ", ".join(f"{role} {ms:.2f}" for role, ms in split.items())
        + f"; commit {1000 * taken['commit_s'] * GROUPS_PER_STEP / num_groups:.1f} ms per step",
    }


def show(result: Mapping[str, Any]) -> None:
    """Print one result as a line of the table, and its CPU time by process."""
    print(
        f"{result['system'] + ': ' + result['case']:44} {result['groups_per_s']:6.0f} groups/s  "
        f"CPU {result['cpu_ms']:5.2f} ms per group, codec {result['codec_ms']:.2f}, "
        f"other {result['cpu_ms'] - result['codec_ms']:5.2f}  load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    if result.get("note"):
        print(f"{'':10}{result['note']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="approximate duration of each case")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="numbers of cases, from 0")
    parser.add_argument("--tls", action="store_true", help="measure each case with TLS too")
    parser.add_argument("--peers", type=Path, help="a Python with ray, redis, pyarrow, numpy, pydantic and structlog")
    options = parser.parse_args()
    for repeat in range(options.repeats):
        print(f"run {repeat + 1}")
        for number in options.cases:
            plain = measure(CASES[number], options.seconds)
            show(plain)
            if options.tls:
                encrypted = measure(CASES[number], options.seconds, tls=True)
                show(encrypted)
                print(f"{'':10}TLS: {encrypted['cpu_ms'] / plain['cpu_ms']:.3f} times the CPU", flush=True)
            if options.peers:
                command = [str(options.peers), "-m", "benchmarks.plane.peers", str(number), str(options.seconds)]
                done = subprocess.run(
                    command, cwd=ROOT, check=False, env=_ENVIRONMENT, capture_output=True, text=True, timeout=_PEERS_S
                )
                for line in done.stdout.splitlines():
                    if line.startswith("{"):
                        show(json.loads(line))
                if done.returncode:
                    print(
                        f"a peer exited with code {done.returncode}: {done.stderr.strip().splitlines()[-1:]}",
                        flush=True,
                    )
