"""Measure what asynchrony buys: one job, through the real services, with every bound on staleness.

    make bench-async                                       # 2 and 8 workers, every mode (half an hour)
    python -m benchmarks.asynchrony --workers 8 --modes synchronous default

nats-server, S3 server, reward service, rollout workers and the trainer with its loop are the real ones. The engines and the
optimizer step take time without computing (`tests/rigs/simulated_engine.py`, `simulated_trainer.py`), so that only scheduling differs
between the rows, and a machine of two cores carries the run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean

from benchmarks.rig import machine
from tests.rigs import simulated_trainer
from tests.rigs.simulated_engine import SimulatedOptions, engine_shares
from tests.small_run import write_small_run

from penstock.deploy.local_run import TRAINER, LocalRun
from penstock.deploy.processes.child import Child, DeployError
from penstock.protocol import logs
from penstock.trainer.rollout_settings import RolloutSettings

GROUP_SIZE = 8
_CONTEXT = 2048  # positions of the tiny model
_HEADER = (
    "| workers | mode | trained tokens/s | over synchronous | ideal over synchronous | trainer idle | engines idle "
    "| slots used | staleness mean, most | dropped of trained groups | s of a step | mean tokens trained "
    "| CPU |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
_RUN_S = 900.0


@dataclass(frozen=True)
class Mode:
    """How far generation may run ahead of training, and how new weights reach running sequences."""

    name: str
    max_staleness: int
    update_mode: str = "in_place"


MODES = (
    Mode("synchronous", 0),
    Mode("default", RolloutSettings.model_fields["max_staleness"].default, "auto"),
    Mode("one step off", 1, "drain"),
    Mode("asynchronous, 1", 1),
    Mode("asynchronous, 2, drain", 2, "drain"),
    Mode("asynchronous, 2", 2),
    Mode("asynchronous, 4, drain", 4, "drain"),
    Mode("asynchronous, 4", 4),
    Mode("asynchronous, 8, drain", 8, "drain"),
    Mode("asynchronous, 8", 8),
)


@dataclass(frozen=True)
class Job:
    """Sizes and durations; seconds are those of the real clock."""

    num_workers: int
    engine: SimulatedOptions
    groups_per_engine: int = 6  # of a step
    packs_in_flight: int = 0  # as many as the engines make use of
    train_share: float = 1.0  # seconds of training, in seconds of generation by engines that are always full
    step_s: float = 0.1  # of a step besides its tokens
    measured: int = 8  # steps
    first: int = 4  # step from which is measured: the ones before fill the queues
    last: int = 0  # steps after that: near its end a run issues less

    @property
    def groups_per_step(self) -> int:
        return self.groups_per_worker * self.num_workers

    @property
    def groups_per_worker(self) -> int:
        return self.groups_per_engine * self.engine.engines

    @property
    def tokens_per_s(self) -> float:
        return self.num_workers * self.engine.engines * self.engine.pace.tokens_per_s

    @property
    def token_s(self) -> float:
        """Seconds of training for a sampled token."""
        return self.train_share / self.tokens_per_s

    @property
    def steps(self) -> int:
        return self.first + self.measured + self.last

    @property
    def ideal_tokens_per_s(self) -> float:
        """Trained tokens in a second if the slower role never waited: 1 / largest share."""
        per_step = self.groups_per_step * GROUP_SIZE * self.engine.mix.mean_tokens
        return min(self.tokens_per_s, per_step / (self.step_s + per_step * self.token_s))

    def for_mode(self, mode: Mode) -> Job:
        first, last = steps_around(mode)
        if mode.max_staleness == 0:  # each worker takes its share at once, no more: otherwise one would take another's
            return replace(self, packs_in_flight=self.groups_per_worker, first=first, last=last)
        return replace(self, first=first, last=last)


def steps_around(mode: Mode) -> tuple[int, int]:
    """Return how many steps of a mode come before those that are measured, and after them."""
    return (2, 0) if mode.max_staleness == 0 else (mode.max_staleness + 3, mode.max_staleness + 1)


def write_run(folder: Path, job: Job, mode: Mode) -> Path:
    traced = job.engine.model_copy(update={"trace": str(folder / "trace")})
    run_file = write_small_run(
        folder,
        "asynchrony",
        num_train=(job.steps + mode.max_staleness + 2) * job.groups_per_step,
        data={"eval": []},
        rollout={
            "groups_per_step": job.groups_per_step, "group_size": GROUP_SIZE, "groups_per_message": 1,
            "max_staleness": mode.max_staleness, "max_new_tokens": job.engine.longest_tokens, "max_attempts": 100,
        },
        trainer={
            "steps": job.steps, "lr": 1e-6, "checkpoint_every": 100_000, "checkpoint_every_s": 0.0, "check_texts": 0,
            "store_logprobs": 0, "keep_versions": mode.max_staleness + 8, "micro_batch_tokens": 4096, "max_mismatch": 1000.0,
        },
        worker={
            "engine": "tests.rigs.simulated_engine:SIMULATED", "engine_options": traced.model_dump(),
            "packs_in_flight": job.packs_in_flight, "update_mode": mode.update_mode,
        },
    )  # fmt: skip
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": _CONTEXT}))
    return run_file


@dataclass(frozen=True)
class Measured:
    mode: str
    workers: int
    tokens_per_s: float  # trained
    step_s: float  # from the end of one step to the end of the next
    trainer_idle: float  # share of the time
    rollout_idle: float  # share of the time in which an engine runs no sequence, mean over engines
    slots_used: float  # tokens generated, as a share of what full engines would have generated
    staleness: dict[int, float]  # share of the trained tokens by age in versions
    dropped: int  # groups, in the whole run
    trained: int  # groups, in the whole run
    ideal_tokens_per_s: float
    cpu_share: float  # of this machine's cores, by all processes of the run
    lengths: Sequence[int] = field(repr=False, default=())  # of everything trained

    @property
    def staleness_mean(self) -> float:
        return sum(age * share for age, share in self.staleness.items())


def staleness_shares(metrics: Path, first: int) -> dict[int, float]:
    """Return the share of tokens by age over the steps after ``first``, from the trainer's metrics."""
    tokens: dict[int, int] = {}
    for line in metrics.read_text().splitlines():
        event = json.loads(line)
        if event.get("step", 0) > first:
            for age, count in event.get("staleness_tokens", {}).items():
                tokens[int(age)] = tokens.get(int(age), 0) + count
    total = max(1, sum(tokens.values()))
    return {age: count / total for age, count in sorted(tokens.items())}


