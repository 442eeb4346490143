"""The rates that a plan is simulated with: those of the command line, else of a kind of GPU, else the defaults of the command.

Those of a kind of GPU are arithmetic over `rates.toml`; pure but for reading that file and the model's config.json.

Decode step of n sequences: the bytes of the weights and of their keys and values at the bandwidth, and their operations at the peak, and the
sums between GPUs that share layers. Training: the operations that are computed, recomputed ones too, at a share of the peak that was measured
for layers, and the bytes that the output head moves for each chunk of logits (`learner/output_head.py`). Publication: `benchmarks/weights/flow.md`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from penstock.console.cli.options import PlanOptions
from penstock.deploy.plan.memory.estimate import num_trained
from penstock.deploy.plan.memory.model_shape import BFLOAT16, FLOAT32, ModelShape, read_shape
from penstock.deploy.plan.memory.plan_inputs import PlanInputs, plan_inputs
from penstock.deploy.plan.simulation import Durations, EnginePace, Fleet, LengthMix
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.engines.engine_client import LONG_TOKENS
from penstock.rollout_service.engines.engine_kind import StartedServerSettings
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


@cache
def tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("rates.toml").read_text(encoding="utf-8"))


def _values(table: dict[str, Any]) -> dict[str, float]:
    return {name: float(entry["value"]) for name, entry in table.items()}


@dataclass(frozen=True, slots=True)
class GpuKind:
    kind: str
    memory_bytes: float
    bandwidth: float  # bytes/s
    training_share: float  # of the peak, by layers and head
    peak: float  # FLOP/s in bfloat16


def gpu_of(kind: str) -> GpuKind:
    known = tables()["gpu"]
    if kind not in known:
        raise ConfigError(
            f"--gpu-kind {kind}: expected one of {', '.join(known)}; for another GPU, give the rates themselves"
        )
    return GpuKind(kind, **_values(known[kind]))


@dataclass(frozen=True, slots=True)
class EngineRates:
    sequences: int  # that decode together
    step_s_alone: float
    step_s_full: float
    prompt_s: float  # of one prompt; nothing decodes meanwhile

    @property
    def tokens_per_s(self) -> float:
        return self.sequences / self.step_s_full


def engine_rates(
    shape: ModelShape, gpu: GpuKind, *, gpus: int, prompt: float, completion: float, sequences: int | None = None
) -> EngineRates:
    """Return the rates of one engine, whose weights ``gpus`` share, for prompts and completions of so many tokens on average.

    ``sequences`` is as many as the keys and values have room for, at most `most_sequences`, where it is None. Raises ConfigError if there is no
    room for a sequence.
    """
    engine = _values(tables()["engine"])
    weights, active = shape.parameters * BFLOAT16, (shape.active_body + shape.table) * BFLOAT16
    cached = 2 * shape.layers * shape.key_value * BFLOAT16 * (prompt + completion / 2)  # of a sequence halfway
    room = engine["memory_share"] * gpu.memory_bytes * gpus - weights
    if room < cached:
        raise ConfigError(
            f"{gpus} x {gpu.kind} have no room for {weights / 1e9:.1f} GB of weights and a sequence: let more GPUs share an engine "
            "(sglang.tp_size, vllm.tensor_parallel_size)"
        )
    fitting = int(min(engine["most_sequences"], room / cached))

    def step_s(running: int) -> float:
        read_s = (active + running * cached) / (engine["bandwidth_share"] * gpu.bandwidth)
        computed_s = (
            running * active / (engine["decode_share"] * gpu.peak)
        )  # 2 operations for each parameter of 2 bytes
        return (read_s + computed_s) / gpus + (2 * shape.layers * engine["all_reduce_s"] if gpus > 1 else 0.0)

    num = sequences or fitting
    prompt_s = prompt * active / (engine["prefill_share"] * gpu.peak * gpus)
    return EngineRates(num, step_s(1), step_s(num), prompt_s)


@dataclass(frozen=True, slots=True)
class TrainerRates:
    tokens_per_s: float  # sampled tokens, of all ranks
    mfu: float
    head_share: float  # of the time of the layers
    step_s: float  # of one optimizer step, of the rank that computes the most


def trainer_rates(inputs: PlanInputs, gpu: GpuKind) -> TrainerRates:
    work, share, table = inputs.work, gpu.training_share * gpu.peak, inputs.shape.table
    layers_s = (work.layers + work.recomputed) / share
    chunk = max(
        1, int(inputs.method.max_logits or tables()["head"]["chunk_logits"]["value"]) // inputs.shape.vocabulary
    )
    learns = not inputs.method.lora_rank
    # Logits are computed again in the backward pass; the weight's gradient is a product of two parts, which are added up in float32.
    more = (4 if learns else 2) * table * work.predictors
    moved = (3 * inputs.method.width + (3 * FLOAT32 if learns else 0)) * table * -(-work.predictors // chunk)
    head_s = (work.head + more) / share + moved / gpu.bandwidth
    reference_s = 0.0 if inputs.reference is None else (work.layers + work.head) / 3 / share
    step_s = layers_s + head_s + reference_s + offload_s(inputs)
    sampled = inputs.batch.num_groups * inputs.batch.group_size * inputs.batch.completion_tokens
    return TrainerRates(sampled / step_s, (work.layers + work.head) / step_s / gpu.peak, head_s / layers_s, step_s)


def offload_s(inputs: PlanInputs) -> float:
    """Return the seconds that a rank's offloads add to an optimizer step: AdamW on the CPU, and copies, as if nothing ran beside them."""
    method, largest, host = inputs.method, inputs.largest, _values(tables()["host"])
    copied, stepped = 0.0, 0.0
    if method.offload != "none":  # gradients to the host, and parameters back
        stepped = num_trained(inputs.rank_shape, method) / method.zero_ranks
        copied += stepped * (method.gradient_width + method.width)
    if method.offload == "parameters":  # for the forward pass, what is recomputed, and the backward pass
        passes = largest.count * (3 if method.checkpointing else 2)
        copied += passes * inputs.rank_shape.parameters * method.width / method.zero_ranks
    if method.activation_offload:
        copied += 2 * largest.count * largest.tokens * inputs.shape.layers * inputs.shape.hidden * method.width
    return stepped * host["adam_s_per_parameter"] + copied / host["pcie_bytes_per_s"]


