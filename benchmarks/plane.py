"""Measure the durable path from a worker's put through the reward service to the trainer's acknowledgement.

    python -m benchmarks.plane [--seconds 6] [--repeats 3] [--tls]

Processes that run the services' code, real nats-server (every message on disk before it is acknowledged) and a
real S3 server: a worker's `PackAnnouncer`, the reward service itself with a reward of negligible cost, and the
trainer's `Collector`, which acknowledges after each fsynced commit of a step's ids. *Direct* leaves the reward
service out. Groups are of 8 trajectories of 4096 tokens, and tiny ones of 8 x 24.

CPU is in milliseconds per group: every process, both servers. *Other* is all of it without the codec
(Parquet written once by the worker, read once by the trainer, its texts once more by the scorer), which is
measured alone in the same run. ``--tls``: each case once more with TLS on NATS and S3, in turn, and the ratio of the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.rig import ROOT
from tests.reward_service.processes import Service

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.local import LocalStack
from penstock.protocol import subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.facts import GroupGenerated, GroupScored
from penstock.protocol.groups import RewardRequest, ScoredGroup
from penstock.protocol.heartbeats import Activity
from penstock.protocol.packs import group_pack
from penstock.protocol.packs.task_promise import TaskPromise, TaskSettings, content_hash
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.fact_publisher import Receipt
from penstock.protocol.transport.loop_thread import Pending
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.engines.engine_process import process_cpu_seconds
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.packs.settlement import PackAnnouncer
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.connections import Connections
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.collect import Collector
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.groups.group_totals import Drop
from penstock.trainer.groups.pack_reader import PackReader, ReadingMark
from penstock.trainer.groups.prompt_cursor import GroupKey
from penstock.trainer.rollout_settings import RolloutSettings

#: name: (trajectories, tokens of each, of these prompt tokens, characters of a completion)
SIZES = {"long": (8, 4096, 512, 14_000), "tiny": (8, 24, 15, 9)}
GROUPS_PER_STEP = 48
NUM_TEMPLATES = 8
VOCABULARY = 150_000
_CODEC_REPEATS = 60
RUN_ID = "bench"
IN_FLIGHT = 8  # packs that a worker stores and announces concurrently
_NEVER_STALE = 10**9
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
_ROLE_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """Groups of a size, with a number of them per message, through the scorer or (``hop`` off) directly."""

    size: str  # one of SIZES
    groups_per_pack: int
    hop: bool = True

    @property
    def name(self) -> str:
        num, length, *_ = SIZES[self.size]
        way = "scored" if self.hop else "direct"
        return f"{num} x {length}, {self.groups_per_pack} a message, {way}"

    def num_groups(self, seconds: float) -> int:
        per_second = 150 if self.size == "long" else 1000
        return GROUPS_PER_STEP * max(2, round(seconds * per_second / GROUPS_PER_STEP))


CASES = (Case("long", 1), Case("long", 4), Case("long", 1, hop=False), Case("long", 4, hop=False), Case("tiny", 12))


def make_template(size: str, seed: int) -> Group:
    num, length, prompt, characters = SIZES[size]
    random = np.random.default_rng(seed)
    mask = np.arange(length) >= prompt
    shared = random.zipf(1.3, prompt)
    rows = tuple(
        Trajectory(
            token_ids=(np.concatenate([shared, random.zipf(1.3, length - prompt)]) % VOCABULARY).astype(np.int32),
            loss_mask=mask,
            behaviour_logprobs=np.where(mask, -random.exponential(0.4, length), 0.0).astype(np.float32),
            version_runs=(VersionRun(PolicyVersion(0), prompt, length),),
            finish_reason="stop",
            completion_text=_text(random, characters),
        )
        for _ in range(num)
    )
    reward = RewardRequest(name="exact_match", data_source="bench", ground_truth='"42"', extra_info="{}")
    return Group(
        group_id=f"e0.p{seed}.a0", split="train", attempt=0, issued_version=0, prompt_text=_text(random, 4 * prompt),
        num_prompt_tokens=prompt, reward=reward, trajectories=rows,
    )  # fmt: skip


def _text(random: np.random.Generator, characters: int) -> str:
    words = ["the", "sum", "of", "x", "and", "y", "is", "therefore", "12", "=", "prime", "we", "get", "so", "that"]
    return " ".join(random.choice(words, size=characters // 3 + 1))[:characters]


def codec_ms(case: Case) -> float:
    """Return the CPU milliseconds of one group's codec, alone: Parquet written, read, and its texts where it is scored."""
    groups = [replace(make_template(case.size, n), group_id=f"e0.p{n}.a0") for n in range(case.groups_per_pack)]
    group_pack.decode(group_pack.encode(groups))
    gc.freeze()  # as in the services
    started = time.process_time()
    for _ in range(_CODEC_REPEATS):
        data = group_pack.encode(groups)
        if case.hop:
            group_pack.decode_texts(data, range(len(groups)))
        group_pack.decode(data)
    return 1000 * (time.process_time() - started) / (_CODEC_REPEATS * len(groups))


