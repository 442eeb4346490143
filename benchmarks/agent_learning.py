"""Tasks of several turns, from a warm-up that succeeds now and then to reinforcement learning, on several seeds.

    python -m benchmarks.agent_learning lookup --seeds 0 1 2 --staleness 2 0
    python -m benchmarks.agent_learning lake --seeds 0 1 2

For each seed: a model, examples and prompts are made, `penstock sft` warms the model up, and `penstock train --local` trains it once
for each ``--staleness``: all services, two workers. Success is that of sampled episodes (temperature 1) on held-out prompts. With a
staleness above 0 weights change while episodes are played: "episodes of several versions" are those whose tokens more than one
version sampled, "inside an answer" those in which the weights changed within one. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.token_versions import sampled_groups

from penstock.deploy import quickstart_tools
from penstock.deploy.bootstrap import ConnectionSettings
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.run_file import load
from penstock.protocol.transport.blobs import Blobs
from penstock.rollout_service.environments.games.frozen_lake import (
    FrozenLakeOptions,
    FrozenLakePlay,
    draw_lake,
    shortest_path,
)
from penstock.rollout_service.environments.play import Row
from penstock.rollout_service.proxy.messages import Message

SIZE, HOLES, MOVES = 3, 0.2, 5
_FOLLOWS = 0.3  # share of the examples that walk to the goal
_LETTERS = {"+": "P", "-": "G", "*": "O", "/": "_"}  # of the quickstart's vocabulary, which has no capital letters


@dataclass(frozen=True)
class Task:
    """One task; ``run`` are sections of its run file."""

    write_data: Callable[[Path, int, int], None]  # folder, seed, number of examples
    sft: dict[str, float]
    steps: int
    groups_per_step: int
    lr: float
    max_new_tokens: int
    run: str
    environment: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=(*TASKS, "count"))
    parser.add_argument("--run", help="with count, which this program starts itself: the run whose packs are counted")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--algorithm", default="async_grpo")
    parser.add_argument("--sft-steps", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the runs, kept; a warm-up that is there is used again")
    options = parser.parse_args()
    if options.task == "count":
        print(json.dumps(count(options.run)))
        return 0
    print(f"machine: {os.cpu_count()} cores, Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}\n")
    print(
        "| seed | algorithm | max_staleness | success before | after | trained tokens of older versions | episodes of several versions "
        "| inside an answer | wall s | CPU s | load |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as temporary:
        for seed in options.seeds:
            folder = (options.keep or Path(temporary)) / f"{options.task}-{seed}"
            prepare(TASKS[options.task], folder, seed, options.sft_steps)
            for staleness in options.staleness:
                print(
                    _row(
                        seed, staleness, options.algorithm, train(TASKS[options.task], folder, seed, staleness, options)
                    ),
                    flush=True,
                )
    return 0


def prepare(task: Task, folder: Path, seed: int, sft_steps: int | None) -> None:
    """Make data, model and warm-up below a folder, unless they are there."""
    if (folder / "sft" / "config.json").is_file():
        return
    settings = dict(task.sft)
    if sft_steps is not None:
        settings |= {"steps": sft_steps, "warmup_steps": min(task.sft["warmup_steps"], sft_steps // 2)}
    task.write_data(folder / "data", seed, int(settings["steps"] * settings["batch_size"]))
    write_model(folder / "start", seed=seed)
    if task.environment == "lake":
        tokenizer = json.loads((folder / "start" / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        tokenizer["model"]["vocab"] = {_LETTERS.get(word, word): number for word, number in vocab.items()}
        (folder / "start" / "tokenizer.json").write_text(json.dumps(tokenizer))
    run_file = folder / "sft.toml"
    lines = "\n".join(f"{name} = {value}" for name, value in settings.items())
    run_file.write_text(
        f'[run]\nid = "warm"\ndir = "{folder}"\nseed = {seed}\n[model]\npath = "{folder}/start"\n[sft]\ndata = "{folder}/data/sft.jsonl"\n'
        f'betas = [0.9, 0.98]\noutput = "{folder}/sft"\n{lines}\n'
    )
    _run("sft", str(run_file), timeout=3600)


def train(task: Task, folder: Path, seed: int, staleness: int, options: Any) -> dict[str, Any]:
    """Train from the warm-up and return the run's summary, with what was counted in its packs."""
    steps = options.steps or task.steps
    run_id = f"s{staleness}-{options.algorithm.replace('_', '-')}"
    run_file = folder / f"{run_id}.toml"
    run_file.write_text(
        f"""
[run]
id = "{run_id}"
dir = "{folder}"
seed = {seed}
[model]
path = "{folder}/sft"
[data]
train = "{folder}/data/train.jsonl"
eval = "{folder}/data/eval.jsonl"
max_prompt_tokens = 32
[rollout]
groups_per_step = {task.groups_per_step}
group_size = 8
groups_per_message = 6
max_staleness = {staleness}
max_new_tokens = {task.max_new_tokens}
environment = "{task.environment}"
[algorithm]
name = "{options.algorithm}"
[reward]
name = "environment"
success = {{ environment = 1.0 }}
[trainer]
steps = {steps}
lr = {task.lr}
betas = [0.9, 0.98]
warmup_steps = {min(10, steps // 2)}
schedule = "linear"
[eval]
every = {steps}
temperature = 1.0
{task.run}
"""
    )
    load = os.getloadavg()[0]
    done = _run(
        "train", str(run_file), "--local", "--json", "--no-page", "--workers", str(options.workers), timeout=3600
    )
    summary = json.loads(done.splitlines()[-1])
    counted = subprocess.run(
        [sys.executable, "-P", "-m", "penstock.deploy.stored", str(folder / run_id / "store"), "--", sys.executable, "-m",
         "benchmarks.agent_learning", "count", "--run", run_id],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    return {"load": load, **summary, **json.loads(counted.stdout.splitlines()[-1])}


def count(run_id: str) -> dict[str, float]:
    """Return which shares of the training episodes of a run more than one version sampled, and of their answers."""
    blobs = Blobs(load(ConnectionSettings, overrides=[f"run.id={run_id}"], environ=os.environ).settings.s3)
    groups = sampled_groups(blobs, run_id, sys.maxsize)
    rows = [row for group in groups for row in group.trajectories]
    several = [row for row in rows if len({run.version for run in row.version_runs}) > 1]
    inside = [
        row for row in several if any(a.end == b.start for a, b in pairwise(row.version_runs))
    ]  # no token between them
    return {"episodes": len(rows), "several": len(several) / len(rows), "inside": len(inside) / len(rows)}


def _run(*arguments: str, timeout: float) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "penstock", *arguments], capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"penstock {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def _row(seed: int, staleness: int, algorithm: str, found: dict[str, Any]) -> str:
    tokens = found["staleness_tokens"]
    older = sum(count for age, count in tokens.items() if age != "0") / max(1, sum(tokens.values()))
    return (
        f"| {seed} | {algorithm} | {staleness} | {found['accuracy_before']:.3f} | {found['accuracy_after']:.3f} | {older:.0%} "
        f"| {found['several']:.0%} | {found['inside']:.0%} | {found['wall_s']:.1f} | {found['cpu_s']:.1f} | {found['load']:.1f} |"
    )


