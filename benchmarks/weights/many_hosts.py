"""What leaves the object store with many hosts, with and without peers: real processes on this machine, and a simulation of large ones.

    python -m benchmarks.weights.many_hosts --hosts 30 --mb 16 --versions 3 --kill 5
    python -m benchmarks.weights.many_hosts --simulate

The first starts NATS, an object store and one process for each host, with a mirror and a shared memory of its own. All fetch each version at
once; in the last one some are killed in the middle, without peers and with them. Prints for each version seconds until the last host has it, bytes
by store in sizes of the version, and misses by reason. The roots that mirrors compute prove the contents.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import multiprocessing
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from benchmarks.rig import machine
from tests.servers import start_nats, start_s3
from tests.weights_source import WeightsSource

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.layout import BUCKET_BYTES
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.protocol.weights.version_reader import PARALLEL_BUCKETS
from penstock.rollout_service.weights.mirror import Mirror
from penstock.rollout_service.weights.peers import FAN_OUT, ROOTS, UPLOADS, Peers, in_order

STORE_BYTES_PER_S = 5e9  # an object store behind 40 Gbit/s, to all hosts together
STREAM_BYTES_PER_S = 0.3e9  # of one transfer: Python's HTTP with SHA-256 on one core; `--hosts 2` shows this machine's
PATCH_SHARE = 0.0117  # of the size, of 0.91 % changed values: gaps and values, zstd 1
FORK = multiprocessing.get_context("fork")
SIZES = {"7B": 15.2e9, "70B": 141e9}  # bytes in bfloat16


def simulate(num_hosts: int, num_bytes: float, segment_bytes: float, *, with_peers: bool) -> tuple[float, float]:
    """Return the seconds until the last host has a version, and the bytes that left the store. Pure.

    Each transfer has one rate, `STREAM_BYTES_PER_S`. The store has as many at once as its rate allows, a host receives `PARALLEL_BUCKETS` and
    sends `UPLOADS`. A host passes on what it has whole. Which host asks which is decided as in `peers`; nothing fails.
    """
    hosts = [f"{number:016}" for number in range(num_hosts)]
    store = [0.0] * max(1, int(STORE_BYTES_PER_S / STREAM_BYTES_PER_S))  # when each of its transfers ends
    receiving, sending = ({host: [0.0] * lanes for host in hosts} for lanes in (PARALLEL_BUCKETS, UPLOADS))
    last = from_store = 0.0
    num_segments = max(1, round(num_bytes / segment_bytes))
    size = num_bytes / num_segments
    for segment in range(num_segments):
        order, ready = in_order(f"{segment:064}", hosts), list[float]()
        for place, host in enumerate(order):
            is_root = not with_peers or place < ROOTS
            source = store if is_root else sending[order[(place - ROOTS) // FAN_OUT]]
            here = 0.0 if is_root else ready[(place - ROOTS) // FAN_OUT]
            begins = max(heapq.heappop(receiving[host]), heapq.heappop(source), here)
            ready.append(begins + size / STREAM_BYTES_PER_S)
            for lanes in (receiving[host], source):
                heapq.heappush(lanes, ready[-1])
            from_store += size * is_root
        last = max(last, *ready)
    return last, from_store


def host(pipe: Connection, folder: Path, run_id: str, nats: NatsSettings, s3: S3Settings, with_peers: bool) -> None:
    """Fetch the versions that are asked for, and answer each with this host's figures; an empty question has no version."""
    pipe.recv()
    shared = SharedSegments(run_id, folder)
    shared.join()
    with Bus.connect(nats, name=folder.name) as bus:
        mirror = Mirror(Blobs(s3), folder / "cache", run_id, shared=shared)
        peers = Peers(bus, shared, run_id, 0) if with_peers else None
        while True:
            pipe.send({**shared.figures(), "peers": 0 if peers is None else len(peers._offers)})
            if question := pipe.recv():
                version, manifest = question
                mirror.fetch(PolicyVersion(version), manifest, newest=True)
                mirror.trim([])


