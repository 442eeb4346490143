"""Measure what asynchrony buys: one job, through the real services, with every bound on staleness.

    make bench-async                                       # 2 and 8 workers, every mode (half an hour)
    python -m benchmarks.asynchrony --workers 8 --modes synchronous "asynchronous, 4"

nats-server, S3 server, reward service, rollout workers and the trainer with its loop are the real ones. The engines and the
optimizer step take time without computing (`simulated_engine.py`, `simulated_trainer.py`), so that only scheduling differs
between the rows, and a machine of two cores carries the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.asynchrony import measure, simulated_trainer
from benchmarks.asynchrony.job import MODES, Job, Mode, write_run
from benchmarks.asynchrony.measure import Measured
from benchmarks.asynchrony.report import table
from tests.rigs.simulated_engine import SimulatedOptions

from penstock.deploy.local_run import TRAINER, LocalRun
from penstock.deploy.processes.child import Child, DeployError
from penstock.protocol import logs

_RUN_S = 900.0


class SimulatedRun(LocalRun):
    """A run whose optimizer steps only take time."""

    def _trainer(self) -> Child:
        child = super()._trainer()
        at = child.command.index("penstock.trainer")
        # without -P: the benchmarks are imported from the working directory
        child.command = [sys.executable, "-m", simulated_trainer.__name__, *child.command[at + 2 :]]
        return child


def run_mode(folder: Path, job: Job, mode: Mode) -> Measured:
    """Run the job in one mode; raises DeployError when the trainer fails or needs too long."""
    job = job.for_mode(mode)
    run_file, steps_file = write_run(folder, job, mode), folder / "steps.jsonl"
    simulated = {"trace": str(steps_file), "token_s": job.token_s, "step_s": job.step_s}
    environ = {**os.environ, simulated_trainer.VARIABLE: json.dumps(simulated), "OMP_NUM_THREADS": "1"}
    with SimulatedRun([str(run_file)], num_workers=job.num_workers, environ=environ) as run:
        run.start()
        code = run.wait(_RUN_S)
        if code != 0:
            what = f"did not end within {_RUN_S:.0f} s" if code is None else f"ended with exit code {code}"
            raise DeployError(f"{mode.name}: the trainer {what}\n{run.log_tail(TRAINER)}")
    steps = measure.read_steps(steps_file)
    measured = steps[job.first :][: job.measured]
    since, until = steps[job.first - 1]["ended"], measured[-1]["ended"]
    metrics = run.folder / "metrics.jsonl"
    dropped, trained = measure.group_counts(metrics)
    idle, used = measure.engine_shares(folder / "trace", since, until, job.engine.pace.tokens_per_s)
    return Measured(
        mode=mode.name,
        workers=job.num_workers,
        tokens_per_s=sum(sum(step["lengths"]) for step in measured) / (until - since),
        step_s=(until - since) / len(measured),
        trainer_idle=1.0 - sum(step["ended"] - step["started"] for step in measured) / (until - since),
        rollout_idle=idle,
        slots_used=used,
        staleness=measure.staleness_shares(metrics, job.first),
        dropped=dropped,
        trained=trained,
        ideal_tokens_per_s=job.ideal_tokens_per_s,
        delays=measure.delays(metrics, sorted((run.folder / "logs").glob("worker-*.log"))),
        cpu_share=run.usage.cpu_s / run.usage.wall_s / (os.cpu_count() or 1),
        lengths=[length for step in steps for length in step["lengths"]],
        abandoned=measure.abandoned_counts(metrics),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--modes", nargs="+", choices=[mode.name for mode in MODES], help="default: all")
    parser.add_argument(
        "--steps", type=int, default=14, help="of a mode that overlaps; the first four are not measured"
    )
    parser.add_argument(
        "--redundant", type=int, default=0, help="completions that are started besides those of a group"
    )
    parser.add_argument("--wait", type=float, default=0.0, help="rollout.redundant_wait")
    parser.add_argument(
        "--packs-in-flight", type=int, default=8, help="worker.packs_in_flight; 0: as many as the engine makes use of"
    )
    parser.add_argument("--eval-every", type=int, default=0, help="steps between evaluations of 64 prompts; 0: none")
    parser.add_argument("--json", type=Path, help="append every row to this file")
    parser.add_argument("--keep", type=Path, help="keep the folders of the runs here")
    options = parser.parse_args(arguments)
    logs.configure("asynchrony", level="error")
    rows: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="asynchrony-") as scratch:
        for num_workers in options.workers:
            job = Job(num_workers, SimulatedOptions(), packs_in_flight=options.packs_in_flight, measured=options.steps)
            job = replace(job, eval_every=options.eval_every)
            for mode in MODES:
                if options.modes and mode.name not in options.modes:
                    continue
                mode = mode.with_redundancy(options.redundant, options.wait)
                folder = (
                    options.keep or Path(scratch)
                ) / f"{num_workers}-{mode.name.replace(', ', '-').replace(' ', '-')}"
                folder.mkdir(parents=True)
                rows.append(run_mode(folder.absolute(), job, mode))
                print(table(rows[-1:], header=len(rows) == 1), flush=True)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(asdict(rows[-1])) + "\n")
    print(f"\n{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[2]:.1f}\n")
    print(table(rows))
    return 0