def _lookup_data(folder: Path, seed: int, num_sft: int) -> None:
    quickstart_tools.write_data(folder, seed=seed, num_sft=num_sft, num_train=24 * 200, num_eval=200)


def _lake_data(folder: Path, seed: int, num_sft: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    question = {"prompt": [{"role": "user", "content": "go"}], "data_source": "lake"}
    _write(folder / "sft.jsonl", _walks(seed, num_sft))
    _write(folder / "train.jsonl", (question for _ in range(24 * 400)))
    _write(folder / "eval.jsonl", (question for _ in range(200)))


def _walks(seed: int, number: int) -> Iterator[dict[str, Any]]:
    """Yield examples: a third of them a shortest way to the goal, the others moves at random."""
    draw = random.Random(seed)
    options = FrozenLakeOptions(size=SIZE, hole_chance=HOLES, instructions="row")  # pyright: ignore[reportCallIssue]
    row = Row((Message("user", "go"),), None, {}, "")
    for _ in range(number):
        lake = draw.randrange(2**40)
        play = FrozenLakePlay(lake, row, options)
        way = shortest_path(draw_lake(lake, SIZE, HOLES), SIZE) or []
        moves = (
            way if draw.random() < _FOLLOWS else [draw.choice(("left", "right", "up", "down")) for _ in range(MOVES)]
        )
        messages = [{"role": one.role, "content": one.content} for one in play.start()]
        for move in moves:
            messages.append({"role": "assistant", "content": move[0]})
            reply = play.step(Message("assistant", move[0]))
            if reply.is_done:
                break
            messages.append({"role": "user", "content": reply.messages[0].content})
        if messages[-1]["role"] == "user":
            messages.pop()
        yield {"messages": messages}


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


TASKS = {
    "lookup": Task(
        _lookup_data, {"steps": 200, "batch_size": 128, "lr": 1.5e-3, "warmup_steps": 40}, 120, 24, 1e-3,
        quickstart_tools.MAX_NEW_TOKENS, "", "lookup",
    ),
    "lake": Task(
        _lake_data, {"steps": 150, "batch_size": 128, "lr": 1.5e-3, "warmup_steps": 40}, 80, 16, 1e-3, 3,
        f'[environment.define.lake]\ntype = "frozen_lake"\nmax_turns = {MOVES}\n'
        f'options = {{ size = {SIZE}, hole_chance = {HOLES}, instructions = "row" }}\n', "lake",
    ),
}  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