def group_counts(metrics: Path) -> tuple[int, int]:
    groups = json.loads([line for line in metrics.read_text().splitlines() if '"groups"' in line][-1])["groups"]
    return sum(groups["dropped"].values()), groups["trained"]


def table(rows: Sequence[Measured], *, header: bool = True) -> str:
    base = {row.workers: row.tokens_per_s for row in rows if row.mode == "synchronous"}
    lines = [_HEADER] if header else []
    for row in rows:
        slower = base.get(row.workers)
        ratios = f"{row.tokens_per_s / slower:.2f} | {row.ideal_tokens_per_s / slower:.2f}" if slower else "| "
        lines.append(
            f"| {row.workers} | {row.mode} | {row.tokens_per_s:.0f} | {ratios} | {row.trainer_idle:.1%} | {row.rollout_idle:.1%} "
            f"| {row.slots_used:.1%} | {row.staleness_mean:.2f}, {max(row.staleness)} | {row.dropped} of {row.trained} "
            f"| {row.step_s:.2f} | {fmean(row.lengths):.1f} | {row.cpu_share:.0%} |"
        )
    return "\n".join(lines)


class SimulatedRun(LocalRun):
    """A run whose optimizer steps only take time."""

    def _trainer(self) -> Child:
        child = super()._trainer()
        at = child.command.index("penstock.trainer")
        # without -P: the benchmarks are imported from the working directory
        child.command = [sys.executable, "-m", simulated_trainer.__name__, *child.command[at + 2 :]]
        return child


