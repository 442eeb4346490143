"""`penstock plan run.toml`: which service of a run waits for which, and the memory that it needs, before it is started."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console.cli.options import PlanOptions
from penstock.deploy.plan.memory.report import RankMemory, parse_size
from penstock.deploy.plan.simulated_run import SimulatedRun
from penstock.deploy.plan.simulation import Durations, EnginePace, Fleet, LengthMix, Outcome
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.errors import ConfigError
from penstock.protocol.secret_values import scrub
from penstock.rollout_service.engines.engine_client import LONG_TOKENS
from penstock.rollout_service.settings import RolloutSettings as WorkerSettings
from penstock.trainer.errors import NotEstimated
from penstock.trainer.groups.task_packs import choose_groups_per_message
from penstock.trainer.recovery.held_messages import HeldBound
from penstock.trainer.settings import RolloutSettings, TrainerSettings

_IDLE = 0.05  # a share of the time that is not worth a sentence
_BOUNDS = (0, 1, 2, 4, 8)
_MEASURED = 10  # steps
_PROMPT_TOKENS, _TASK_BYTES = 256.0, 2048.0  # of a usual prompt; they decide how many groups share a message
_DOES_NOT_FIT, _ERROR = 1, 2  # exit codes: of a rank that needs more than --rank-memory, of settings that are refused


@dataclass(frozen=True, slots=True)
class Waits:
    """Figures of some steps in a row; shares are of their time."""

    max_staleness: int
    tokens_per_s: float  # trained
    step_s: float  # from the end of one step to the end of the next
    trainer_idle: float
    engines_idle: float  # without a running sequence, mean over engines
    slots_used: float  # tokens generated, of those that full engines would have generated
    staleness_mean: float  # versions, of the trained tokens
    dropped: int  # groups, in the whole run
    trained: int
    ideal_tokens_per_s: float  # if the role with the larger share of the work never waited
    mean_trained: float  # tokens of a completion that is trained
    mean_started: float  # and of all that were started for the same groups, had each gone to its end
    abandoned_share: float  # of the sampled tokens, in the whole run: of completions that were started and not kept


def measure_waits(
    outcome: Outcome, fleet: Fleet, durations: Durations, *, max_staleness: int, first: int, num: int
) -> Waits:
    steps = outcome.steps[first : first + num]
    (since, busy_0, tokens_0), (until, busy_1, tokens_1) = outcome.busy[first - 1], outcome.busy[first + num - 1]
    wall_s = until - since
    ages: Counter[int] = sum((step.ages for step in steps), Counter())
    num_tokens = sum(sum(step.lengths) for step in steps)
    per_step = num_tokens / num
    started = [length for step in steps for group in step.groups for length in outcome.sampled[group]]
    sampled = outcome.busy[-1][2]
    trains = per_step / (durations.step_s + durations.token_s * per_step)
    return Waits(
        max_staleness=max_staleness,
        tokens_per_s=num_tokens / wall_s,
        step_s=wall_s / num,
        trainer_idle=max(0.0, 1.0 - sum(step.ended - step.started for step in steps) / wall_s),
        engines_idle=max(0.0, 1.0 - (busy_1 - busy_0) / wall_s / fleet.num_workers),
        slots_used=(tokens_1 - tokens_0) / wall_s / (fleet.num_workers * fleet.pace.tokens_per_s),
        staleness_mean=sum(age * count for age, count in ages.items()) / max(1, ages.total()),
        dropped=outcome.dropped.total(),
        trained=sum(len(step.groups) for step in outcome.steps),
        ideal_tokens_per_s=min(trains, fleet.num_workers * fleet.pace.tokens_per_s),
        mean_trained=num_tokens / sum(len(step.lengths) for step in steps),
        mean_started=sum(started) / len(started),
        abandoned_share=outcome.abandoned_tokens / sampled,
    )


def simulate(run: SimulatedRun, fleet: Fleet, durations: Durations, *, max_staleness: int, num: int) -> Waits:
    """Run the steps that fill the queues, ``num`` that are measured, and those in which the run ends (`num_steps`)."""
    return measure_waits(run.run(), fleet, durations, max_staleness=max_staleness, first=max_staleness + 3, num=num)


def num_steps(max_staleness: int, num: int) -> int:
    """Return the steps of a run of which ``num`` are measured: near its end a run issues less."""
    return max_staleness + 3 + num + max_staleness + 1


def _drains(update_mode: str, max_new_tokens: int) -> bool:
    return update_mode == "drain" or (update_mode == "auto" and max_new_tokens <= LONG_TOKENS)


def describe_waits(now: Waits, others: list[Waits], fleet: Fleet, sequences_per_pack: int) -> list[str]:
    lines = []
    in_flight = fleet.packs_in_flight * sequences_per_pack
    if now.max_staleness and 0 < in_flight < 2 * fleet.pace.slots and now.slots_used < 1.0 - _IDLE:
        needed = -(-2 * fleet.pace.slots // sequences_per_pack)
        lines.append(
            f"worker.packs_in_flight = {fleet.packs_in_flight} keeps at most {in_flight} sequences for the {fleet.pace.slots} "
            f"slots of an engine, and fewer when the short ones of a group have ended; try {needed}, or 0: as many as the engine makes use of"
        )
    if now.trainer_idle > _IDLE:
        lines.append(f"the trainer waits for rollouts {now.trainer_idle:.0%} of the time")
    if now.slots_used < 1.0 - _IDLE:
        what = f"{1.0 - now.slots_used:.0%} of the engines' capacity is unused"
        if now.trainer_idle <= _IDLE:
            lines.append(f"the workers wait for the trainer: {what}; fewer workers, or a faster trainer")
        else:
            lines.append(f"{what} while the longest completions of a batch end")
    if now.abandoned_share:
        lines.append(
            f"redundant completions: {now.abandoned_share:.0%} of the sampled tokens are not kept, and what is trained is biased to "
            f"short completions: {now.mean_trained:.0f} tokens on average, of all that were started {now.mean_started:.0f}"
        )
    if now.dropped:
        lines.append(
            f"{now.dropped} of {now.dropped + now.trained} groups are too old when they arrive: dropped, and sampled again"
        )
    better = [other for other in others if other.tokens_per_s > now.tokens_per_s * (1.0 + _IDLE)]
    if better:
        least = min(better, key=lambda one: one.max_staleness)
        most = max(better, key=lambda one: one.tokens_per_s)
        for waits in dict.fromkeys((least, most)):
            lines.append(
                f"rollout.max_staleness = {waits.max_staleness} would train {waits.tokens_per_s / now.tokens_per_s:.2f} times as "
                f"many tokens, {waits.staleness_mean:.1f} versions old on average"
            )
    if not lines:
        lines.append("no service waits for long: no other bound on staleness trains more than 5 % faster")
    return lines


def waits_table(rows: list[Waits], chosen: int) -> str:
    lines = ["max_staleness  tokens/s  of ideal  trainer idle  engines idle  slots used  mean age  dropped groups"]
    for row in rows:
        mark = "*" if row.max_staleness == chosen else " "
        lines.append(
            f"{row.max_staleness:>12}{mark}  {row.tokens_per_s:>8.0f}  {row.tokens_per_s / row.ideal_tokens_per_s:>8.0%}  "
            f"{row.trainer_idle:>12.1%}  {row.engines_idle:>12.1%}  {row.slots_used:>10.1%}  {row.staleness_mean:>8.2f}  "
            f"{row.dropped:>6} of {row.dropped + row.trained}"
        )
    return "\n".join(lines)


def describe_held(trainer: TrainerSettings, groups_per_message: int) -> str:
    """Return what the bound on held messages means for checkpoints; raises ConfigError if no step can be made."""
    groups, most = trainer.rollout.groups_per_step, trainer.retention.scored_messages
    bound = HeldBound(most, 0, groups, -(-groups // groups_per_message))
    if warning := bound.check():
        return warning
    return (
        f"scored messages are held until a checkpoint: retention.scored_messages = {most:,} makes one due after {bound.steps_between():,} "
        f"steps at the latest, trainer.checkpoint_every = {trainer.trainer.checkpoint_every:,} after as many"
    )


def plan_run(arguments: Sequence[str], options: PlanOptions) -> int:
    """Print the plan; returns 1 if a rank needs more than its limit, 2 after the reason why settings or figures are refused."""
    try:
        files, overrides = split_arguments(arguments)
        trainer = _trainer(files, overrides, on_gpu=options.gpu)
        worker = load(WorkerSettings, files=files, overrides=overrides, environ=os.environ).settings
        per_message = choose_groups_per_message(
            trainer.rollout, prompt_tokens=_PROMPT_TOKENS, bytes_per_task=_TASK_BYTES
        )
        rollout = trainer.rollout.model_copy(update={"groups_per_message": per_message})
        for name in ("workers", "slots", "engine_rate", "trainer_rate"):
            if getattr(options, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected a number above 0")
        full_s = options.slots / options.engine_rate
        alone_s = 1.0 / options.lone_rate if options.lone_rate else full_s / 3
        fleet = Fleet(
            num_workers=options.workers,
            pace=EnginePace(options.slots, min(alone_s, full_s), full_s),
            packs_in_flight=worker.worker.packs_in_flight,
            drains=_drains(worker.worker.update_mode, trainer.rollout.max_new_tokens),
        )
        rows = _simulate(options, trainer, rollout, fleet)
        memory = _memory(options, trainer)
        held = describe_held(trainer, per_message)
    except (ConfigError, NotEstimated, ValueError) as err:
        sys.stderr.write(scrub(f"penstock plan: {err}\n"))
        return _ERROR
    chosen = trainer.rollout.max_staleness
    now = next(row for row in rows if row.max_staleness == chosen)
    sentences = describe_waits(now, rows, fleet, rollout.groups_per_message * rollout.started_completions)
    sentences.append(held)
    sentences += _of_shared_gpu(memory, trainer, now, options)
    if options.json:
        of_rank = {"not_estimated": memory} if isinstance(memory, str) else memory.document()
        waits = [dataclasses.asdict(row) for row in rows]
        sys.stdout.write(json.dumps({"waits": waits, "says": sentences, "memory": of_rank}) + "\n")
    else:
        sys.stdout.write(
            f"who waits for whom ({options.workers} workers, * the run file's bound)\n\n{waits_table(rows, chosen)}\n\n"
        )
        sys.stdout.write("".join(f"- {line}\n" for line in sentences))
        of_rank = f"memory of a rank: not estimated\n\n- {memory}\n" if isinstance(memory, str) else memory.text()
        sys.stdout.write(f"\n{of_rank}")
    return 0 if isinstance(memory, str) or memory.fits else _DOES_NOT_FIT


def _of_shared_gpu(
    memory: RankMemory | str, trainer: TrainerSettings, now: Waits, options: PlanOptions
) -> Iterator[str]:
    gpu = None if isinstance(memory, str) else memory.shared_gpu()
    if gpu is not None and trainer.placement.shared != "never":
        tokens = trainer.rollout.groups_per_step * trainer.rollout.group_size * now.mean_trained
        shares = gpu.shares(
            train_s=tokens / options.trainer_rate,
            sample_s=tokens / options.engine_rate,
            max_staleness=trainer.rollout.max_staleness,
        )
        yield from gpu.lines(trainer.placement.shared, shares)


def _trainer(files: Sequence[Path], overrides: Sequence[str], *, on_gpu: bool) -> TrainerSettings:
    """Return the trainer's settings; where none says otherwise, model.dtype is what the trainer takes on a GPU. Raises ConfigError."""
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ)
    if not on_gpu or loaded.origins["model.dtype"] != "default":
        return loaded.settings
    return load(
        TrainerSettings, files=files, overrides=[*overrides, "model.dtype=bfloat16"], environ=os.environ
    ).settings


def _memory(options: PlanOptions, trainer: TrainerSettings) -> RankMemory | str:
    """Return the memory of a rank, or why it is not estimated.

    Raises ConfigError for a limit that is no size, and NotEstimated if there is a limit and no estimate.
    """
    limit = None if options.rank_memory is None else parse_size(options.rank_memory, "--rank-memory")
    try:
        return RankMemory(trainer, limit=limit, on_gpu=options.gpu)
    except NotEstimated as err:
        if limit is not None:
            raise
        return str(err)


def _simulate(options: PlanOptions, trainer: TrainerSettings, rollout: RolloutSettings, fleet: Fleet) -> list[Waits]:
    mix = LengthMix(options.median or max(1.0, rollout.max_new_tokens / 20), rollout.max_new_tokens)
    durations = Durations(
        token_s=1.0 / options.trainer_rate, score_s=options.score, publish_s=options.publish, load_s=options.load
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


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("plan")