def publication(shape: ModelShape, *, ranks: int, zero_3: bool, words_on_device: bool) -> dict[str, float]:
    """Return the seconds of a version by stage, one after the other, from the optimizer step to the engine and the copy behind it; bfloat16, a patch."""
    rate = _values(tables()["publication"]) | _values(tables()["host"])
    weights = shape.parameters * BFLOAT16
    words = rate["changed_share"] * shape.parameters
    patch, of_rank = words * rate["patch_bytes_per_word"], words / ranks
    found = of_rank * rate["bytes_per_word_from_device"]
    compared = "device_compare_bytes_per_s" if words_on_device else "pcie_bytes_per_s"
    return {
        "compare": weights / ranks / rate[compared] + found / rate["pcie_bytes_per_s"],
        "exchange": found / rate["ranks_bytes_per_s"] if zero_3 and ranks > 1 else 0.0,
        "write": of_rank * rate["write_s_per_word"],
        "hash and encode": weights / ranks / rate["hash_bytes_per_s"],
        "upload": patch / ranks / rate["sha256_bytes_per_s"] + patch / rate["store_bytes_per_s"],
        "announce": rate["manifest_s"],
        "fetch": patch / rate["store_bytes_per_s"],
        "stage": words * rate["stage_s_per_word"],
        "pause": rate["pause_s"],
        BEHIND: weights / rate["mirror_bytes_per_s"],
    }


# The trainer's; the others are a worker's.
WHILE_TRAINING = ("compare", "exchange", "write", "hash and encode", "upload", "announce")
BEHIND = "copy"  # while the engine serves the version; the next one waits for it


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
        publish_s = sum(stages.values()) - stages["pause"] - stages[BEHIND] if publish_s is None else publish_s
        load_s = stages["pause"] if load_s is None else load_s
    slots, engine_rate = slots or _SLOTS, engine_rate or _ENGINE_RATE
    full_s = slots / engine_rate
    alone_s = min(1.0 / lone_rate if lone_rate else full_s / 3, full_s)
    return AssumedRates(
        mix,
        Fleet(
            num_workers=options.num_workers,
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
    options: Any = worker.engine_options
    if worker.worker.kind.is_attached or not isinstance(options, StartedServerSettings):
        return len(worker.worker.engine_urls) or 1, 1
    return options.engines * getattr(options, "dp_size", 1), getattr(options, options.size_key)


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
            f"{of_trainer:.1f} s at the trainer, {sum(stages.values()) - stages[BEHIND]:.1f} s from the step to the engine"
        )
    return lines
