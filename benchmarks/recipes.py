"""Run a recipe of `penstock recipe` for several seeds: what it learns by step, wall and CPU time, and a plot of all recipes.

    make bench-recipe RECIPE=lake
    python -m benchmarks.recipes smollm2 --seeds 0 1 2 --peer trl/bin/python   # TRL after every seed, see benchmarks/peers/trl_recipe.py

A seed that is in benchmarks/recipes.json already is not run again, unless it is given. Writes that file and the plot of docs/recipes.md,
prints a Markdown table of every recipe, and exits with 1 if a seed's last evaluation is outside of the interval that the page promises,
or took more than an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rig import children_cpu_s, machine

HERE = Path(__file__).parent
RESULTS = HERE / "recipes.json"
PLOT = HERE.parent / "docs" / "images" / "recipes.png"
AT_LEAST = {"smollm2": 0.8, "curriculum": 0.55, "tools": 0.9, "lake": 0.5, "dpo": 0.6, "distillation": 0.85}
WALL_AT_MOST_S = 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=[*AT_LEAST])
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of 0, 1 and 2 without a result")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder for the runs")
    parser.add_argument(
        "--peer", type=Path, help="Python of an environment with TRL, which is run after every seed of smollm2"
    )
    options = parser.parse_args()
    results: list[dict[str, Any]] = json.loads(RESULTS.read_text())
    done = {one["seed"] for one in results if one["recipe"] == options.recipe}
    reached_all = True
    for seed in options.seeds or sorted({0, 1, 2} - done):
        run = options.dir / f"{options.recipe}-{seed}"
        measured = [{"system": "penstock", **_penstock(options.recipe, run, seed)}]
        if options.peer and options.recipe == "smollm2":
            measured.append({"system": "trl", **_peer(options.peer, run)})
        results = [one for one in results if (one["recipe"], one["seed"]) != (options.recipe, seed)]
        results += [{"recipe": options.recipe, "seed": seed, **one} for one in measured]
        RESULTS.write_text(json.dumps(results).replace('{"recipe"', '\n{"recipe"') + "\n")
        reached_all &= reached(results[-len(measured)])
    print(f"machine: {machine()}\n\n{table(results)}")
    _plot(results)
    return 0 if reached_all else 1


def reached(result: dict[str, Any]) -> bool:
    return result["held_out"][-1][1] >= AT_LEAST[result["recipe"]] and result["wall_s"] <= WALL_AT_MOST_S


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the rows of all runs: what was held out by step, and what a run cost."""
    lines = ["| recipe | seed | system | held out, by step | wall s | CPU s |", "|---|---|---|---|---|---|"]
    for one in results:
        curve = ", ".join(f"{step}: {value:.3f}" for step, value in one["held_out"])
        lines.append(
            f"| {one['recipe']} | {one['seed']} | {one['system']} | {curve} | {one['wall_s']:,.0f} | {one['cpu_s']:,.0f} |"
        )
    return "\n".join(lines)


def _penstock(name: str, run: Path, seed: int) -> dict[str, Any]:
    arguments = ["--seed", str(seed), "--run", run.name, "--dir", str(run.parent), "--json"]
    command = [sys.executable, "-P", "-m", "penstock", "recipe", name, *arguments]
    started, cpu = time.monotonic(), children_cpu_s()
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds = {"wall_s": round(time.monotonic() - started, 1), "cpu_s": round(children_cpu_s() - cpu, 1)}
    return {"held_out": held_out(name, run, printed), **seconds}


def held_out(name: str, run: Path, printed: str) -> list[tuple[int, float]]:
    """Return the evaluations by step: those of the run, or of `penstock eval` before and after a training without rollouts."""
    if name == "dpo":
        steps = json.loads((run / "dpo-training" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        evaluations = [json.loads(line) for line in printed.splitlines() if line.startswith('{"schema_tag"')]
        return [(step, one["sources"][0]["reward"]["value"]) for step, one in zip((0, steps), evaluations, strict=True)]
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(event["step"], event["reward_mean"]) for event in events if event["kind"] == "eval"]


def _peer(python: Path, run: Path) -> dict[str, Any]:
    environ = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    command = [python, HERE / "peers" / "trl_recipe.py", run / "run.toml"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the peer exited with code {done.returncode}\n{done.stderr[-4000:]}")
    return peer_result(done.stdout)


def peer_result(printed: str) -> dict[str, Any]:
    """Return the peer's run as those of Penstock; seconds are those of its steps, without imports and evaluations."""
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"steps"')]
    curve = [(line["steps"], line["held_out"]) for line in lines]
    return {"held_out": curve, "wall_s": lines[-1]["train_wall_s"], "cpu_s": lines[-1]["train_cpu_s"]}


def _plot(results: Sequence[dict[str, Any]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(10, 5.5), sharey=True)
    for axes, name in zip(panels.flat, AT_LEAST, strict=True):
        curves = [one["held_out"] for one in results if (one["recipe"], one["system"]) == (name, "penstock")]
        axes.set(title=name, xlabel="optimizer step", ylim=(0, 1))
        if curves:
            steps = [step for step, _ in curves[0]]
            values = [sorted(at) for at in zip(*([value for _, value in curve] for curve in curves), strict=True)]
            axes.fill_between(steps, [at[0] for at in values], [at[-1] for at in values], alpha=0.3, linewidth=0)
            axes.plot(
                steps, [sum(at) / len(at) for at in values], label=f"mean of {len(curves)} seeds, and their range"
            )
            axes.legend(loc="lower right", fontsize="x-small")
    for axes in panels[:, 0]:
        axes.set_ylabel("held out")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
