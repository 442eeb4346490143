"""Send thousands of trajectories a second through HTTP endpoints: healthy ones alone, then together with faulty ones.

    python -m benchmarks.reward_load [--seconds 20] [--rate 20]

The faulty ones are slow, hung, flaky, crashing or return invalid scores; each endpoint is a process. Measured: throughput, latency of
the healthy ones, and whether a score was lost, duplicated or invented, by the correct score of each completion (`score_of`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.groups import make_generated, make_group, pack_bytes
from tests.reward_service.processes import ROOT, Service
from tests.servers import wait_for

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.local import LocalStack
from penstock.protocol import streams, subjects
from penstock.protocol.facts import DeadLetter, GroupGenerated, GroupScored
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.rollout_service.engines.engine_process import process_cpu_seconds

SLOW_S = 2.0
HUNG_S = 12.0  # after its start; then it works normally
FAULTY_SHARE = 0.3
_HUGE = b" " * (8 * 1024 * 1024)
GROUPS, SIZE = 12, 8  # of a pack
GOOD = ("good-0", "good-1")
BAD = ("slow", "hung", "flaky", "dying", "lying")
BAD_PACKS_PER_S = 1.0  # to each of them
UP_S, DOWN_S = 3.0, 1.0  # of the crashing endpoint
SETTLE_S = 240.0


def score_of(completion: str) -> float:
    return (zlib.crc32(completion.encode()) % 1000) / 1000


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "results": [
            {"group_id": group["group_id"], "scores": [{"score": score_of(text)} for text in group["completions"]]}
            for group in request["groups"]
        ]
    }


class Endpoint:
    def __init__(self, behaviour: str) -> None:
        self._behave = getattr(self, f"_{behaviour}")
        self._random = random.Random(0)
        self._healthy_at = asyncio.get_running_loop().time() + HUNG_S

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                request = json.loads(await reader.readexactly(length))
                status, body = await self._behave(request)
                if status == 0:
                    break
                writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _good(self, request: dict[str, Any]) -> tuple[int, bytes]:
        return 200, json.dumps(answer_to(request)).encode()

    _dying = _good  # the process that started it kills it

    async def _slow(self, request: dict[str, Any]) -> tuple[int, bytes]:
        await asyncio.sleep(SLOW_S)
        return await self._good(request)

    async def _hung(self, request: dict[str, Any]) -> tuple[int, bytes]:
        if asyncio.get_running_loop().time() < self._healthy_at:
            await asyncio.sleep(3600)
        return await self._good(request)

    async def _flaky(self, request: dict[str, Any]) -> tuple[int, bytes]:
        if self._random.random() < FAULTY_SHARE:
            return self._random.choice([(500, b"out of order"), (503, b"busy"), (0, b"")])
        return await self._good(request)

    async def _lying(self, request: dict[str, Any]) -> tuple[int, bytes]:
        if self._random.random() >= FAULTY_SHARE:
            return await self._good(request)
        answer = answer_to(request)
        fault = self._random.choice(["count", "nan", "groups", "huge", "text"])
        if fault == "huge":
            return 200, _HUGE
        if fault == "text":
            return 200, b"<html>all is well</html>"
        for result in answer["results"]:
            if fault == "count":
                result["scores"].pop()
            elif fault == "nan":
                result["scores"][0]["score"] = float("nan")
            else:
                result["group_id"] += "x"
        return 200, json.dumps(answer).encode()


async def serve_endpoint(behaviour: str, port: int) -> None:
    endpoint = Endpoint(behaviour)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", port, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@dataclass
class Ledger:
    sent_at: dict[str, float] = field(default_factory=dict)
    reward_of: dict[str, str] = field(default_factory=dict)
    texts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    scored_at: dict[str, list[float]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    dead: Counter[str] = field(default_factory=Counter)

    def take(self, fact: GroupScored) -> None:
        now = time.perf_counter()
        for group in fact.groups:
            name = group.generated.group_id
            self.scored_at.setdefault(name, []).append(now)
            expected = tuple(score_of(text) for text in self.texts[name])
            if group.rewards != expected:
                self.wrong.append(name)

    def latencies(self, names: tuple[str, ...]) -> list[float]:
        return sorted(
            self.scored_at[name][0] - at
            for name, at in self.sent_at.items()
            if self.reward_of[name] in names and name in self.scored_at
        )

    def settled(self) -> bool:
        return len(self.scored_at) + sum(self.dead.values()) >= len(self.sent_at)


class Endpoints:
    """The processes of all endpoints; the crashing one is killed and started again on its port until the end."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.ports: dict[str, int] = {}
        self.num_kills = 0
        self._stop = threading.Event()
        self._killer = threading.Thread(target=self._kill_repeatedly, daemon=True)

    def start(self, name: str) -> None:
        if (former := self._processes.get(name)) is not None:
            former.kill(), former.wait()
        behaviour, port = name.partition("-")[0], str(self.ports.get(name, 0))
        command = [sys.executable, "-m", "benchmarks.reward_load", "--endpoint", behaviour, port]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        self.ports[name] = int(process.stdout.readline())
        self._processes[name] = process

    def start_killing(self) -> None:
        self._killer.start()

    def _kill_repeatedly(self) -> None:
        while not self._stop.wait(UP_S):
            self._processes["dying"].kill()
            self.num_kills += 1
            self._stop.wait(DOWN_S)
            self.start("dying")

    def stop_killing(self) -> None:
        self._stop.set()
        if self._killer.is_alive():
            self._killer.join()

    def close(self) -> None:
        self.stop_killing()
        for process in self._processes.values():
            process.kill()
            process.wait()


