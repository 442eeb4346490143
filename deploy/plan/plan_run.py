"""`penstock plan run.toml`: which service of a run waits for which, and the memory that it needs, before it is started."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from penstock.console.cli.options import PlanOptions
from penstock.deploy.placement.needs import trainer_on_gpu
from penstock.deploy.placement.placement import DoesNotFit
from penstock.deploy.placement.planner import planned
from penstock.deploy.placement.run_placement import RunPlacement, parse_gpus, place_run
from penstock.deploy.plan.memory.model_shape import read_shape
from penstock.deploy.plan.memory.plan_inputs import plan_inputs
from penstock.deploy.plan.memory.report import RankMemory, parse_size
from penstock.deploy.plan.rates import PROMPT_TOKENS, AssumedRates, assumed_rates, describe_rates, phases
from penstock.deploy.plan.simulated_run import SimulatedRun
from penstock.deploy.plan.simulation import Durations, Fleet, Outcome
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.errors import ConfigError
from penstock.protocol.process_end import error_text
from penstock.protocol.weights import shared_segments as segments
from penstock.rollout_service.settings import RolloutSettings as WorkerSettings
from penstock.rollout_service.weights.cache_folder import SHARE
from penstock.rollout_service.weights.mirror_slot import NUM_REGULAR_SLOTS
from penstock.trainer.errors import NotEstimated
from penstock.trainer.groups.task_packs import choose_groups_per_message
from penstock.trainer.recovery.held_messages import HeldBound
from penstock.trainer.settings import RolloutSettings, TrainerSettings

_IDLE = 0.05  # a share of the time that is not worth a sentence
_BOUNDS = (0, 1, 2, 4, 8)
_MEASURED = 10  # steps
_TASK_BYTES = 2048.0  # of a usual prompt; how many groups share a message depends on it
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


def num_steps(max_staleness: int, num: int) -> int:
    """Return the steps of a run: those that fill the queues, ``num`` that are measured, and its end, near which it issues less."""
    return max_staleness + 3 + num + max_staleness + 1


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of the run file that trains more, by the plan's own simulation."""

    settings: tuple[str, ...]  # as SECTION.KEY=VALUE
    waits: Waits  # with it

    def text(self, now: Waits) -> str:
        return (
            f"{' '.join(self.settings)} would train {self.waits.tokens_per_s / now.tokens_per_s:.2f} times as many tokens, "
            f"{self.waits.staleness_mean:.1f} versions old on average"
        )


def advise(now: Waits, candidates: Sequence[Advice]) -> list[Advice]:
    """Return what trains over 5 % more: the candidate with the lowest bound on staleness, and the fastest."""
    better = [one for one in candidates if one.waits.tokens_per_s > now.tokens_per_s * (1.0 + _IDLE)]
    if not better:
        return []
    least = min(better, key=lambda one: (one.waits.max_staleness, len(one.settings)))
    return list(dict.fromkeys((least, max(better, key=lambda one: one.waits.tokens_per_s))))


def describe_waits(now: Waits, advice: Sequence[Advice], fleet: Fleet, sequences_per_pack: int) -> list[str]:
    lines = []
    in_flight = fleet.packs_in_flight * sequences_per_pack
    if now.max_staleness and 0 < in_flight < 2 * fleet.pace.slots and now.slots_used < 1.0 - _IDLE:
        lines.append(
            f"worker.packs_in_flight = {fleet.packs_in_flight} keeps at most {in_flight} sequences for the {fleet.pace.slots} "
            "slots of a worker's engines, and fewer when the short ones of a group have ended; 0: as many as the engines make use of"
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
    lines += [one.text(now) for one in advice]
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
        placed = None
        if options.gpus is not None:
            placed = place_run(arguments, os.environ, workers=options.workers or None, gpus=parse_gpus(options.gpus))
            if options.workers is None:
                options = dataclasses.replace(options, workers=placed.num_workers)
        on_gpu = options.gpu or options.gpu_kind is not None or placed is not None
        files, overrides = split_arguments([*arguments, *(placed.overrides if placed else ())])
        if on_gpu:
            trainer = trainer_on_gpu(files, overrides, os.environ).settings
        else:
            trainer = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ).settings
        worker = load(WorkerSettings, files=files, overrides=overrides, environ=os.environ).settings
        per_message = choose_groups_per_message(
            trainer.rollout, prompt_tokens=PROMPT_TOKENS, bytes_per_task=_TASK_BYTES
        )
        rollout = trainer.rollout.model_copy(update={"groups_per_message": per_message})
        rates = assumed_rates(options, trainer, worker)
        rows = _simulate(trainer, rollout, rates, rates.fleet, _BOUNDS)
        now = next(row for row in rows if row.max_staleness == rollout.max_staleness)
        advice = advise(now, _candidates(trainer, rollout, rates, rows))
        memory = _memory(options, trainer, placed, on_gpu=on_gpu)
        held = describe_held(trainer, per_message)
    except (ConfigError, NotEstimated, ValueError) as err:
        sys.stderr.write(error_text(f"penstock plan: {err}\n"))
        return _DOES_NOT_FIT if isinstance(err, DoesNotFit) else _ERROR
    tokens_per_step = now.tokens_per_s * now.step_s
    sentences = describe_rates(rates, options, tokens_per_step)
    sentences += describe_waits(now, advice, rates.fleet, rollout.groups_per_message * rollout.started_completions)
    if placed is not None and placed.placement.takes_turns and not isinstance(memory, str):
        alone = phases(rates, tokens_per_step)
        turns = memory.turns(max_staleness=rollout.max_staleness, sample_s=alone["sample"], train_s=alone["train"])
        sentences.append(turns.text())
    sentences += [held, *_describe_copies(trainer, options)]
    if options.json:
        document = {
            "waits": [dataclasses.asdict(row) for row in rows],
            "says": sentences,
            "proposes": [{"settings": one.settings, "waits": dataclasses.asdict(one.waits)} for one in advice],
            "phases": phases(rates, tokens_per_step),
            "trainer": None if rates.trainer is None else dataclasses.asdict(rates.trainer),
            "publication": rates.publication,
            "memory": {"not_estimated": memory} if isinstance(memory, str) else memory.document(),
        } | ({} if placed is None else {"placement": placed.document()})
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        if placed is not None:
            sys.stdout.write("".join(f"{line}\n" for line in placed.placement.lines()) + "\n")
        sys.stdout.write(
            f"who waits for whom ({options.num_workers} workers, * the run file's bound)\n\n{waits_table(rows, rollout.max_staleness)}\n\n"
        )
        sys.stdout.write("".join(f"- {line}\n" for line in sentences))
        of_rank = f"memory of a rank: not estimated\n\n- {memory}\n" if isinstance(memory, str) else memory.text()
        sys.stdout.write(f"\n{of_rank}")
    return 0 if isinstance(memory, str) or memory.fits else _DOES_NOT_FIT


