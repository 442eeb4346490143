"""Time the quickstart and then its replay.

python -m benchmarks.replay [--steps N] [--folder DIR]

Prints one JSON object. The baseline is the run itself: the same steps with workers, rewards, queues and publication.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rig import ROOT, children_cpu_s, last_json


def penstock(folder: Path, *arguments: str) -> tuple[dict[str, Any], float]:
    """Run a command in a folder; return its JSON object and the CPU seconds of all its processes."""
    before = children_cpu_s()
    found = last_json(
        [sys.executable, "-m", "penstock", *arguments], folder=folder, PYTHONPATH=str(ROOT / "src"), OMP_NUM_THREADS="1"
    )
    return found, children_cpu_s() - before


def measure(steps: int, folder: Path) -> dict[str, Any]:
    ran, run_cpu_s = penstock(folder, "quickstart", "--steps", str(steps), "--json")
    run_folder = folder / "runs" / "quickstart"
    trainer = json.loads((run_folder / "trainer.json").read_text())
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "step"]
    replayed, replay_cpu_s = penstock(folder, "replay", "quickstart", "--json")
    return {
        "steps": ran["steps"],
        "groups": replayed["num_groups"],
        "tokens": replayed["num_tokens"],
        "versions_same": len(replayed["same"]),
        "holds": replayed["holds"],
        "run": {
            "wall_s": trainer["wall_s"],
            "trainer_cpu_s": trainer["cpu_s"],
            "steps_and_waits_s": sum(row["step_s"] + row["wait_s"] for row in rows),
            "all_processes_cpu_s": run_cpu_s,
        },
        "replay": {"wall_s": replayed["wall_s"], "cpu_s": replayed["cpu_s"], "all_processes_cpu_s": replay_cpu_s},
        "ratio": {"wall": replayed["wall_s"] / trainer["wall_s"], "all_processes_cpu": replay_cpu_s / run_cpu_s},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, help="folder for the run (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(options.steps, options.folder or Path(scratch)), indent=1))


if __name__ == "__main__":
    main()
