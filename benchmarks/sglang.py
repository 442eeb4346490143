"""Compare the embedded engine with a real SGLang on one CPU core: same model, same requests, the worker's client.

    make sglang-env && python -m benchmarks.sglang [--rounds 5]

Both are started by the worker's code. Workloads: a pack of the quickstart (12 prompts x 8 samples x 9 tokens), long
completions (8 x 110 tokens), and an update of the weights of an idle engine. CPU seconds are those of all the engine's
processes; wall seconds include the machine's other load. Before the timing, both are checked to compute
the same: the log-probabilities of SGLang's samples are compared with a dense forward.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.contracts.tiny_model import Dense

from penstock.deploy import sglang_cpu
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.embedded import embedded_command
from penstock.rollout_service.engines.managed_engine import ManagedEngine
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.kind import SglangSettings, sglang_command, sglang_environ
from penstock.rollout_service.settings import WorkerSettings

PACK = ([[5 + index, 17, 9, 30 - index, 21] for index in range(12)], Sampling(max_new_tokens=9), 8)
LONG = ([[5, 17, 9, 30]], Sampling(max_new_tokens=110), 8)
V0 = PolicyVersion(0)


def engines(scratch: Path) -> dict[str, ManagedEngine]:
    section = sglang_cpu.section()
    section |= {"python": Path(section["python"]), "extra_args": tuple(section["extra_args"])}
    sglang = SglangSettings(**section)
    return {
        "embedded": ManagedEngine(
            embedded_command(WorkerSettings()), SglangClient, log_file=scratch / "embedded.log", start_deadline_s=180,
        ),
        "SGLang": ManagedEngine(
            sglang_command(sglang), SglangClient, log_file=scratch / "sglang.log", start_deadline_s=180,
            environ=sglang_environ(sglang, os.environ),
        ),
    }  # fmt: skip


async def measure(engine: ManagedEngine, work: Callable[[], Awaitable[int]], rounds: int) -> tuple[float, float, float]:
    """Return tokens per CPU second, CPU ms and wall ms of one round (medians); the first round is not counted."""
    found: list[tuple[int, float, float]] = []
    process = engine._process
    assert process is not None
    for _ in range(rounds + 1):
        started, before = time.perf_counter(), process.cpu_seconds()
        tokens = await work()
        found.append((tokens, process.cpu_seconds() - before, time.perf_counter() - started))
    rows = found[1:]
    cpu, wall = statistics.median(row[1] for row in rows), statistics.median(row[2] for row in rows)
    return sum(row[0] for row in rows) / max(sum(row[1] for row in rows), 1e-9), 1e3 * cpu, 1e3 * wall


async def bench(name: str, engine: ManagedEngine, model: Path, rounds: int) -> None:
    started = time.perf_counter()
    await engine.load(model, V0)
    assert engine._process is not None
    print(
        f"| {name} | start | | {1e3 * engine._process.cpu_seconds():,.0f} | {1e3 * (time.perf_counter() - started):,.0f} |"
    )
    [samples] = await engine.client.generate(LONG[0], LONG[1], 2)
    dense = Dense(model)
    gap = max(
        abs(reported - computed)
        for sample in samples
        for reported, computed in zip(sample.logprobs, dense.of_completion(LONG[0][0], sample.token_ids), strict=True)
    )
    assert gap < 1e-4, f"{name}: log-probabilities differ by {gap} from the dense forward"
    try:
        for label, request in (("pack 12 x 8 x 9", PACK), ("long 8 x 110", LONG)):

            async def generate(request: tuple = request) -> int:
                replies = await engine.client.generate(*request)
                return sum(len(one.token_ids) for group in replies for one in group)

            rate, cpu, wall = await measure(engine, generate, rounds)
            print(f"| {name} | {label} | {rate:,.0f} | {cpu:,.0f} | {wall:,.0f} |")

        async def update() -> int:
            await engine.load(model, PolicyVersion((engine.version or 0) + 1))
            return 0

        _, cpu, wall = await measure(engine, update, rounds)
        print(f"| {name} | update, idle | | {cpu:,.0f} | {wall:,.0f} |")
    finally:
        await engine.stop()


async def main() -> None:
    """Measure one engine after the other, because the machine has few cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_model(scratch / "model", seed=0)
        print("| engine | work | tokens / CPU s | CPU ms | wall ms |\n|---|---|---|---|---|")
        for name, engine in engines(scratch).items():
            await bench(name, engine, scratch / "model", rounds)


if __name__ == "__main__":
    asyncio.run(main())
