"""Measure what a weight update costs generations in progress, in each mode.

    python -m benchmarks.mid_generation [--tokens 1500] [--repeats 3]

One embedded engine in a separate process, driven by the worker's client: 4 prompts x 4 samples of equal length, and an
update whenever the engine has spent ``--every`` CPU seconds since the last one began. Modes alternate in the
same run, together with a run without updates. CPU seconds are the engine's, one thread, so that ratios are valid on a
shared machine. Prints a Markdown table of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from tests.contracts.tiny_model import build_model, write_changed_copy

from penstock.protocol.facts import Sampling
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.embedded.command import embedded_command
from penstock.rollout_service.engines.engine_process import EngineProcess
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.update_mode import UpdateMode
from penstock.rollout_service.settings import WorkerSettings

MODES: tuple[UpdateMode | None, ...] = (None, "drain", "retract", "in_place", "abort")
PROMPTS = [[5, 17, 88, 250, 31, 9 + number] for number in range(4)]
NUM_SAMPLES = 4
SHAPE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}


@dataclass(frozen=True, slots=True)
class Round:
    """One round in one mode."""

    cpu_s: float  # of the engine, from the first request to the last update's end
    updates: int
    waits_s: list[float]  # CPU seconds of the engine from the request for an update until its version is served


@dataclass(frozen=True, slots=True)
class Options:
    """The command-line options."""

    tokens: int
    repeats: int
    every: float


async def one_round(
    process: EngineProcess, client: SglangClient, folders: Sequence[Path], mode: UpdateMode | None, options: Options
) -> Round:
    """Generate once while versions arrive."""
    await client.load_weights(folders[0], PolicyVersion(0))
    sampling = Sampling(max_new_tokens=options.tokens, temperature=1.0)
    before = process.cpu_seconds()
    generating = asyncio.create_task(client.generate(PROMPTS, sampling, NUM_SAMPLES))
    waits: list[float] = []
    began = before
    while mode is not None and not generating.done():
        if process.cpu_seconds() - began < options.every:
            await asyncio.sleep(0.01)
            continue
        began = process.cpu_seconds()
        version = len(waits) + 1
        await client.load_weights(folders[version % len(folders)], PolicyVersion(version), mode)
        waits.append(process.cpu_seconds() - began)
    await generating
    return Round(process.cpu_seconds() - before, len(waits), waits)


async def measure(scratch: Path, options: Options) -> dict[UpdateMode | None, list[Round]]:
    """Measure all modes, alternating, on one engine."""
    build_model(scratch / "v0", eos_token_id=None, max_position_embeddings=8192, **SHAPE)
    settings = json.loads((scratch / "v0/tokenizer_config.json").read_text())
    del settings["eos_token"]  # only its length ends a completion
    (scratch / "v0/tokenizer_config.json").write_text(json.dumps(settings))
    folders = [scratch / "v0", write_changed_copy(scratch / "v0", scratch / "v1", seed=1, scale=0.001)]
    command = embedded_command(WorkerSettings())  # pyright: ignore[reportCallIssue]
    log = scratch / "engine.log"
    process, url = await EngineProcess.start(command, folders[0], PolicyVersion(0), log=log, deadline_s=60)
    client = SglangClient(url)
    rounds: dict[UpdateMode | None, list[Round]] = {mode: [] for mode in MODES}
    try:
        await one_round(process, client, folders, None, options)  # to warm up
        for _ in range(options.repeats):
            for mode in MODES:
                rounds[mode].append(await one_round(process, client, folders, mode, options))
    finally:
        await client.close()
        await process.stop()
    return rounds


def table(rounds: dict[UpdateMode | None, list[Round]], options: Options) -> str:
    """Return a Markdown table of all modes and of the run without updates."""
    num_tokens = options.tokens * len(PROMPTS) * NUM_SAMPLES
    baseline = statistics.median(one.cpu_s for one in rounds[None])
    lines = [
        "| mode | updates in a round | tokens per CPU s | relative to no update | CPU s lost per update "
        "| CPU s until a version is served |",
        "|---|---|---|---|---|---|",
    ]
    for mode, several in rounds.items():
        cpu_s = statistics.median(one.cpu_s for one in several)
        updates = statistics.median(one.updates for one in several)
        lost = f"{(cpu_s - baseline) / updates:.3f}" if updates else "-"
        waits = [value for one in several for value in one.waits_s]
        lines.append(
            f"| {mode or 'no update'} | {updates:.0f} | {num_tokens / cpu_s:.0f} | {baseline / cpu_s:.2f} | {lost} "
            f"| {f'{statistics.median(waits):.2f}' if waits else '-'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1500, help="length of each completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--every", type=float, default=1.0, help="CPU seconds between updates")
    options = Options(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory() as scratch:
        print(table(asyncio.run(measure(Path(scratch), options)), options))


if __name__ == "__main__":
    main()
