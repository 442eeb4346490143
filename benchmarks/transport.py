"""Measure the cost of a message and of an object: microseconds of wall and CPU time, in this process and in the servers.

python -m benchmarks.transport [--calls 500] [--kilobytes 100]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.groups import make_task, make_task_issued

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.local import LocalStack
from penstock.protocol import streams, subjects
from penstock.protocol.facts import Heartbeat, TaskIssued, encode
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def cpu_of(pid: int) -> float:
    """Return the user and system seconds of another process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def measure(name: str, calls: int, pids: list[int], action: Callable[[], object], units: int = 1) -> None:
    """Print the cost of one call of ``action``, which does ``units`` operations."""
    action()
    wall, cpu, other = time.perf_counter(), time.process_time(), [cpu_of(p) for p in pids]
    for _ in range(calls):
        action()
    per = 1e6 / (calls * units)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    servers = sum(cpu_of(p) for p in pids) - sum(other)
    print(f"{name:34} wall {wall * per:8.0f} us   cpu here {cpu * per:7.0f} us   cpu server {servers * per:7.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--kilobytes", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, LocalStack(Path(folder)) as stack:
        blobs = Blobs(stack.s3)
        with Bus.connect(stack.nats, name="bench") as bus:
            bootstrap(bus, blobs, "bench")
            nats_pid, s3_pid = stack.pids
            measure_bus(bus, options.calls, [nats_pid])
        measure_blobs(blobs, options.calls, os.urandom(options.kilobytes * 1024), [s3_pid])


def measure_bus(bus: Bus, calls: int, pids: list[int]) -> None:
    numbers = iter(range(10**9))
    fact = make_task_issued("bench", "p", [make_task(f"e0.p{i}.a0", prompt_ids=range(30)) for i in range(12)])
    print(f"message of 12 tasks: {len(encode(fact))} bytes")

    def publish() -> None:
        bus.publish(subjects.tasks("bench", "train"), fact, msg_id=str(next(numbers))).wait()

    inbox = bus.inbox(streams.tasks_consumer("bench", "train"), TaskIssued).wait()

    def fetch_and_ack() -> None:
        (delivery,) = inbox.fetch(1, 5.0).wait()
        delivery.ack().wait()

    def fetch_many() -> None:
        found = inbox.fetch(10, 5.0).wait()
        assert len(found) == 10
        for ack in [delivery.ack() for delivery in found]:
            ack.wait()

    measure("encode", calls, pids, lambda: encode(fact))
    measure("publish", 11 * calls + 10, pids, publish)
    measure("fetch 1 and ack", calls, pids, fetch_and_ack)
    measure("fetch 10 and ack, each", calls, pids, fetch_many, 10)
    measure("fetch of nothing, 10 ms", 100, pids, lambda: inbox.fetch(1, 0.01).wait() if not inbox.num_held else None)
    store = bus.key_value(streams.live_bucket("bench").bucket).wait()
    beat = encode(Heartbeat(role="rollout", service_id="w0", at=0.0, state="generating", figures={"tokens": 1.0}))
    measure("heartbeat: write a key", calls, pids, lambda: store.put("rollout.w0", beat).wait())
    for n in range(5):
        store.put(f"rollout.w{n}", beat).wait()
    measure("read all 5 keys", calls, pids, lambda: store.entries().wait())
    measure("state of a consumer", calls, pids, lambda: bus.consumer_state(inbox.spec).wait())


def measure_blobs(blobs: Blobs, calls: int, data: bytes, pids: list[int]) -> None:
    numbers = iter(range(10**9))
    print(f"object of {len(data) // 1024} KiB")
    ref = blobs.put("runs/bench/x", data)
    measure("put", calls, pids, lambda: blobs.put(f"runs/bench/{next(numbers)}", data))
    measure("get and verify", calls, pids, lambda: blobs.get(ref))
    measure("list 500", 20, pids, lambda: list(blobs.list("runs/bench/")))


if __name__ == "__main__":
    main()
