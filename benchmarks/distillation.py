"""Distil the quickstart's warmed-up model from the model that the quickstart trained, without reading a reward.

python -m benchmarks.distillation runs/quickstart [--form forward] [--steps 60] [--set section.key=value ...]

Needs a finished quickstart in the folder. An embedded engine serves the quickstart's ``model/`` as the teacher; the student is
its ``sft/``, which has seen 7,680 examples and no reward. Prints one JSON line for each step that was evaluated, with the KL to the teacher
(nats per token) and the share of held-out prompts that are answered right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

_START_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("quickstart", type=Path, help="folder of a finished quickstart")
    parser.add_argument("--form", choices=["reverse", "forward"], default="reverse")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--id", default=None, help="run id of the student; default: distilled-FORM")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the run")
    options = parser.parse_args()
    folder: Path = options.quickstart.absolute()
    run_id = options.id or f"distilled-{options.form}"
    environ = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    port_file = folder / "teacher.port"
    port_file.unlink(missing_ok=True)
    teacher = [sys.executable, "-m", "penstock.rollout_service.embedded_engine", "--model-path", str(folder / "model")]
    teacher += ["--port", "0", "--port-file", str(port_file), "--die-with-parent", "--weight-version", "trained"]
    with (folder / "teacher.log").open("wb") as log:
        serving = subprocess.Popen(teacher, stdout=log, stderr=log, env=environ)
        try:
            url = f"http://127.0.0.1:{_port(serving, port_file)}"
            name = ["algorithm.name=gkd", "teacher.top_k=8"] if options.form == "forward" else ["algorithm.name=opd"]
            settings = [f"run.id={run_id}", f"trainer.steps={options.steps}", f"teacher.url={url}", *name, *options.set]
            settings += [f"eval.every={max(1, options.steps // 6)}"]
            command = [sys.executable, "-m", "penstock", "train", str(folder / "run.toml"), "--local", *settings]
            code = subprocess.run(command, env=environ, check=False, stdout=sys.stderr).returncode
        finally:
            serving.terminate()
            serving.wait()
    for row in curve(folder.parent / run_id / "metrics.jsonl"):
        print(json.dumps(row))
    return code


def curve(metrics: Path) -> list[dict[str, float]]:
    """Return the KL at each evaluated step, and the accuracy there."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = {row["step"]: row for row in rows if row.get("kind") == "step"}
    found = []
    for row in rows:
        if row.get("kind") == "eval":
            step = steps.get(max(1, row["step"]), {})
            measured = {name: step[name] for name in ("kl_teacher", "kl_from_teacher", "entropy") if name in step}
            found.append({"step": row["step"], "accuracy": row["accuracy"], **measured})
    return found


def _port(serving: subprocess.Popen[bytes], port_file: Path) -> str:
    ends = time.monotonic() + _START_S
    while not (port_file.exists() and (text := port_file.read_text().strip())):
        if serving.poll() is not None or time.monotonic() > ends:
            raise SystemExit(f"the teacher did not start within {_START_S:g} s; see teacher.log beside {port_file}")
        time.sleep(0.1)
    return text


if __name__ == "__main__":
    sys.exit(main())
