"""What asynchrony buys with a real engine and a real step: the embedded engine on one core, the trainer on the other.

    python -m benchmarks.asynchrony_real
    python -m benchmarks.asynchrony_real --modes synchronous "asynchronous, 4" --steps 20

Every service is the real one, and so are the tokens and the optimizer steps. The model is the quickstart's, untrained: each token
ends a completion with the same small chance, so that lengths are geometric (mean about 90 tokens, the longest percentile more than
400, cut at 1024). A small learning rate keeps them so. One worker and the trainer are bound to a core each, with one thread each: while one waits for the
other, its core has nothing to do. The ideal is 1 / largest share of the two roles' work, measured in the synchronous run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.asynchrony import GROUP_SIZE, MODES, Mode, group_counts, staleness_shares, steps_around, write_inputs
from benchmarks.rig import machine

from penstock.console.live import run_snapshot
from penstock.console.live.panel import LivePanel
from penstock.console.report import curves
from penstock.console.tools.profile import profile
from penstock.deploy.local_run import TRAINER, LocalRun
from penstock.deploy.processes.child import Child, DeployError
from penstock.protocol import logs
from penstock.protocol.transport.bus import Bus

_RUN_S = 900.0
_LONGEST = 1024  # tokens
_RUN_FILE = """\
run = {{ id = "real", dir = "{folder}/runs", seed = 0 }}
model = {{ path = "{folder}/model" }}
reward = {{ name = "exact_match" }}

[data]
train = "{folder}/data/train.jsonl"
max_prompt_tokens = 32

[rollout]
groups_per_step = {groups_per_step}
group_size = {group_size}
groups_per_message = 1
max_staleness = {max_staleness}
max_new_tokens = {longest}
max_attempts = 100

[trainer]
steps = {steps}
lr = 1e-6
checkpoint_every = 100000
checkpoint_every_s = 0.0
keep_versions = {keep_versions}

[algorithm]
epochs = {epochs}

[worker]
packs_in_flight = {packs_in_flight}
update_mode = "{update_mode}"
"""


@dataclass(frozen=True)
class Row:
    """One mode; shares of the time of the steps that are measured, or (of the worker) of the whole run."""

    mode: str
    tokens_per_s: float
    step_s: float
    train_s: float  # of a step
    trainer_idle: float
    rollout_waiting: float
    staleness_mean: float
    staleness_most: int
    dropped: int
    trained: int


class BoundRun(LocalRun):
    """A run whose trainer has one core and whose worker, with its engine, the other."""

    def _trainer(self, *, waits: bool = False) -> Child:
        return _bound(super()._trainer(waits=waits), core=0)

    def _worker(self, name: str) -> Child:
        return _bound(super()._worker(name), core=1)


def _bound(child: Child, *, core: int) -> Child:
    child.command[:0] = ["taskset", "-c", str(core)]
    return child


def run_mode(folder: Path, mode: Mode, *, groups: int, measured: int, epochs: int) -> Row:
    """Run the job in one mode; raises DeployError when the trainer fails or needs too long."""
    first, last = steps_around(mode)
    steps = first + measured + last
    write_inputs(folder, mode, steps=steps, groups_per_step=groups, num_eval=1)
    run_file = folder / "run.toml"
    run_file.write_text(
        _RUN_FILE.format(
            folder=folder, groups_per_step=groups, group_size=GROUP_SIZE, max_staleness=mode.max_staleness,
            longest=_LONGEST, steps=steps, keep_versions=mode.max_staleness + 8, packs_in_flight=groups,
            update_mode=mode.update_mode, epochs=epochs,
        )
    )  # fmt: skip
    with BoundRun([str(run_file)], num_workers=1, environ={**os.environ, "OMP_NUM_THREADS": "1"}) as run:
        run.start_services()
        with Bus.connect(run.nats, name="real") as bus, LivePanel("real", bus, mode="quiet", folder=run.folder):
            run.start_trainer()
            code = run.wait(_RUN_S)
        if code != 0:
            what = f"did not end within {_RUN_S:.0f} s" if code is None else f"ended with exit code {code}"
            raise DeployError(f"{mode.name}: the trainer {what}\n{run.log_tail(TRAINER)}")
    return _row(run.folder, mode, first=first, measured=measured)


def _row(folder: Path, mode: Mode, *, first: int, measured: int) -> Row:
    metrics = folder / "metrics.jsonl"
    lines = map(json.loads, metrics.read_text().splitlines())
    steps: list[Mapping[str, Any]] = [line for line in lines if line["kind"] == "step"]
    window = steps[first:][:measured]
    wall_s = window[-1]["at"] - steps[first - 1]["at"]
    services = profile(curves.rows(folder), run_snapshot.load_totals(folder)).services
    waiting = [
        service.waiting_share for service in services if service.role == "rollout" and service.waiting_share is not None
    ]
    shares = staleness_shares(metrics, first)
    dropped, trained = group_counts(metrics)
    return Row(
        mode=mode.name,
        tokens_per_s=sum(step["tokens_trained"] for step in window) / wall_s,
        step_s=wall_s / measured,
        train_s=sum(step["step_s"] for step in window) / measured,
        trainer_idle=sum(step["wait_s"] for step in window) / wall_s,
        rollout_waiting=sum(waiting) / max(1, len(waiting)),
        staleness_mean=sum(age * share for age, share in shares.items()),
        staleness_most=max(shares),
        dropped=dropped,
        trained=trained,
    )


def table(rows: Sequence[Row]) -> str:
    """Return rows as Markdown; ratios are to the synchronous row, if there is one."""
    base = next((row for row in rows if row.mode == "synchronous"), None)
    lines = [
        "| mode | trained tokens/s | over synchronous | s of a step | of it training | trainer waits | worker waits | staleness mean, most | dropped of trained groups |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.mode} | {row.tokens_per_s:.0f} | {row.tokens_per_s / base.tokens_per_s if base else float('nan'):.2f} | {row.step_s:.2f} "
        f"| {row.train_s:.2f} | {row.trainer_idle:.1%} | {row.rollout_waiting:.1%} | {row.staleness_mean:.2f}, {row.staleness_most} "
        f"| {row.dropped} of {row.trained} |"
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=[mode.name for mode in MODES], help="default: those not draining")
    parser.add_argument("--groups", type=int, default=12, help=f"groups of {GROUP_SIZE} of a step")
    parser.add_argument("--steps", type=int, default=20, help="that are measured")
    parser.add_argument(
        "--epochs", type=int, default=2, help="over each batch: with two the roles' shares are about equal"
    )
    options = parser.parse_args(arguments)
    logs.configure("asynchrony", level="error")
    chosen = [m for m in MODES if (m.name in options.modes if options.modes else m.update_mode != "drain")]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="asynchrony-") as scratch:
        for mode in chosen:
            folder = Path(scratch) / mode.name.replace(", ", "-").replace(" ", "-")
            folder.mkdir()
            rows.append(run_mode(folder, mode, groups=options.groups, measured=options.steps, epochs=options.epochs))
            print(table(rows).splitlines()[-1], flush=True)
    print(f"\n{machine()}\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
