"""Rates of engines, trainer and publication on a kind of GPU, by arithmetic over `rates.toml`; pure but for reading that file.

Decode step of n sequences: the bytes of the weights and of their keys and values at the bandwidth, and their operations at the peak, and the
sums between GPUs that share layers. Training: the operations that are computed, recomputed ones too, at a share of the peak that was measured
for layers, and the bytes that the output head moves for each chunk of logits. Publication: `benchmarks/weights/flow.md`.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.deploy.plan.memory.estimate import MAX_LOGITS
from penstock.deploy.plan.memory.model_shape import BFLOAT16, ModelShape
from penstock.deploy.plan.memory.plan_inputs import PlanInputs
from penstock.protocol.errors import ConfigError


@cache
def tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("rates.toml").read_text(encoding="utf-8"))


def _values(table: dict[str, Any]) -> dict[str, float]:
    return {name: float(entry["value"]) for name, entry in table.items()}


@dataclass(frozen=True, slots=True)
class Gpu:
    kind: str
    memory_bytes: float
    bandwidth: float  # bytes/s
    training_share: float  # of the peak, by layers and head
    peak: float  # FLOP/s in bfloat16


def gpu_of(kind: str) -> Gpu:
    known = tables()["gpu"]
    if kind not in known:
        raise ConfigError(
            f"--gpu-kind {kind}: expected one of {', '.join(known)}; for another GPU, give the rates themselves"
        )
    return Gpu(kind, **_values(known[kind]))


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
    shape: ModelShape, gpu: Gpu, *, gpus: int, prompt: float, completion: float, sequences: int | None = None
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


def trainer_rates(inputs: PlanInputs, gpu: Gpu) -> TrainerRates:
    work, share = inputs.work, gpu.training_share * gpu.peak
    layers_s = (work.layers + work.recomputed) / share
    chunk = max(1, MAX_LOGITS // inputs.shape.vocabulary)
    moved = tables()["head"]["passes_of_a_chunk"]["value"] * inputs.shape.table * inputs.method.width
    chunks = work.predictors / chunk if work.predictors > chunk else 0.0
    recomputed_head = 2 * inputs.shape.table * work.predictors  # each chunk is checkpointed
    head_s = (work.head + recomputed_head) / share + chunks * moved / gpu.bandwidth
    reference_s = 0.0 if inputs.reference is None else (work.layers + work.head) / 3 / share
    step_s = layers_s + head_s + reference_s
    sampled = inputs.batch.num_groups * inputs.batch.group_size * inputs.batch.completion_tokens
    return TrainerRates(sampled / step_s, (work.layers + work.head) / step_s / gpu.peak, head_s / layers_s, step_s)


def publication(shape: ModelShape, *, ranks: int, zero_3: bool, words_on_device: bool) -> dict[str, float]:
    """Return the seconds of a version by stage, one after the other, from the optimizer step to the engine; bfloat16, a patch."""
    rate = _values(tables()["publication"])
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
        "verify": weights / rate["mirror_bytes_per_s"],
        "check": weights / rate["check_bytes_per_s"],
        "stage": words * rate["stage_s_per_word"],
        "pause": rate["pause_s"],
    }


WHILE_TRAINING = (
    "compare",
    "exchange",
    "write",
    "hash and encode",
    "upload",
    "announce",
)  # the trainer's; the others are a worker's