class Bench:
    def __init__(self, stack: LocalStack, bus: Bus, folder: Path, run_id: str) -> None:
        self.bus, self.run_id = bus, run_id
        self.blobs = Blobs(stack.s3)
        bootstrap(bus, self.blobs, run_id)
        settings = ("retry_delay_s=0.5", "endpoint_attempts=50", f"id={run_id}", "log_level=warning")
        overrides = [f"reward_service.{setting}" for setting in settings]
        self.service = Service(run_id, stack.nats, stack.s3, folder, overrides)
        self.service.ready()
        self.ledger = Ledger()
        self._stop = threading.Event()
        self._inbox = bus.inbox(streams.scored_consumer(run_id, "train"), GroupScored).wait()
        bus.tail(f"{run_id}-dead", subjects.dead(run_id), DeadLetter, self._record_dead, from_start=True).wait()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _record_dead(self, letter: DeadLetter) -> None:
        self.ledger.dead[letter.reason] += len(letter.group_ids)

    def _read(self) -> None:
        while not self._stop.is_set():
            for delivery in self._inbox.fetch(64, 0.2).wait():
                self.ledger.take(delivery.fact)
                delivery.ack().wait()

    def pack(self, reward: str, number: int) -> GroupGenerated:
        texts = [[f"{reward} {number} {i} {n} " + "because " * 40 for n in range(SIZE)] for i in range(GROUPS)]
        groups = [
            make_group(f"{reward}.{number}.{i}", size=SIZE, reward_name=reward, seed=i, texts=group_texts)
            for i, group_texts in enumerate(texts)
        ]
        for group in groups:
            self.ledger.reward_of[group.group_id] = reward
            self.ledger.texts[group.group_id] = tuple(trajectory.completion_text for trajectory in group.trajectories)
        pack_id = f"{reward}.{number}"
        ref = self.blobs.put(f"runs/{self.run_id}/groups/v0/{pack_id}.parquet", pack_bytes(groups))
        return make_generated(self.run_id, groups, ref, pack_id=pack_id)

    def send(self, pack: GroupGenerated) -> None:
        now = time.perf_counter()
        for group in pack.groups:
            self.ledger.sent_at[group.group_id] = now
        self.bus.publish(subjects.generated(self.run_id, "train"), pack, msg_id=pack.pack_id).wait()

    def close(self) -> None:
        self._stop.set()
        self._reader.join()
        self.service.kill()


@contextmanager
def bench(stack: LocalStack, bus: Bus, folder: Path, run_id: str) -> Iterator[Bench]:
    (folder / run_id).mkdir()
    with closing(Bench(stack, bus, folder / run_id, run_id)) as load_bench:
        yield load_bench


def _idle(load_bench: Bench, consumer: streams.ConsumerSpec) -> bool:
    state = load_bench.bus.consumer_state(consumer).wait()
    return state.num_pending == 0 and state.num_ack_pending == 0


