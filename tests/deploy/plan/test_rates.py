"""The rates of a kind of GPU: the formulas give the public figures they are made from, and every constant has a source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.deploy.plan.memory.model_shape import ModelShape, shape_of
from penstock.deploy.plan.memory.plan_inputs import plan_inputs
from penstock.deploy.plan.rates import WHILE_TRAINING, engine_rates, gpu_of, publication, tables, trainer_rates
from penstock.protocol.config.run_file import load
from penstock.trainer.learner.flops import peak_of
from penstock.trainer.settings import TrainerSettings

ROOT = Path(__file__).parents[3]


def shape(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int
) -> ModelShape:
    config = {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": intermediate, "vocab_size": vocabulary,
    }  # fmt: skip
    return shape_of(config, family)


MODELS = {
    "llama-3.1-8b": shape("llama", 32, 4096, 32, 8, 14_336, 128_256),
    "llama-3.1-70b": shape("llama", 80, 8192, 64, 8, 28_672, 128_256),
    "qwen2.5-7b": shape("qwen2", 28, 3584, 28, 4, 18_944, 152_064),
    "qwen2.5-32b": shape("qwen2", 64, 5120, 40, 8, 27_648, 152_064),
}


@pytest.mark.parametrize("point", tables()["measured"], ids=lambda point: f"{point['model']}-{point['tokens_per_s']}")
def test_an_engine_is_as_fast_as_was_measured(point: dict[str, Any]) -> None:
    """Within a factor of 1.5, with the time of the prompts: engines of other releases differ by more."""
    found = engine_rates(
        MODELS[point["model"]], gpu_of(point["gpu"]), gpus=point["gpus"], prompt=point["prompt"],
        completion=point["completion"], sequences=point["sequences"],
    )  # fmt: skip
    rate = 1.0 / (1.0 / found.tokens_per_s + found.prompt_s / point["completion"])
    assert point["tokens_per_s"] / 1.5 < rate < point["tokens_per_s"] * 1.5


def constants(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in table.values():
        if isinstance(entry, dict):
            yield from [entry] if "value" in entry else constants(entry)


def test_every_constant_has_a_source_that_is_there() -> None:
    """A URL, a file of the tree, or a word that says that nobody measured it; peaks are those that the trainer's MFU is a share of."""
    sources = [entry["source"] for entry in (*constants(tables()), *tables()["measured"])]
    for source in sources:
        is_file = (ROOT / source.partition(":")[0].partition(";")[0].split(" ")[0]).is_file()
        assert source.startswith(("https://", "assumed: ", "fitted to ", "SGLang's", "vLLM's")) or is_file, source
    for kind in tables()["gpu"]:
        assert gpu_of(kind).peak == peak_of(f"NVIDIA {kind} 80GB HBM3", "bfloat16")


@pytest.mark.parametrize(
    ("model", "ranks", "zero_3", "trainer_s", "stage_s", "engine_s", "copy_s"),
    [("qwen2.5-7b", 4, False, 1.0, 0.36, 1.7, 3.2), ("qwen2.5-32b", 8, True, 2.3, 1.54, 4.8, 13.7)],
)
def test_a_publication_takes_what_the_benchmarks_page_says(
    model: str, ranks: int, zero_3: bool, trainer_s: float, stage_s: float, engine_s: float, copy_s: float
) -> None:
    found = publication(MODELS[model], ranks=ranks, zero_3=zero_3, words_on_device=False)
    assert sum(found[stage] for stage in WHILE_TRAINING) == pytest.approx(trainer_s, rel=0.2)
    assert found["stage"] == pytest.approx(stage_s, rel=0.05)
    assert found["copy"] == pytest.approx(copy_s, rel=0.05)
    assert sum(found.values()) - found["copy"] == pytest.approx(engine_s, rel=0.1)


def rates(model: ModelShape, *overrides: str) -> Any:
    given = ["run.id=r", "model.path=/m", "data.train=t.jsonl", "rollout.max_new_tokens=2048", *overrides]
    settings = load(TrainerSettings, files=[], overrides=[*given, "model.dtype=bfloat16"], environ={}).settings
    return trainer_rates(plan_inputs(settings, model), gpu_of("H100"))


def test_an_offload_costs_time() -> None:
    """On each of 4 ranks 1.9e9 parameters are stepped in 1.2 ns each; what crosses the bus does so at 25 GB/s."""

    def step_s(*overrides: str) -> float:
        return rates(MODELS["qwen2.5-7b"], "trainer.num_ranks=4", *overrides).step_s

    # 64 answers of 2,048 tokens, four at a time behind one prompt of 1,024.
    of_rank, tokens, micro_batches = 7.62e9 / 4, 147_456, 16
    stepped_s = of_rank * (1.2e-9 + (4 + 2) / 25e9)  # gradients in float32 there, parameters in bfloat16 back
    optimizer = step_s("trainer.zero_stage=3", "trainer.offload=optimizer") - step_s("trainer.zero_stage=3")
    assert optimizer == pytest.approx(stepped_s, rel=0.01)
    parameters = step_s("trainer.zero_stage=3", "trainer.offload=parameters") - step_s("trainer.zero_stage=3")
    assert parameters == pytest.approx(stepped_s + 2 * micro_batches * of_rank * 2 / 25e9, rel=0.01)
    kept = step_s("model.gradient_checkpointing=true")
    moved = step_s("model.gradient_checkpointing=true", "model.activation_offload=true") - kept
    assert moved == pytest.approx(2 * tokens * 28 * 3584 * 2 / 25e9, rel=0.01)


def test_what_is_recomputed_counts_as_time_and_not_as_use() -> None:
    """At the same rate of the device, checkpointing costs a quarter of the MFU; the head's share grows with the vocabulary."""
    kept = rates(MODELS["qwen2.5-7b"])
    recomputed = rates(MODELS["qwen2.5-7b"], "model.gradient_checkpointing=true")
    assert 0.72 < recomputed.mfu / kept.mfu < 0.82
    assert kept.mfu < 0.385, "the head and its chunks are slower than the layers"
    assert rates(MODELS["llama-3.1-8b"]).head_share < kept.head_share < 0.25
    assert rates(MODELS["qwen2.5-32b"]).head_share < 0.5 * kept.head_share
