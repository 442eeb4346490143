"""The same job on the virtual clock of `penstock plan`, to compare with the real services and for more workers than a machine carries.

python -m benchmarks.asynchrony.virtual --workers 8 32 1000
python -m benchmarks.asynchrony.virtual --workers 10000 --modes "asynchronous, 4" --steps 4
python -m benchmarks.asynchrony.virtual --like ROWS.jsonl        # what `benchmarks.asynchrony --json` wrote, with its delays
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.asynchrony.job import GROUP_SIZE, MODES, Job, Mode, write_inputs
from tests.rigs.simulated_engine import SimulatedOptions

from penstock.deploy.plan.outcome import Durations, Fleet
from penstock.deploy.plan.simulated_run import SimulatedRun
from penstock.deploy.plan.waits import Waits, measure
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.settings import DataSettings, RolloutSettings

_MOST_COMPARED = 64  # workers

# What the real services took between two roles on a machine of two cores, s.
SCORE_S, PUBLISH_S, DELIVER_S = 0.15, 0.1, 0.02


def simulate(job: Job, mode: Mode, *, patience: float, delays: Mapping[str, float] | None = None) -> Waits:
    """Return the figures of a mode, of the same prompts, lengths and steps as are measured of the real services.

    ``delays`` are those of a measured run (`measure.delays`); None: those of a quiet machine.
    """
    job = job.for_mode(mode)
    rollout = RolloutSettings(
        group_size=GROUP_SIZE,
        redundant_completions=mode.redundant,
        redundant_wait=mode.wait,
        groups_per_step=job.groups_per_step,
        groups_per_message=1,
        max_staleness=mode.max_staleness,
        max_attempts=100,
    )
    fleet = Fleet(
        num_workers=job.num_workers,
        pace=job.engine.pace,
        packs_in_flight=job.packs_in_flight,
        drains=mode.update_mode == "drain",
    )
    durations = Durations(
        token_s=job.token_s,
        step_s=job.step_s,
        score_s=SCORE_S,
        publish_s=PUBLISH_S,
        load_s=job.engine.load_s,
        deliver_s=DELIVER_S,
    )
    measured = dict(delays or {})
    if fleet.drains:  # what a worker measures is mostly the drain
        measured = {"between_s": measured["between_s"]} if measured else {}
    durations = replace(durations, **measured)
    with contextlib.ExitStack() as stack:
        # a fleet that no machine here carries has nothing to be compared with: its prompts have no text
        prompts = _prompts(stack, job, mode) if job.num_workers <= _MOST_COMPARED else None
        run = SimulatedRun(
            rollout, fleet, durations, job.engine.mix, steps=job.steps, oldest_patience=patience, prompts=prompts
        )
        outcome = run.run()
    return measure(outcome, fleet, durations, max_staleness=mode.max_staleness, first=job.first, num=job.measured)


def _prompts(stack: contextlib.ExitStack, job: Job, mode: Mode) -> PromptSet:
    """Return the prompts that the real services meet; their files last as long as the stack."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asynchrony-")))
    write_inputs(folder, mode, steps=job.steps, groups_per_step=job.groups_per_step, num_eval=job.eval_prompts)
    tokenizer = ChatTokenizer.read(folder / "model")
    reward = RewardSettings(name="exact_match")
    return PromptSet.open([folder / "data" / "train.jsonl"], data=DataSettings(), reward=reward, tokenizer=tokenizer)


def _compare(rows: Path, steps: int, patience: float) -> None:
    """Print measured rows beside the simulation of each with the delays of its run."""
    modes = {mode.name: mode for mode in _with_redundancy(MODES, range(GROUP_SIZE + 1), [0.0])}
    print("| workers | mode | measured tokens/s | simulated | difference |\n|---|---|---|---|---|")
    for measured in map(json.loads, rows.read_text().splitlines()):
        job = Job(measured["workers"], SimulatedOptions(), measured=steps)
        row = simulate(job, modes[measured["mode"]], patience=patience, delays=measured["delays"])
        rates = measured["tokens_per_s"], row.tokens_per_s
        print(
            f"| {job.num_workers} | {measured['mode']} | {rates[0]:.0f} | {rates[1]:.0f} | {rates[1] / rates[0] - 1:+.1%} |",
            flush=True,
        )


def _with_redundancy(modes: Sequence[Mode], redundant: Sequence[int], waits: Sequence[float]) -> list[Mode]:
    """Return each mode without redundancy, if 0 is among ``redundant``, and with each of the others and each wait."""
    rows = [mode.with_redundancy(extra, wait) for mode in modes for extra in redundant for wait in waits]
    return list(dict.fromkeys(rows))


def main() -> None:
    """Print a row for each mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--modes", nargs="+", choices=[mode.name for mode in MODES], help="default: all")
    parser.add_argument("--groups-per-worker", type=int, default=6, help="of a step")
    parser.add_argument(
        "--packs-in-flight", type=int, default=8, help="worker.packs_in_flight; 0: as many as the engine makes use of"
    )
    parser.add_argument("--steps", type=int, default=10, help="that are measured of each mode")
    parser.add_argument(
        "--redundant",
        type=int,
        nargs="+",
        default=[0],
        help=f"completions that are started besides the {GROUP_SIZE} of a group",
    )
    parser.add_argument(
        "--wait", type=float, nargs="+", default=[0.0], help="rollout.redundant_wait, of rows with --redundant"
    )
    parser.add_argument("--patience", type=float, default=3.0, help="trainer.oldest_patience")
    parser.add_argument("--like", type=Path, help="rows that benchmarks.asynchrony --json wrote: simulate each of them")
    given = parser.parse_args()
    if given.like:
        _compare(given.like, given.steps, given.patience)
        return
    print(
        "| workers | mode | trained tokens/s | of the ideal | trainer idle | engines idle | slots used | staleness mean "
        "| dropped of trained groups | s of a step | mean tokens trained, started | sampled and not kept | CPU s | peak MiB |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for num_workers in given.workers:
        job = Job(num_workers, SimulatedOptions(), packs_in_flight=given.packs_in_flight, measured=given.steps)
        job = replace(job, groups_per_worker=given.groups_per_worker)
        chosen = [mode for mode in MODES if not given.modes or mode.name in given.modes]
        for mode in _with_redundancy(chosen, given.redundant, given.wait):
            started = time.process_time()
            row = simulate(job, mode, patience=given.patience)
            print(
                f"| {num_workers} | {mode.name} | {row.tokens_per_s:.0f} | {row.tokens_per_s / row.ideal_tokens_per_s:.0%} "
                f"| {row.trainer_idle:.1%} | {row.engines_idle:.1%} | {row.slots_used:.1%} | {row.staleness_mean:.2f} "
                f"| {row.dropped} of {row.trained} | {row.step_s:.2f} | {row.mean_trained:.1f}, {row.mean_started:.1f} "
                f"| {row.abandoned_share:.1%} | {time.process_time() - started:.1f} "
                f"| {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