def run_mode(folder: Path, job: Job, mode: Mode, settings: Sequence[str] = ()) -> Measured:
    """Measure one run; ``settings`` are added to those of the mode, as SECTION.KEY=VALUE."""
    job = job.for_mode(mode)
    run_file, steps_file = write_run(folder, job, mode), folder / "steps.jsonl"
    simulated = {"trace": str(steps_file), "token_s": job.token_s, "step_s": job.step_s}
    environ = {**os.environ, simulated_trainer.VARIABLE: json.dumps(simulated), "OMP_NUM_THREADS": "1"}
    with SimulatedRun([str(run_file), *settings], num_workers=job.num_workers, environ=environ) as run:
        run.start()
        code = run.wait(_RUN_S)
        if code != 0:
            what = f"did not end within {_RUN_S:.0f} s" if code is None else f"ended with exit code {code}"
            raise DeployError(f"{mode.name}: the trainer {what}\n{run.log_tail(TRAINER)}")
    steps = [json.loads(line) for line in steps_file.read_text().splitlines()]
    measured = steps[job.first :][: job.measured]
    since, until = steps[job.first - 1]["ended"], measured[-1]["ended"]
    metrics = run.folder / "metrics.jsonl"
    dropped, trained = group_counts(metrics)
    idle, used = engine_shares(folder / "trace", since, until, job.engine.pace.tokens_per_s)
    return Measured(
        mode=mode.name, workers=job.num_workers, step_s=(until - since) / len(measured),
        tokens_per_s=sum(sum(step["lengths"]) for step in measured) / (until - since),
        trainer_idle=1.0 - sum(step["ended"] - step["started"] for step in measured) / (until - since),
        rollout_idle=idle, slots_used=used, staleness=staleness_shares(metrics, job.first), dropped=dropped, trained=trained,
        ideal_tokens_per_s=job.ideal_tokens_per_s,
        cpu_share=run.usage.cpu_s / run.usage.wall_s / (os.cpu_count() or 1),
        lengths=[length for step in steps for length in step["lengths"]],
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--engines", type=int, default=1, help="servers of each worker")
    parser.add_argument("--modes", nargs="+", choices=[mode.name for mode in MODES], help="default: all")
    parser.add_argument(
        "--steps", type=int, default=14, help="of a mode that overlaps; the first four are not measured"
    )
    parser.add_argument(
        "--packs-in-flight", type=int, default=0, help="worker.packs_in_flight; 0: as many as are of use"
    )
    parser.add_argument("--json", type=Path, help="append every row to this file")
    parser.add_argument("--keep", type=Path, help="keep the folders of the runs here")
    options = parser.parse_args(arguments)
    logs.configure("asynchrony", level="error")
    rows: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="asynchrony-") as scratch:
        for num_workers in options.workers:
            job = Job(
                num_workers,
                SimulatedOptions(engines=options.engines),
                packs_in_flight=options.packs_in_flight,
                measured=options.steps,
            )
            for mode in MODES:
                if options.modes and mode.name not in options.modes:
                    continue
                folder = (
                    options.keep or Path(scratch)
                ) / f"{num_workers}-{mode.name.replace(', ', '-').replace(' ', '-')}"
                folder.mkdir(parents=True)
                rows.append(run_mode(folder.absolute(), job, mode))
                print(table(rows[-1:], header=len(rows) == 1), flush=True)
                if options.json:
                    with options.json.open("a") as file:
                        file.write(json.dumps(asdict(rows[-1])) + "\n")
    print(f"\n{machine()}\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