class Hosts:
    """Processes, forked before this one has threads."""

    def __init__(self, folder: Path, number: int, run_id: str, *how: Any) -> None:
        self.running: list[tuple[Connection, BaseProcess]] = []
        for place in range(number):
            (own := folder / f"{run_id}-{place}").mkdir()
            pipe, far = FORK.Pipe()
            process = FORK.Process(target=host, args=(far, own, run_id, *how), daemon=True)
            process.start()
            self.running.append((pipe, process))

    def ask(self, question: object, num_killed: int = 0, after_s: float = 0.0) -> list[dict[str, float]]:
        for pipe, _ in self.running:
            pipe.send(question)
        if num_killed:
            time.sleep(after_s)
            for _, process in self.running[:num_killed]:
                process.kill()
            del self.running[:num_killed]
        return [pipe.recv() for pipe, _ in self.running]

    def kill(self) -> None:
        for _, process in self.running:
            process.kill()
            process.join()


def measure(options: argparse.Namespace, folder: Path, nats: NatsSettings, s3: S3Settings, *, with_peers: bool) -> None:
    run_id, random = f"hosts-{int(with_peers)}", torch.Generator().manual_seed(0)
    hosts = Hosts(folder, options.hosts, run_id, nats, s3, with_peers)
    write_model(folder / run_id, seed=0)
    words = options.mb * 2**19 // options.buckets
    tensors = {f"layers.{n}": torch.randn(words, generator=random).bfloat16() for n in range(options.buckets)}
    with Bus.connect(nats, name="hosts") as bus, contextlib.ExitStack() as stack:
        stack.callback(hosts.kill)
        bootstrap(bus, blobs := Blobs(s3), run_id)
        source = WeightsSource(bus, blobs, run_id, folder / run_id, bucket_bytes=2 * words)
        while min(answer["peers"] for answer in hosts.ask(())) < options.hosts * with_peers:
            time.sleep(1.0)
        seconds = 0.0
        for version in range(options.versions):
            for tensor in tensors.values() if version else ():
                hit = torch.rand(tensor.shape, generator=random) < 0.01
                tensor[hit] = torch.randn(int(hit.sum()), generator=random).bfloat16()
            fact = source.publish(version, tensors)
            killed = options.kill if version == options.versions - 1 else 0
            before = sum(map(Counter, hosts.ask(())[killed:]), Counter[str]())
            started = time.monotonic()
            answers = hosts.ask((version, fact.manifest), killed, seconds / 3)
            seconds = time.monotonic() - started
            grown = sum(map(Counter, answers), Counter[str]()) - before
            sizes = {name: round(value / fact.num_bytes, 2) for name, value in grown.items() if "_bytes_" in name}
            misses = {name: value for name, value in grown.items() if "peer_misses" in name}
            print(
                f"| {with_peers} | {version} | {fact.num_bytes} | {killed} | {seconds:.2f} | {sizes} | {misses} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"hosts": 30, "mb": 16, "buckets": 16, "versions": 3, "kill": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--simulate", action="store_true")
    options = parser.parse_args()
    if options.simulate:
        for (name, size), share in ((entry, share) for entry in SIZES.items() for share in (1.0, PATCH_SHARE)):
            for with_peers in (False, True):
                seconds, left = simulate(100, size * share, BUCKET_BYTES * share, with_peers=with_peers)
                print(
                    f"| {name} | {size * share / 1e9:.2f} GB | {with_peers} | {seconds:.1f} s | {left / 1e9:.1f} GB |"
                )
        return
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        nats, s3 = start_nats(Path(name)), start_s3(Path(name))
        try:
            Blobs(s3.settings).ensure_bucket()
            for with_peers in (False, True):
                measure(options, Path(name), nats.settings, s3.settings, with_peers=with_peers)
        finally:
            nats.stop()
            s3.stop()


if __name__ == "__main__":
    main()
