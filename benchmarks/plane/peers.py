"""The peers of the plane benchmark: the same job with the same groups in the same Parquet, by a Redis stream and by Ray.

Run by `benchmarks.plane --peers PYTHON`, case by case. A producer, a scorer if the case has one, and a consumer,
in separate processes; eight packs in flight. The scorer reads the texts of a pack and scores them by the same rule as
Penstock's reward service; the consumer takes scores and pack, decodes, and commits 48 ids with fsync.

Redis: `appendfsync always`. The pack is in the stream itself (consumer groups, XACK); the scorer adds scores and the
entry's id to a second stream; after its commit the consumer acknowledges and deletes both. Ray: `ray.put`, the reference
through `ray.util.queue.Queue(8)`, `ray.get`; nothing is durable.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.plane.groups import CASES, GROUPS_PER_STEP, Case, codec_ms, make_template

from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group
from penstock.reward_service.rewards import exact_match

IN_FLIGHT = 8
_WAIT_MS = 5000
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def templates(case: Case) -> list[Group]:
    return [make_template(case.size, seed) for seed in range(8)]


def pack(groups: Sequence[Group], case: Case, number: int) -> bytes:
    return group_pack.encode([groups[(number + n) % len(groups)] for n in range(case.groups_per_pack)])


def score(data: bytes, case: Case) -> list[list[float]]:
    """Score a pack's groups as the reward service does with `exact_match`."""
    return [
        [
            verdict.reward
            for verdict in exact_match.judge(group.completions, json.loads(group.reward.ground_truth or ""))
        ]
        for group in group_pack.decode_texts(data, range(case.groups_per_pack))
    ]


class Commits:
    """Counts the packs that the consumer got and commits their ids, one step at a time."""

    def __init__(self, folder: Path, case: Case, num_packs: int) -> None:
        self._folder = folder
        self._per_step = max(1, GROUPS_PER_STEP // case.groups_per_pack)
        self._left = num_packs
        self._held: list[Any] = []

    @property
    def is_over(self) -> bool:
        return self._left == 0

    def got(self, entry: Any) -> list[Any]:
        """Record a pack; commit when a step is complete, and return the entries of that commit."""
        self._held.append(entry)
        self._left -= 1
        if len(self._held) < self._per_step and self._left:
            return []
        covered, self._held = self._held, []
        with (self._folder / f"left{self._left:08d}").open("w") as file:
            json.dump([str(one) for one in covered], file)
            file.flush()
            os.fsync(file.fileno())
        return covered


def cpu_seconds_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


# ── Redis ─────────────────────────────────────────────────────────────────────────────────────────


def redis_producer(client: Any, case: Case, count: int, _folder: Path) -> None:
    groups = templates(case)

    def add(number: int) -> None:
        client.xadd("packs", {"id": number, "pack": pack(groups, case, number)})

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(add, range(count)))


