"""Run `penstock recipe smollm2` for several seeds: held-out reward before and after, wall and CPU time, and a plot.

    make real-model
    python -m benchmarks.real_model --seeds 0 1 2 --peer trl/bin/python   # TRL after every seed, see benchmarks/peers/trl_real_model.py

Writes benchmarks/real_model.json and real_model.png, prints a Markdown table, and exits with 1 if a seed misses the goal:
held-out reward at least doubled and at least 0.3 above its start, in at most 90 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.rig import children_cpu_s, machine

HERE = Path(__file__).parent
GAIN_AT_LEAST = 0.3
WALL_AT_MOST_S = 5400.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the recipe's)")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="folder for the runs")
    parser.add_argument("--peer", type=Path, help="Python of an environment with TRL, which is run after every seed")
    parser.add_argument("--json", type=Path, default=HERE / "real_model.json")
    options = parser.parse_args()
    print(f"machine: {machine()}\n")
    print("| seed | system | held-out reward before | after | wall s | CPU s | goal |\n|---|---|---|---|---|---|---|")
    results: list[dict[str, Any]] = []
    for seed in options.seeds:
        run = options.dir / f"real-model-{seed}"
        results.append({"seed": seed, "system": "penstock", **_penstock(run, seed, options.steps)})
        print(_row(results[-1]), flush=True)
        if options.peer:
            environ = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(
                [options.peer, HERE / "peers" / "trl_real_model.py", (run / "run.toml")],
                env=environ,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"the peer exited with code {done.returncode}\n{done.stderr[-4000:]}")
            results.append({"seed": seed, "system": "trl", **peer_result(done.stdout)})
            print(_row(results[-1]), flush=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    _plot(results, options.json.with_suffix(".png"))
    return 0 if all(reached(result) for result in results if result["system"] == "penstock") else 1


def reached(result: dict[str, Any]) -> bool:
    before, after = result["held_out_before"], result["held_out_after"]
    return after >= max(2 * before, before + GAIN_AT_LEAST) and result["wall_s"] <= WALL_AT_MOST_S


def _penstock(run: Path, seed: int, steps: int | None) -> dict[str, Any]:
    arguments = ["--seed", str(seed), "--run", run.name, "--dir", str(run.parent)]
    arguments += ["--steps", str(steps)] if steps else []
    started, cpu = time.monotonic(), children_cpu_s()
    subprocess.run([sys.executable, "-P", "-m", "penstock", "recipe", "smollm2", *arguments], check=True)
    wall, cpu = time.monotonic() - started, children_cpu_s() - cpu
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [(event["step"], event["reward_mean"]) for event in events if event["kind"] == "eval"]
    return {
        "held_out_before": curve[0][1],
        "held_out_after": curve[-1][1],
        "held_out": curve,
        "steps": sum(event["kind"] == "step" for event in events),
        "wall_s": round(wall, 1),
        "cpu_s": round(cpu, 1),
    }


def peer_result(printed: str) -> dict[str, Any]:
    """Return the peer's run as those of Penstock; seconds are those of its steps, without imports and evaluations."""
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith('{"steps"')]
    return {
        "held_out_before": lines[0]["held_out"],
        "held_out_after": lines[-1]["held_out"],
        "held_out": [(line["steps"], line["held_out"]) for line in lines],
        "steps": lines[-1]["steps"],
        "wall_s": lines[-1]["train_wall_s"],
        "cpu_s": lines[-1]["train_cpu_s"],
    }


def _row(run_result: dict[str, Any]) -> str:
    goal = "" if run_result["system"] != "penstock" else "reached" if reached(run_result) else "MISSED"
    return (
        f"| {run_result['seed']} | {run_result['system']} | {run_result['held_out_before']:.3f} | {run_result['held_out_after']:.3f} | {run_result['wall_s']:.0f} "
        f"| {run_result['cpu_s']:.0f} | {goal} |"
    )


def _plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for result in results:
        style = {"linestyle": "-"} if result["system"] == "penstock" else {"linestyle": ":", "marker": "x"}
        axes.plot(*zip(*result["held_out"], strict=True), label=f"{result['system']}, seed {result['seed']}", **style)
    axes.set(xlabel="optimizer step", ylabel="held-out reward, greedy", ylim=(0, 1))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