@dataclass(frozen=True, slots=True)
class _Given:
    """A delivery without acknowledgement: the benchmark starts at the put."""

    traceparent: str = ""
    num_delivered: int = 1


@dataclass(frozen=True, slots=True)
class _Received:
    pack_id: str
    split: str = "train"
    delivery: _Given = _Given()


class _ScoredAtOnce:
    """Replace the bus: announce every generated pack as scored."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def publish(self, _subject: str, fact: GroupGenerated, *, msg_id: str, **how: Any) -> Pending[Receipt]:
        groups = tuple(
            ScoredGroup(generated=group, rewards=(0.0,) * len(group.completion_tokens), scorer="none")
            for group in fact.groups
        )
        scored = GroupScored(**{**dict(fact), "groups": groups})
        return self._bus.publish(subjects.scored(fact.run_id, "train"), scored, msg_id=msg_id, **how)


async def _announce_all(announcer: PackAnnouncer, case: Case, num_packs: int, templates: Sequence[Group]) -> None:
    numbers = iter(range(num_packs))

    async def announce_some() -> None:
        for number in numbers:
            first = number * case.groups_per_pack
            groups = [
                replace(templates[n % len(templates)], group_id=f"e0.p{n}.a0")
                for n in range(first, first + case.groups_per_pack)
            ]
            await announcer.announce(_Received(f"pack-{number}"), groups)  # type: ignore[arg-type]

    await asyncio.gather(*(announce_some() for _ in range(IN_FLIGHT)))


def worker(config: Mapping[str, Any]) -> None:
    case, num_packs = Case(**config["case"]), config["count"]
    templates = [make_template(case.size, seed) for seed in range(NUM_TEMPLATES)]
    with Bus.connect(NatsSettings(**config["nats"]), name="bench-worker") as bus:
        announcer = PackAnnouncer(
            bus=bus if case.hop else _ScoredAtOnce(bus),  # type: ignore[arg-type]
            blobs=Blobs(S3Settings(**config["s3"])), activity=Activity(), metrics=WorkerMetrics(), run_id=RUN_ID, worker_id="w0",
        )  # fmt: skip
        gc.freeze()  # as the service does
        print("ready", flush=True)
        sys.stdin.readline()
        started, cpu = time.time(), time.process_time()
        asyncio.run(_announce_all(announcer, case, num_packs, templates))
        print(json.dumps({"started": started, "cpu_s": time.process_time() - cpu}), flush=True)


class _EveryGroup:
    """Replace the issuer: every group that arrives counts as issued."""

    def __init__(self, size: str, groups: RunGroups) -> None:
        self._promises = [_promise(make_template(size, seed)) for seed in range(NUM_TEMPLATES)]
        self._groups = groups.train

    def promise(self, group_id: str) -> TaskPromise:
        return self._promises[GroupKey.parse(group_id).prompt % len(self._promises)]

    def accept(self, group_id: str) -> None:
        self._groups.issue([group_id])

    def drop(self, drop: Drop) -> None:
        raise AssertionError(drop)

    def pause(self, is_paused: bool) -> None:
        assert not is_paused


def _promise(group: Group) -> TaskPromise:
    first = group.trajectories[0]
    prompt = first.token_ids[: group.num_prompt_tokens].tobytes()
    content = content_hash(prompt, group.prompt_text, group.reward)
    asked = TaskSettings(len(group.trajectories), first.num_completion_tokens, "single_turn")
    return TaskPromise(content, "train", 0, (asked,))


def consume(bus: Bus, s3: S3Settings, folder: Path, *, size: str, num_groups: int) -> dict[str, float]:
    """Take batches as the trainer does, commit their ids, acknowledge; raises when a group comes twice or not at all."""
    groups = RunGroups.of(None, max_staleness=_NEVER_STALE)
    issuer: Any = _EveryGroup(size, groups)
    rollout = RolloutSettings(groups_per_step=GROUPS_PER_STEP, max_staleness=_NEVER_STALE)
    batcher = Batcher(groups.train, issuer, rollout, AlgorithmSettings(), max_dead=1)
    seen: set[str] = set()
    commit_s = 0.0
    blobs = Blobs(s3)
    collector = Collector(
        Connections(RUN_ID, bus, blobs),
        groups=groups,
        batcher=batcher,
        issuer=issuer,
        deadline_s=60.0,
        reader=PackReader(blobs.get, vocab_size=VOCABULARY, mark=ReadingMark(folder)),
    )
    gc.freeze()  # as the service does
    with collector:
        print("ready", flush=True)
        cpu = time.process_time()
        for step in range(num_groups // GROUPS_PER_STEP):
            batch = collector.collect(PolicyVersion(0))
            ids = [group.group_id for group in batch]
            assert not seen & set(ids), "trained twice"
            seen.update(ids)
            with groups.lock:
                groups.train.train(PolicyVersion(0), batch, {})
            settled = collector.settled()
            commit_s -= time.monotonic()
            commit(folder / f"step{step:08d}", ids)
            commit_s += time.monotonic()
            collector.acknowledge(settled)
        cpu = time.process_time() - cpu
        ended = time.time()
    assert len(seen) == num_groups, f"{len(seen)} of {num_groups} groups arrived"
    return {"ended": ended, "cpu_s": cpu, "commit_s": commit_s}


def commit(path: Path, ids: Sequence[str]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump(ids, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def trainer(config: Mapping[str, Any]) -> None:
    with Bus.connect(NatsSettings(**config["nats"]), name="bench-trainer") as bus:
        answer = consume(
            bus,
            S3Settings(**config["s3"]),
            Path(config["folder"]),
            size=config["case"]["size"],
            num_groups=config["count"],
        )
    print(json.dumps(answer), flush=True)


class Role:
    """A process of the benchmark that prints "ready", waits for a line, and ends with its measurements."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.plane", "--role", name, json.dumps(config)],
            stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT, env=_ENVIRONMENT,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit(f"the {name} did not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def answer(self) -> dict[str, float]:
        output, _ = self._process.communicate("\n", timeout=_ROLE_S)
        if self._process.returncode:
            raise SystemExit(f"a process of the benchmark exited with code {self._process.returncode}")
        return json.loads(output.strip().splitlines()[-1])


def measure(case: Case, seconds: float, *, tls: bool = False) -> dict[str, Any]:
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
        config = {
            "nats": stack.nats.model_dump(mode="json") | {"password": stack.nats.secret(), "password_file": None},
            "s3": stack.s3.model_dump(mode="json") | {"secret_key": stack.s3.secret(), "secret_key_file": None},
            "folder": str(folder),
            "case": asdict(case),
        }
        taker = Role("trainer", config | {"count": num_groups})
        running.callback(taker.kill)
        maker = Role("worker", config | {"count": num_groups // case.groups_per_pack})
        running.callback(maker.kill)
        before = {role: process_cpu_seconds(pid) for role, pid in servers.items()}
        made, taken = maker.answer(), taker.answer()
        cpu = {role: process_cpu_seconds(pid) - before[role] for role, pid in servers.items()}
    cpu |= {"worker": made["cpu_s"], "trainer": taken["cpu_s"]}
    split = {role: 1000 * used / num_groups for role, used in cpu.items()}
    parts = ", ".join(f"{role} {ms:.2f}" for role, ms in split.items())
    return {
        "system": "Penstock, TLS" if tls else "Penstock", "case": case.name, "cpu_ms": sum(split.values()), "codec_ms": codec_ms(case),
        "groups_per_s": num_groups / (taken["ended"] - made["started"]),
        "note": f"{parts}; commit {1000 * taken['commit_s'] * GROUPS_PER_STEP / num_groups:.1f} ms per step",
    }  # fmt: skip


def show(result: Mapping[str, Any]) -> None:
    print(
        f"{result['system'] + ': ' + result['case']:44} {result['groups_per_s']:6.0f} groups/s  "
        f"CPU {result['cpu_ms']:5.2f} ms per group, codec {result['codec_ms']:.2f}, "
        f"other {result['cpu_ms'] - result['codec_ms']:5.2f}  load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    print(f"{'':10}{result['note']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="approximate duration of each case")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="numbers of cases, from 0")
    parser.add_argument("--tls", action="store_true", help="measure each case with TLS too")
    parser.add_argument("--role", nargs=2, metavar=("NAME", "JSON"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        {"worker": worker, "trainer": trainer}[options.role[0]](json.loads(options.role[1]))
        return
    for repeat in range(options.repeats):
        print(f"run {repeat + 1}")
        for number in options.cases:
            plain = measure(CASES[number], options.seconds)
            show(plain)
            if options.tls:
                encrypted = measure(CASES[number], options.seconds, tls=True)
                show(encrypted)
                print(f"{'':10}TLS: {encrypted['cpu_ms'] / plain['cpu_ms']:.3f} times the CPU", flush=True)


if __name__ == "__main__":
    main()
