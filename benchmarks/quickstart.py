"""Run the quickstart for several seeds: accuracy, cost, and optionally TRL for comparison.

    make bench-quickstart
    python benchmarks/quickstart.py --seeds 0 1 2 --peer trl/bin/python   # TRL in the same run, see benchmarks/peers/trl_quickstart.py

Every run is `penstock quickstart --json`, including the kill of one worker. Prints a Markdown table
and exits with 1 if a seed misses the threshold: held-out accuracy from under 0.65 to at least 0.93, with at
least a tenth of the trained tokens sampled by an older version.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BEFORE_AT_MOST = 0.65
AFTER_AT_LEAST = 0.93
STALE_SHARE_AT_LEAST = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--peer", type=Path, help="Python of an environment with TRL, which is run after every seed")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    options = parser.parse_args()

    print(f"machine: {_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(
        "| seed | system | accuracy before | after | stale tokens | wall s | RL wall s | CPU s | groups redelivered | threshold |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    results, missed = [], 0
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            run = _quickstart(Path(folder), seed, options.steps)
            reached = _reached(run)
            missed += not reached
            print(_row(seed, "penstock", run, "reached" if reached else "MISSED"), flush=True)
            results.append({"seed": seed, "system": "penstock", **run})
            if options.peer:
                peer = _peer(options.peer, Path(folder) / run["run_id"], options.steps)
                print(
                    f"| {seed} | TRL, {peer['threads']} thread(s) | | {peer['accuracy_after']:.3f} | 0 % "
                    f"| {peer['wall_s']} | {peer['train_wall_s']} | {peer['cpu_s']} | | |",
                    flush=True,
                )
                results.append({"seed": seed, "system": "trl", **peer})
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 1 if missed else 0


def _quickstart(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "penstock",
        "quickstart",
        "--json",
        "--seed",
        str(seed),
        "--steps",
        str(steps),
    ]
    done = subprocess.run([*command, "--dir", str(folder)], capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise SystemExit(f"seed {seed}: the quickstart exited with code {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _peer(python: Path, run: Path, steps: int) -> dict[str, Any]:
    script = Path(__file__).with_name("trl") / "quickstart.py"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, script, "--model", run / "sft", "--data", run / "data", "--steps", str(steps)],
        capture_output=True, text=True, timeout=1800, check=False, env=environ,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the peer exited with code {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _stale_share(run: dict[str, Any]) -> float:
    tokens = run["staleness_tokens"]
    return sum(n for versions, n in tokens.items() if versions != "0") / max(1, sum(tokens.values()))


def _reached(run: dict[str, Any]) -> bool:
    return (
        run["accuracy_before"] < BEFORE_AT_MOST
        and run["accuracy_after"] >= AFTER_AT_LEAST
        and _stale_share(run) >= STALE_SHARE_AT_LEAST
    )


def _row(seed: int, system: str, run: dict[str, Any], verdict: str) -> str:
    redelivered = sum(
        int(n) for incident in run["incidents"] for n in re.findall(r"(\d+) groups? redelivered", incident)
    )
    return (
        f"| {seed} | {system} | {run['accuracy_before']:.3f} | {run['accuracy_after']:.3f} | {_stale_share(run):.0%} "
        f"| {run['total_wall_s']:.1f} | {run['wall_s']:.1f} | {run['cpu_s']:.1f} | {redelivered} | {verdict} |"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
