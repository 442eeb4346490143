"""`penstock plan run.toml`: what a run will wait for and the memory that it needs, before it is started."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.console.cli.options import PlanOptions
from penstock.deploy.plan.lengths import Durations, EnginePace, Fleet, LengthMix
from penstock.deploy.plan.memory.report import RankMemory, parse_size
from penstock.deploy.plan.simulated_run import SimulatedRun
from penstock.deploy.plan.waits import Waits, describe, num_steps, simulate, table
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.settings import RolloutSettings as WorkerSettings
from penstock.trainer.errors import NotEstimated
from penstock.trainer.groups.task_packs import choose_groups_per_message
from penstock.trainer.settings import RolloutSettings, TrainerSettings

_BOUNDS = (0, 1, 2, 4, 8)
_MEASURED = 10  # steps
_PROMPT_TOKENS, _TASK_BYTES = 256.0, 2048.0  # of a usual prompt; they decide how many groups share a message
_DOES_NOT_FIT, _ERROR = 1, 2  # exit codes: of a rank that needs more than --rank-memory, of settings that are refused


def plan_run(arguments: Sequence[str], given: PlanOptions) -> int:
    """Print the plan; returns 1 if a rank needs more than its limit, 2 after the reason why settings or figures are refused."""
    try:
        files, overrides = split_arguments(arguments)
        trainer = _trainer(files, overrides, on_gpu=given.gpu)
        worker = load(WorkerSettings, files=files, overrides=overrides, environ=os.environ).settings
        rollout = _with_packs(trainer.rollout)
        fleet = _fleet(given, worker)
        rows = _simulate(given, trainer, rollout, fleet)
        memory = _memory(given, trainer)
    except (ConfigError, NotEstimated, ValueError) as err:
        sys.stderr.write(f"penstock plan: {err}\n")
        return _ERROR
    chosen = trainer.rollout.max_staleness
    now = next(row for row in rows if row.max_staleness == chosen)
    sentences = describe(now, rows, fleet, rollout.groups_per_message * rollout.started_completions)
    if given.json:
        of_rank = {"not_estimated": memory} if isinstance(memory, str) else memory.document()
        waits = [dataclasses.asdict(row) for row in rows]
        sys.stdout.write(json.dumps({"waits": waits, "says": sentences, "memory": of_rank}) + "\n")
    else:
        sys.stdout.write(
            f"who waits for whom ({given.workers} workers, * the run file's bound)\n\n{table(rows, chosen)}\n\n"
        )
        sys.stdout.write("".join(f"- {line}\n" for line in sentences))
        of_rank = f"memory of a rank: not estimated\n\n- {memory}\n" if isinstance(memory, str) else memory.text()
        sys.stdout.write(f"\n{of_rank}")
    return 0 if isinstance(memory, str) or memory.fits else _DOES_NOT_FIT


def _trainer(files: Sequence[Path], overrides: Sequence[str], *, on_gpu: bool) -> TrainerSettings:
    """Return the trainer's settings; where none says otherwise, model.dtype is what the trainer takes on a GPU. Raises ConfigError."""
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ)
    if not on_gpu or loaded.origins["model.dtype"] != "default":
        return loaded.settings
    return load(
        TrainerSettings, files=files, overrides=[*overrides, "model.dtype=bfloat16"], environ=os.environ
    ).settings


def _memory(given: PlanOptions, trainer: TrainerSettings) -> RankMemory | str:
    """Return the memory of a rank, or why it is not estimated.

    Raises ConfigError for a limit that is no size, and NotEstimated if there is a limit and no estimate.
    """
    limit = None if given.rank_memory is None else parse_size(given.rank_memory, "--rank-memory")
    try:
        return RankMemory(trainer, limit=limit, on_gpu=given.gpu)
    except NotEstimated as err:
        if limit is not None:
            raise
        return str(err)


def _with_packs(rollout: RolloutSettings) -> RolloutSettings:
    chosen = choose_groups_per_message(rollout, prompt_tokens=_PROMPT_TOKENS, bytes_per_task=_TASK_BYTES)
    return rollout.model_copy(update={"groups_per_message": chosen})


def _fleet(given: PlanOptions, worker: WorkerSettings) -> Fleet:
    for name in ("workers", "slots", "engine_rate", "trainer_rate"):
        if getattr(given, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(given, name)}: expected a number above 0")
    full_s = given.slots / given.engine_rate
    alone_s = 1.0 / given.lone_rate if given.lone_rate else full_s / 3
    return Fleet(
        num_workers=given.workers,
        pace=EnginePace(given.slots, min(alone_s, full_s), full_s),
        packs_in_flight=worker.worker.packs_in_flight,
        drains=worker.worker.update_mode == "drain",
    )


def _simulate(given: PlanOptions, trainer: TrainerSettings, rollout: RolloutSettings, fleet: Fleet) -> list[Waits]:
    mix = LengthMix(given.median or max(1.0, rollout.max_new_tokens / 20), rollout.max_new_tokens)
    durations = Durations(
        token_s=1.0 / given.trainer_rate, score_s=given.score, publish_s=given.publish, load_s=given.load
    )
    rows = []
    for bound in sorted({*_BOUNDS, rollout.max_staleness}):
        run = SimulatedRun(
            rollout.model_copy(update={"max_staleness": bound}),
            fleet,
            durations,
            mix,
            steps=num_steps(bound, _MEASURED),
            seed=trainer.run.seed,
            oldest_patience=trainer.trainer.oldest_patience,
        )
        rows.append(simulate(run, fleet, durations, max_staleness=bound, num=_MEASURED))
    return rows