def _read(client: Any, stream: str, reader: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    answer = client.xreadgroup(reader, "r0", {stream: ">"}, count=IN_FLIGHT, block=_WAIT_MS)
    return answer[0][1] if answer else []


def redis_scorer(client: Any, case: Case, count: int, _folder: Path) -> None:
    left = count
    while left:
        pipeline = client.pipeline(transaction=False)  # one round trip and one fsync for all entries read together
        for entry, fields in _read(client, "packs", "scorer"):
            pipeline.xadd("scores", {"entry": entry, "scores": json.dumps(score(fields[b"pack"], case))})
            pipeline.xack("packs", "scorer", entry)
            left -= 1
        pipeline.execute()


def redis_consumer(client: Any, case: Case, count: int, folder: Path) -> None:
    commits = Commits(folder, case, count)
    while not commits.is_over:
        if case.hop:
            for entry, fields in _read(client, "scores", "trainer"):
                json.loads(fields[b"scores"])
                source = fields[b"entry"]
                [(_, found)] = client.xrange("packs", source, source)
                group_pack.decode(found[b"pack"])
                _settle(client, "scores", commits.got((entry, source)))
        else:
            for entry, fields in _read(client, "packs", "trainer"):
                group_pack.decode(fields[b"pack"])
                _settle(client, "packs", commits.got((entry, entry)))


def _settle(client: Any, stream: str, covered: Sequence[tuple[bytes, bytes]]) -> None:
    if covered:
        client.xack(stream, "trainer", *(entry for entry, _ in covered))
        client.xdel(stream, *(entry for entry, _ in covered))
        if stream != "packs":
            client.xdel("packs", *(source for _, source in covered))


def redis_role(
    play: Callable[[Any, Case, int, Path], None], port: int, case: Case, count: int, folder: str, go: Any, answer: Any
) -> None:
    import redis

    client = redis.Redis(port=port)
    answer.put("ready")
    go.wait()
    started, cpu = time.time(), time.process_time()
    play(client, case, count, Path(folder))
    answer.put({"started": started, "ended": time.time(), "cpu_s": time.process_time() - cpu})


def measure_redis(case: Case, count: int) -> dict[str, Any]:
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is not on the path")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    roles = {"producer": redis_producer, "scorer": redis_scorer, "consumer": redis_consumer}
    if not case.hop:
        del roles["scorer"]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--port", str(port), "--dir", folder, "--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        server = subprocess.Popen([program, *flags, "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL)
        try:
            _wait_for_port(port)
            _make_groups(port)
            figures, brokers = _play(roles, (port, case, count, folder), server.pid)
        finally:
            server.kill()
            server.wait()
    split = {role: figures[role]["cpu_s"] for role in roles} | {"redis-server": brokers}
    return _result("Redis, fsync always", case, count, figures["producer"], figures["consumer"], split)


def _make_groups(port: int) -> None:
    import redis

    client = redis.Redis(port=port)
    for stream, reader in (("packs", "scorer"), ("packs", "trainer"), ("scores", "trainer")):
        client.xgroup_create(stream, reader, id="0", mkstream=True)


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _play(roles: dict[str, Any], given: tuple[Any, ...], server: int) -> tuple[dict[str, Any], float]:
    context = multiprocessing.get_context("spawn")
    go = context.Event()
    answers = {role: context.Queue() for role in roles}
    players = [
        context.Process(target=redis_role, args=(play, *given, go, answers[role])) for role, play in roles.items()
    ]
    for player in players:
        player.start()
    for answer in answers.values():
        assert answer.get(timeout=120) == "ready"
    before = cpu_seconds_of(server)
    go.set()
    figures = {role: answer.get(timeout=300) for role, answer in answers.items()}
    brokers = cpu_seconds_of(server) - before
    for player in players:
        player.join()
    return figures, brokers


# ── Ray ───────────────────────────────────────────────────────────────────────────────────────────


def measure_ray(case: Case, count: int) -> dict[str, Any]:
    import ray
    from ray.util.queue import Queue

    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        num_cpus=3, include_dashboard=False, object_store_memory=600 * 2**20, _node_ip_address="127.0.0.1",
        log_to_driver=False, logging_level="ERROR",
    )  # fmt: skip
    made, scored = Queue(IN_FLIGHT), Queue(IN_FLIGHT)

    @ray.remote
    def produce(number: int) -> dict[str, float]:
        groups = templates(case)
        started = time.time()
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(lambda n: made.put([ray.put(pack(groups, case, n))]), range(number)))
        return {"started": started}

    @ray.remote
    def grade(number: int) -> None:
        for _ in range(number):
            (reference,) = made.get(timeout=60)
            scored.put([reference, json.dumps(score(ray.get(reference), case))])

    @ray.remote
    def consume(number: int, folder: str) -> dict[str, float]:
        commits = Commits(Path(folder), case, number)
        while not commits.is_over:
            if case.hop:
                reference, scores = scored.get(timeout=60)
                json.loads(scores)
            else:
                (reference,) = made.get(timeout=60)
            group_pack.decode(ray.get(reference))
            commits.got(reference)
        return {"ended": time.time()}

    def play(number: int, folder: str) -> tuple[dict[str, float], dict[str, float]]:
        taken = consume.remote(number, folder)
        graded = grade.remote(number if case.hop else 0)
        given = produce.remote(number)
        return ray.get(given), (ray.get(taken), ray.get(graded))[0]

    with tempfile.TemporaryDirectory() as folder:
        play(IN_FLIGHT, folder)  # starts Ray's processes and their imports
        before = {pid: cpu_seconds_of(pid) for pid in _ray_pids()}
        given, taken = play(count, folder)
        used = sum(cpu_seconds_of(pid) - before.get(pid, 0.0) for pid in _ray_pids())
    ray.shutdown()
    return _result("Ray, not durable", case, count, given, taken, {"all": used})


def _ray_pids() -> list[int]:
    """Return every process of Ray: the descendants of this process, and this process."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, remaining = [], [os.getpid()]
    while remaining:
        found += (descendants := children.get(remaining.pop(), []))
        remaining += descendants
    return [*found, os.getpid()]


def _result(
    system: str, case: Case, count: int, made: dict[str, float], taken: dict[str, float], cpu: dict[str, float]
) -> dict[str, Any]:
    num_groups = count * case.groups_per_pack
    split = {role: 1000 * used / num_groups for role, used in cpu.items()}
    return {
        "system": system,
        "case": case.name,
        "groups_per_s": num_groups / (taken["ended"] - made["started"]),
        "cpu_ms": sum(split.values()),
        "codec_ms": codec_ms(case),
        "note": ", ".join(f"{role} {ms:.2f}" for role, ms in split.items()) if len(split) > 1 else "",
    }


def main() -> None:
    case, seconds = CASES[int(sys.argv[1])], float(sys.argv[2])
    # Ray would take minutes for as many tiny groups as the others use.
    for measure, share in ((measure_redis, 1.0), (measure_ray, 1.0 if case.size == "long" else 0.3)):
        count = case.num_groups(seconds * share) // case.groups_per_pack
        print(json.dumps(measure(case, count)), flush=True)


if __name__ == "__main__":
    main()
