"""The peers of the plane benchmark: the same groups, in the same Parquet, through Ray's queue and a Redis stream.

Run by `benchmarks.plane --peers PYTHON`. One producer and one consumer, processes of their own, eight groups in flight;
no reward service in between, which the plane has. Redis: `appendfsync always`, the group in the stream itself,
acknowledged and deleted after the consumer's fsynced commit of 48 ids. Ray: `ray.put`, the reference through
`ray.util.queue.Queue(8)`, `ray.get`; nothing of it is durable.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.plane_groups import make_template
from protocol import group_pack
from protocol.trajectory import Group

IN_FLIGHT = 8
GROUPS_PER_STEP = 48
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def templates(size: str) -> list[Group]:
    return [make_template(size, seed) for seed in range(8)]


def commit(folder: Path, step: int, ids: Sequence[int]) -> None:
    with (folder / f"step{step:08d}").open("w") as file:
        json.dump(list(ids), file)
        file.flush()
        os.fsync(file.fileno())


def cpu_seconds_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


# ── Redis ─────────────────────────────────────────────────────────────────────────────────────────


def redis_producer(port: int, size: str, count: int, answer: Any) -> None:
    import redis

    client = redis.Redis(port=port)
    groups = templates(size)
    started, cpu = time.time(), time.process_time()

    def add(number: int) -> None:
        client.xadd("groups", {"id": number, "pack": group_pack.encode([groups[number % 8]])})

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(add, range(count)))
    answer.put({"started": started, "cpu_s": time.process_time() - cpu})


def redis_consumer(port: int, folder: str, count: int, answer: Any) -> None:
    import redis

    client = redis.Redis(port=port)
    client.xgroup_create("groups", "trainer", id="0", mkstream=True)
    answer.put("ready")
    cpu, seen, held = time.process_time(), 0, []
    while seen < count:
        for _, entries in client.xreadgroup("trainer", "t0", {"groups": ">"}, count=IN_FLIGHT, block=5000) or []:
            for entry_id, fields in entries:
                group_pack.decode(fields[b"pack"])
                held.append(entry_id)
                seen += 1
        if len(held) >= GROUPS_PER_STEP or seen == count:
            commit(Path(folder), seen, range(len(held)))
            client.xack("groups", "trainer", *held)
            client.xdel("groups", *held)
            held = []
    answer.put({"ended": time.time(), "cpu_s": time.process_time() - cpu})


def measure_redis(size: str, count: int) -> dict[str, float]:
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not on the path")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--port", str(port), "--dir", folder, "--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        server = subprocess.Popen([program, *flags, "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL)
        try:
            _wait_for_port(port)
            before = cpu_seconds_of(server.pid)
            made, taken = _both(
                (redis_producer, (port, size, count)),
                (redis_consumer, (port, folder, count)),
            )
            brokers = cpu_seconds_of(server.pid) - before
        finally:
            server.kill()
            server.wait()
    return _result(made, taken, brokers, count)


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _both(producer: tuple[Any, tuple[Any, ...]], consumer: tuple[Any, tuple[Any, ...]]) -> tuple[Any, Any]:
    context = multiprocessing.get_context("spawn")
    made, taken = context.Queue(), context.Queue()
    reader = context.Process(target=consumer[0], args=(*consumer[1], taken))
    reader.start()
    assert taken.get(timeout=60) == "ready"
    writer = context.Process(target=producer[0], args=(*producer[1], made))
    writer.start()
    answers = made.get(timeout=300), taken.get(timeout=300)
    writer.join()
    reader.join()
    return answers


# ── Ray ───────────────────────────────────────────────────────────────────────────────────────────


def measure_ray(size: str, count: int) -> dict[str, float]:
    import ray
    from ray.util.queue import Queue

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=600 * 2**20, _node_ip_address="127.0.0.1",
        log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    queue = Queue(IN_FLIGHT)

    @ray.remote
    def produce(number: int) -> dict[str, float]:
        groups = templates(size)
        started = time.time()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(lambda n: queue.put([ray.put(group_pack.encode([groups[n % 8]]))]), range(number)))
        return {"started": started}

    @ray.remote
    def consume(number: int) -> dict[str, float]:
        for _ in range(number):
            (reference,) = queue.get(timeout=60)
            group_pack.decode(ray.get(reference))
        return {"ended": time.time()}

    def both(number: int) -> tuple[dict[str, float], dict[str, float]]:
        taken, made = consume.options(num_cpus=0.5).remote(number), produce.options(num_cpus=0.5).remote(number)
        return ray.get(made), ray.get(taken)

    both(IN_FLIGHT)  # its processes start, and import what they need
    before = {pid: cpu_seconds_of(pid) for pid in _ray_pids()}
    made, taken = both(count)
    used = sum(cpu_seconds_of(pid) - before.get(pid, 0.0) for pid in _ray_pids())
    ray.shutdown()
    return _result({**made, "cpu_s": 0.0}, {**taken, "cpu_s": 0.0}, used, count)


def _ray_pids() -> list[int]:
    """Every process of Ray: what this process started, directly or not."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, open_ends = [], [os.getpid()]
    while open_ends:
        found += (below := children.get(open_ends.pop(), []))
        open_ends += below
    return [*found, os.getpid()]


def _result(made: dict[str, float], taken: dict[str, float], brokers: float, count: int) -> dict[str, float]:
    return {
        "groups_per_s": count / (taken["ended"] - made["started"]),
        "cpu_ms": 1000 * (made["cpu_s"] + taken["cpu_s"] + brokers) / count,
    }


def codec_ms(size: str) -> float:
    (group, *_) = templates(size)
    group_pack.decode(group_pack.encode([group]))
    started = time.process_time()
    for _ in range(60):
        group_pack.decode(group_pack.encode([group]))
    return 1000 * (time.process_time() - started) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    for size in ("long", "tiny"):
        count = GROUPS_PER_STEP * max(2, int(options.seconds * (150 if size == "long" else 300) / GROUPS_PER_STEP))
        codec = codec_ms(size)
        for name, measure in (("Redis stream, fsync always", measure_redis), ("Ray queue, references", measure_ray)):
            result = measure(size, count)
            print(
                f"{name + ', ' + size:34} {result['groups_per_s']:7.0f} groups/s  CPU {result['cpu_ms']:6.2f} ms a group, "
                f"codec {codec:.2f}, plumbing {result['cpu_ms'] - codec:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