def register(load_bench: Bench, endpoints: Endpoints, names: tuple[str, ...]) -> None:
    for name in names:
        url = f"http://127.0.0.1:{endpoints.ports[name]}/score"
        limits = {"timeout_s": 5, "min_score": 0, "max_score": 1}
        answer = load_bench.service.register(name, url, replace=True, version=load_bench.run_id, **limits)
        assert answer.status_code == 201, answer.text


def load(load_bench: Bench, endpoints: Endpoints, *, seconds: float, rate: float, bad: bool) -> None:
    register(load_bench, endpoints, (*GOOD, *BAD) if bad else GOOD)
    schedule = [(number / rate, GOOD[number % len(GOOD)], number) for number in range(int(seconds * rate))]
    if bad:
        schedule += [
            ((number + random.Random(name).random()) / BAD_PACKS_PER_S, name, number)
            for name in BAD
            for number in range(int(seconds * BAD_PACKS_PER_S))
        ]
    packs = [(at, load_bench.pack(name, number)) for at, name, number in sorted(schedule)]
    if bad:
        endpoints.start("hung")  # restarted, so that it hangs from now on
        endpoints.start_killing()
    before, started = process_cpu_seconds(load_bench.service.pid), time.perf_counter()
    for at, pack in packs:
        time.sleep(max(0.0, at - (time.perf_counter() - started)))
        load_bench.send(pack)
    sent_s = time.perf_counter() - started
    if bad:
        endpoints.stop_killing()
    wait_for(load_bench.ledger.settled, "all groups to be settled", SETTLE_S)
    wait_for(lambda: _idle(load_bench, streams.generated_consumer(load_bench.run_id)), "the service to finish", 60)
    report(load_bench, endpoints, sent_s, process_cpu_seconds(load_bench.service.pid) - before, len(packs), bad=bad)


def report(load_bench: Bench, endpoints: Endpoints, sent_s: float, cpu_s: float, num_packs: int, *, bad: bool) -> None:
    ledger = load_bench.ledger
    lost = len(ledger.sent_at) - len(ledger.scored_at) - sum(ledger.dead.values())
    double = sum(len(times) > 1 for times in ledger.scored_at.values())
    print(f"\n{'good endpoints with bad ones' if bad else 'good endpoints alone'}:")
    print(
        f"  offered {num_packs * GROUPS * SIZE / sent_s:,.0f} trajectories/s for {sent_s:.0f} s, "
        f"{1000 * cpu_s / num_packs:.1f} ms of CPU per pack; "
        f"lost {lost}, scored twice {double}, invented {len(ledger.wrong)}, dead letters {dict(ledger.dead)}"
    )
    for title, names in [("good", GOOD), *((name, (name,)) for name in (BAD if bad else ()))]:
        times = ledger.latencies(names)
        p50, p99 = times[len(times) // 2], times[int(0.99 * len(times))]
        print(f"  {title:6} {len(times):6} groups   p50 {1000 * p50:8.0f} ms   p99 {1000 * p99:8.0f} ms")
    if bad:
        live = {row["endpoint"]["name"]: row["live"] for row in load_bench.service.get("/v1/endpoints")}
        for name in BAD:
            kills = f", killed {endpoints.num_kills} times" if name == "dying" else ""
            print(
                f"  {name:6} calls {live[name]['calls']}, failed {live[name]['errors']}, retries {live[name]['retries']}, "
                f"breaker opened {live[name]['breaker_opened']} times{kills}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=20.0, help="packs per second to the good endpoints")
    parser.add_argument("--endpoint", nargs=2, metavar=("BEHAVIOUR", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.endpoint:
        asyncio.run(serve_endpoint(options.endpoint[0], int(options.endpoint[1])))
        return
    endpoints = Endpoints()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalStack(Path(folder)) as stack,
            Bus.connect(stack.nats, name="bench") as bus,
        ):
            for name in (*GOOD, *BAD):
                endpoints.start(name)
            with bench(stack, bus, Path(folder), "alone") as load_bench:
                load(load_bench, endpoints, seconds=options.seconds, rate=options.rate, bad=False)
            with bench(stack, bus, Path(folder), "mixed") as load_bench:
                load(load_bench, endpoints, seconds=options.seconds, rate=options.rate, bad=True)
    finally:
        endpoints.close()


if __name__ == "__main__":
    main()
