"""The rates that a plan is simulated with: those of the command line, else of a kind of GPU, else the defaults of the command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from penstock.console.cli.options import PlanOptions
from penstock.deploy.plan.memory.model_shape import read_shape
from penstock.deploy.plan.memory.plan_inputs import PlanInputs, plan_inputs
from penstock.deploy.plan.rates import WHILE_TRAINING, TrainerRates, engine_rates, gpu_of, publication, trainer_rates
from penstock.deploy.plan.simulation import Durations, EnginePace, Fleet, LengthMix
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.engines.engine_client import LONG_TOKENS
from penstock.rollout_service.settings import RolloutSettings as WorkerSettings
from penstock.trainer.settings import TrainerSettings

PROMPT_TOKENS = 256.0  # of a usual prompt
# The time of the simulation grows with workers, and with seconds at a low rate.
_RATE, _SECONDS = (1, 1e9), (0, 86_400)
_BOUNDS = {  # of options
    **dict.fromkeys(("engine_rate", "lone_rate", "trainer_rate"), _RATE),
    **dict.fromkeys(("load", "publish", "score"), _SECONDS),
    "workers": (1, 1000),
    "slots": (1, 10_000),
}
_SLOTS, _ENGINE_RATE, _TRAINER_RATE, _SECOND = 64, 2000.0, 4000.0, 1.0


@dataclass(frozen=True, slots=True)
class AssumedRates:
    mix: LengthMix
    fleet: Fleet
    durations: Durations
    gpus_per_engine: int
    slots: int  # of one engine
    engine_rate: float  # tokens/s of one engine with all slots in use
    trainer: TrainerRates | None  # None: without a kind of GPU
    publication: dict[str, float]  # seconds by stage; empty without a kind of GPU


def assumed_rates(options: PlanOptions, trainer: TrainerSettings, worker: WorkerSettings) -> AssumedRates:
    """Return the rates; raises ConfigError for a value that is not possible, and for a kind of GPU that is not known or too small.

    Raises NotEstimated for a model whose shape is not known, where a kind of GPU is given.
    """
    longest = trainer.rollout.max_new_tokens
    for name, (least, most) in {**_BOUNDS, "median": (1, longest)}.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:  # also NaN
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: expected a number of {least:g} to {most:g}")
    mix = LengthMix(max(1.0, longest / 20) if options.median is None else options.median, longest)
    servers, gpus = servers_of(worker)
    slots, engine_rate, trainer_rate = options.slots, options.engine_rate, options.trainer_rate
    publish_s, load_s, lone_rate, prompt_s = options.publish, options.load, options.lone_rate, 0.0
    trained, stages = None, {}
    if options.gpu_kind is not None:
        gpu, shape = gpu_of(options.gpu_kind), read_shape(trainer.model.path, "model.path")
        found = engine_rates(shape, gpu, gpus=gpus, prompt=PROMPT_TOKENS, completion=mix.mean_tokens, sequences=slots)
        trained = trainer_rates(_usual(plan_inputs(trainer, shape), mix), gpu)
        ranks, stage = trainer.trainer.num_ranks, trainer.trainer.zero_stage
        on_device = trainer.trainer.published_words == "device"
        stages = publication(shape, ranks=ranks, zero_3=stage == 3, words_on_device=on_device)
        slots, engine_rate = found.sequences, engine_rate or found.tokens_per_s
        lone_rate, prompt_s = lone_rate or 1.0 / found.step_s_alone, found.prompt_s / servers
        trainer_rate = trainer_rate or trained.tokens_per_s
        publish_s = sum(stages.values()) - stages["pause"] if publish_s is None else publish_s
        load_s = stages["pause"] if load_s is None else load_s
    slots, engine_rate = slots or _SLOTS, engine_rate or _ENGINE_RATE
    full_s = slots / engine_rate
    alone_s = min(1.0 / lone_rate if lone_rate else full_s / 3, full_s)
    return AssumedRates(
        mix,
        Fleet(
            num_workers=options.workers,
            pace=EnginePace(servers * slots, alone_s, full_s, prompt_s),
            packs_in_flight=worker.worker.packs_in_flight,
            drains=_drains(worker.worker.update_mode, longest),
            max_paused_share=worker.worker.max_paused_share,
            num_servers=servers,
        ),
        Durations(
            token_s=1.0 / (trainer_rate or _TRAINER_RATE),
            score_s=options.score,
            publish_s=_SECOND if publish_s is None else publish_s,
            load_s=_SECOND if load_s is None else load_s,
        ),
        gpus,
        slots,
        engine_rate,
        trained,
        stages,
    )


def servers_of(worker: WorkerSettings) -> tuple[int, int]:
    """Return the servers of a worker, replicas behind one of them too, and the GPUs that share each one's layers."""
    if worker.worker.kind.is_attached:
        return len(worker.worker.engine_urls), 1
    options: Any = worker.engine_options
    gpus = getattr(options, "tp_size", 0) or getattr(options, "tensor_parallel_size", 1)
    return getattr(options, "engines", 1) * getattr(options, "dp_size", 1), gpus


def _usual(inputs: PlanInputs, mix: LengthMix) -> PlanInputs:
    """Return a step of usual rows, where the plan of memory takes the longest."""
    batch = inputs.batch
    prompt, completion = min(batch.prompt_tokens, int(PROMPT_TOKENS)), max(1, round(mix.mean_tokens))
    return replace(inputs, batch=replace(batch, prompt_tokens=prompt, completion_tokens=completion))


def _drains(update_mode: str, max_new_tokens: int) -> bool:
    return update_mode == "drain" or (update_mode == "auto" and max_new_tokens <= LONG_TOKENS)


def phases(rates: AssumedRates, tokens_per_step: float) -> dict[str, float]:
    """Return the seconds of a step's phases, each as if it waited for no other."""
    durations, fleet = rates.durations, rates.fleet
    return {
        "sample": tokens_per_step / (fleet.num_workers * fleet.pace.tokens_per_s),
        "score": durations.score_s,
        "train": durations.step_s + durations.token_s * tokens_per_step,
        "publish": durations.publish_s + durations.load_s,
    }


def describe_rates(rates: AssumedRates, options: PlanOptions, tokens_per_step: float) -> list[str]:
    fleet, trained = rates.fleet, rates.trainer
    num = fleet.num_workers * fleet.num_servers
    shared = f" of {rates.gpus_per_engine} GPUs each" if rates.gpus_per_engine > 1 else ""
    source = f", rates of {options.gpu_kind} from deploy/plan/rates.toml" if options.gpu_kind else ""
    lines = [
        f"engines: {num}{shared}, {rates.slots} sequences each, {rates.engine_rate:,.0f} tokens/s each{source}",
        f"trainer: {1.0 / rates.durations.token_s:,.0f} sampled tokens/s"
        + (f", MFU {trained.mfu:.2f}; the head takes {trained.head_share:.0%} of the layers' time" if trained else ""),
        "a step, each phase alone: "
        + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases(rates, tokens_per_step).items()),
    ]
    if stages := {name: seconds for name, seconds in rates.publication.items() if seconds}:
        of_trainer = sum(seconds for name, seconds in stages.items() if name in WHILE_TRAINING)
        lines.append(
            f"a version, while training goes on: {', '.join(f'{name} {seconds:.2f} s' for name, seconds in stages.items())}; "
            f"{of_trainer:.1f} s at the trainer, {sum(stages.values()):.1f} s from the step to the engine"
        )
    return lines