def _memory(
    options: PlanOptions, trainer: TrainerSettings, placed: RunPlacement | None, *, on_gpu: bool
) -> RankMemory | str:
    """Return the memory of a rank, or why it is not estimated.

    Raises ConfigError for a limit that is no size, and NotEstimated if there is a limit and no estimate.
    """
    limit = None if options.rank_memory is None else parse_size(options.rank_memory, "--rank-memory")
    if placed is not None and limit is None:
        limit = min(map(planned, placed.placement.trainer))
    try:
        return RankMemory(trainer, limit=limit, on_gpu=on_gpu)
    except NotEstimated as err:
        if limit is not None:
            raise
        return str(err)


def _simulate(
    trainer: TrainerSettings, rollout: RolloutSettings, rates: AssumedRates, fleet: Fleet, bounds: Iterable[int]
) -> list[Waits]:
    rows = []
    for bound in sorted({*bounds, rollout.max_staleness}):
        run = SimulatedRun(
            rollout.model_copy(update={"max_staleness": bound}),
            fleet,
            rates.durations,
            rates.mix,
            steps=num_steps(bound, _MEASURED),
            seed=trainer.run.seed,
            oldest_patience=trainer.trainer.oldest_patience,
        )
        rows.append(
            measure_waits(run.run(), fleet, rates.durations, max_staleness=bound, first=bound + 3, num=_MEASURED)
        )
    return rows


def _candidates(
    trainer: TrainerSettings, rollout: RolloutSettings, rates: AssumedRates, rows: list[Waits]
) -> list[Advice]:
    """Return the changes that are simulated: other bounds on staleness, and no fixed number of packs in flight, with the fastest bound too."""
    chosen = rollout.max_staleness
    found = [Advice(_with_bound(trainer, row.max_staleness), row) for row in rows]
    if rates.fleet.packs_in_flight:
        fastest = max(rows, key=lambda row: row.tokens_per_s).max_staleness
        free = dataclasses.replace(rates.fleet, packs_in_flight=0)
        rows = _simulate(trainer, rollout, rates, free, (fastest,))
        found += [Advice(("worker.packs_in_flight=0", *_with_bound(trainer, row.max_staleness)), row) for row in rows]
    return [one for one in found if one.settings and (one.waits.max_staleness == chosen or _is_accepted(trainer, one))]


def _with_bound(trainer: TrainerSettings, bound: int) -> tuple[str, ...]:
    """Return the settings of another bound on staleness: versions that may still be fetched must be kept."""
    if bound == trainer.rollout.max_staleness:
        return ()
    kept = (f"trainer.keep_versions={bound + 2}",) if trainer.trainer.keep_versions < bound + 2 else ()
    return (f"rollout.max_staleness={bound}", *kept)


def _is_accepted(trainer: TrainerSettings, advice: Advice) -> bool:
    """Return True if the other settings of the run allow that bound, as its trainer checks them."""
    bound = advice.waits.max_staleness
    changed = trainer.model_dump()
    changed["rollout"]["max_staleness"] = bound
    changed["trainer"]["keep_versions"] = max(bound + 2, trainer.trainer.keep_versions)
    try:
        TrainerSettings.model_validate(changed)
    except ValidationError:
        return False
    return True


def _describe_copies(trainer: TrainerSettings, options: PlanOptions) -> list[str]:
    """Return what the copies of the weights need on the hosts of workers, if the model's shape is known."""
    try:
        num_bytes = plan_inputs(trainer, read_shape(trainer.model.path, "model.path")).published_bytes
    except NotEstimated:
        return []
    most = NUM_REGULAR_SLOTS * num_bytes
    return [
        f"each worker keeps {NUM_REGULAR_SLOTS} copies of {num_bytes / 1e9:.2f} GB of weights: a host with {options.num_workers} workers keeps them in "
        f"{segments.SHARED_MEMORY} if {options.num_workers * most / SHARE / 1e9:.1f} GB of it and of its memory are free, else in the run's folder; "
        f"{segments.SHARE:.1%} of what is free besides may hold downloads that they share (worker.share_downloads)"
    ]


if __name__ == "__main__":
    from penstock.console.cli.main import run_verb

    run_verb("plan")
