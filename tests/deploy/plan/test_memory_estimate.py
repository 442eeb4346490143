"""The memory of a rank: estimates beside recorded peaks, and what the settings change."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.deploy.plan.memory import estimate
from penstock.deploy.plan.memory.memory_plan import (
    CHECKPOINT,
    COPY,
    LOADING,
    PARKED,
    READ_LAST,
    MemoryPlan,
    suggestions,
)  # fmt: skip
from penstock.deploy.plan.memory.model_shape import FAMILIES, Method, read_shape, shape_of
from penstock.deploy.plan.memory.plan_inputs import Batch, PlanInputs, plan_inputs
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.trainer.errors import NotEstimated
from penstock.trainer.learner import output_head
from penstock.trainer.settings import TrainerSettings

RECORD = json.loads((Path(__file__).parents[3] / "benchmarks/trainer_memory.json").read_text())
MEASURED: dict[str, Any] = RECORD["configurations"]
TOLERANCE = 0.08  # of the peak of a phase
QWEN3 = MEASURED["standard"]["fields"]


def _inputs(name: str, **changes: Any) -> PlanInputs:
    one, fields = MEASURED[name]["configuration"], MEASURED[name]["fields"]
    method = Method(
        dtype=one["dtype"], zero_stage=one["zero_stage"], num_ranks=one["num_ranks"], checkpointing=one["checkpointing"],
        sequence_parallel=one.get("sequence_parallel", 1), tensor_parallel=one.get("tensor_parallel", 1), gradient_dtype=one["gradient_dtype"], offload=one["offload"], lora_rank=one["lora"], with_entropy=one["entropy"],
    )  # fmt: skip
    batch = Batch(one["prompt"], one["answer"], one["group_size"], one["groups"])
    method = replace(method, **changes)
    return PlanInputs(shape_of(fields, name), method, batch, one["budget"], publishes_adapter=bool(one["lora"]))


def _errors(name: str, **changes: Any) -> dict[str, float]:
    """Relative error of the estimate of each recorded phase, without what the benchmark does not hold, the record's method changed."""
    plan = MemoryPlan(_inputs(name, **changes))
    not_held = plan.held.host[CHECKPOINT] + plan.held.host.get(READ_LAST, 0)
    found = {phase.name: phase.total - not_held for phase in plan.phases}
    others = {phase: found.pop(phase) for phase in ("optimizer step", COPY) if phase in found}
    others["forward and backward"] = max(found.values())
    return {phase: others[phase] / peak - 1 for phase, peak in MEASURED[name]["peaks"].items()}


def test_what_is_recorded() -> None:
    """Without these a wrong formula could agree with the few that are there."""
    chosen = [one["configuration"] for one in MEASURED.values()]
    assert len({one["fields"]["hidden_size"] for one in MEASURED.values()}) >= 3
    assert {one["fields"]["model_type"] for one in MEASURED.values()} == set(FAMILIES)
    layouts = {
        (one["zero_stage"], one["num_ranks"], one["offload"] != "none") for one in chosen if one["dtype"] == "bfloat16"
    }
    assert layouts >= {(stage, ranks, False) for stage in (1, 2, 3) for ranks in (1, 2)}
    assert layouts >= {(stage, 2, True) for stage in (1, 2, 3)}
    assert {one["zero_stage"] for one in chosen if one.get("tensor_parallel", 1) > 1} >= {1, 2, 3}
    shared = {(one["dtype"], one.get("sequence_parallel", 1), one.get("tensor_parallel", 1)) for one in chosen}
    assert shared >= {(dtype, *shares) for dtype in ("float32", "bfloat16") for shares in ((2, 1), (1, 2))}


@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_of_every_phase_is_near_its_measured_peak(name: str) -> None:
    """The peak of the resident memory of a rank, as `benchmarks.trainer_memory` recorded it."""
    errors = _errors(name)
    assert all(abs(error) <= TOLERANCE for error in errors.values()), errors


SHORT = {
    name: one["configuration"] for name, one in MEASURED.items() if name.startswith("short") and "lora" not in name
}
SUMMED_APART = [name for name, chosen in SHORT.items() if chosen["dtype"] == "bfloat16"]
OFFLOADED = [name for name, chosen in SHORT.items() if chosen["offload"] != "none"]


@pytest.mark.parametrize(
    ("name", "ignored"),
    [
        *((name, {"gradient_dtype": "as-trained"}) for name in SUMMED_APART),
        *((name, {"offload": "none"}) for name in OFFLOADED),
    ],
)
def test_an_estimate_that_ignored_a_setting_would_be_wrong(name: str, ignored: dict[str, Any]) -> None:
    """The records tell float32 sums from sums as trained, and an offload from none: some phase would be off."""
    assert max(map(abs, _errors(name, **ignored).values())) > TOLERANCE


def test_the_chunk_of_logits_is_the_trainers() -> None:
    assert estimate.MAX_LOGITS == output_head.MAX_LOGITS


def test_the_gradient_of_the_head_is_counted_beside_that_of_a_chunk() -> None:
    """In float32: 2.4 tables were measured for 100,000 x 512, whose chunks of logits had 3 % of one; adapters leave the head as it is."""
    shape, method = _inputs("standard").shape, _inputs("standard").method
    for predictors, rank, tables in ((64, 0, 1), (65, 0, 2), (65, 8, 0)):
        chosen = replace(method, max_logits=64 * shape.vocabulary, lora_rank=rank)
        found = estimate._logits(shape, chosen, estimate.Pass(100, predictors))
        assert found == 4 * (3 * 64 * shape.vocabulary + tables * shape.table)


def test_ranks_share_what_their_stage_shards() -> None:
    """Stage 1 splits optimizer states and master weights, stage 3 the parameters too; buckets of a copy are never split."""
    inputs = _inputs("standard")
    whole = MemoryPlan(inputs).held.device
    for stage, parameters in ((1, 1), (2, 1), (3, 4)):
        method = replace(inputs.method, zero_stage=stage, num_ranks=4)
        held = MemoryPlan(replace(inputs, method=method)).held.device
        assert held["parameters"] == whole["parameters"] // parameters
        assert held["optimizer states"] == whole["optimizer states"] // 4
        assert held["master weights"] == whole["master weights"] // 4


def test_a_gpu_counts_no_copies_and_no_parked_reference() -> None:
    """Copies of the weights and of a checkpoint are in the memory of the host, and so is a reference that `reference_device = "parked"` keeps there."""
    inputs = _inputs("standard")
    here, parked = (
        MemoryPlan(replace(inputs, reference=inputs.shape, reference_on_host=on_host)) for on_host in (False, True)
    )
    model = inputs.shape.parameters * 4
    assert here.peak(on_gpu=True) - parked.peak(on_gpu=True) == model
    assert here.peak(on_gpu=False) == parked.peak(on_gpu=False)
    (phase,) = [phase for phase in parked.phases if phase.name == PARKED]
    assert phase.needs.device["layer of the reference"] == inputs.shape.table * 4
    assert not [phase for phase in here.phases if phase.name == PARKED]
    # The reference, two copies of the weights, and one of weights and two moments for a checkpoint.
    of_process = parked.peak(on_gpu=False) - sum(parked.held.cpu.values())
    assert of_process - parked.peak(on_gpu=True) == (3 + 3) * model


def test_the_words_that_were_published_last_are_counted() -> None:
    """On the device where they are kept there; under ZeRO-3 each rank has those of its part beside its buckets."""
    inputs = _inputs("standard")
    one, four = (replace(inputs, method=replace(inputs.method, zero_stage=3, num_ranks=ranks)) for ranks in (1, 4))
    part = inputs.shape.parameters * inputs.published_width // 4
    for method, on_host, on_device in (
        (inputs, 0, MemoryPlan(inputs)._copy),
        (one, 0, MemoryPlan(one)._copy),
        (four, part, part),
    ):
        assert MemoryPlan(method).held.host.get(READ_LAST, 0) == on_host
        kept = MemoryPlan(replace(method, words_on_device=True)).held
        assert (kept.host.get(READ_LAST, 0), kept.device[READ_LAST]) == (0, on_device)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ranks_share_the_copy_for_a_checkpoint(stage: int) -> None:
    """Master weights and two moments in float32, 12 bytes of each parameter, of the critic too; adapters hold few."""
    inputs = _inputs("standard")
    method = replace(inputs.method, zero_stage=stage, num_ranks=4)
    shared = replace(inputs, method=method)
    copied = MemoryPlan(shared).held.host[CHECKPOINT]
    of_rank = (
        inputs.shape.parameters // 4 if stage else inputs.shape.table
    )  # whole parameters: one rank has the embedding
    assert copied == 12 * of_rank
    assert MemoryPlan(replace(shared, critic=inputs.shape)).held.host[CHECKPOINT] == 2 * copied
    adapters = replace(shared, method=replace(method, lora_rank=8))
    assert MemoryPlan(adapters).held.host[CHECKPOINT] < 0.1 * copied


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3, 0.1])
def test_every_suggestion_fits(share: float) -> None:
    inputs = _inputs("standard")
    limit = int(share * MemoryPlan(inputs).peak(on_gpu=True))
    found = suggestions(inputs, limit, on_gpu=True)
    assert found
    assert all(one.peak <= limit and one.settings for one in found)


def test_ranks_that_share_tokens_need_half_of_the_activations_each() -> None:
    """States stay as with ranks that have rows of their own; it is suggested where the ranks are there, and the heads divide."""
    apart = _inputs("standard", num_ranks=2)
    together = _inputs("standard", num_ranks=2, sequence_parallel=2)
    held, shared = MemoryPlan(apart), MemoryPlan(together)
    assert shared.held == held.held
    assert together.largest.tokens == apart.largest.tokens / 2
    assert together.operations == pytest.approx(apart.operations, rel=0.01)
    limit = int(1.05 * shared.peak(on_gpu=True))
    assert limit < held.peak(on_gpu=True)
    assert ("trainer.sequence_parallel=2",) in [
        suggestion.settings for suggestion in suggestions(apart, limit, on_gpu=True)
    ]
    odd = replace(apart, shape=replace(apart.shape, heads=9, kv_heads=3))
    found = suggestions(odd, int(0.95 * MemoryPlan(odd).peak(on_gpu=True)), on_gpu=True)
    assert found
    assert all("sequence_parallel" not in " ".join(one.settings) for one in found)


def test_ranks_that_share_weights_need_a_part_of_the_layers_each() -> None:
    """And embedding and norms whole; states as with half of the ranks to shard over. Suggested where the model allows it."""
    apart, together = (_inputs("standard", num_ranks=2, tensor_parallel=ranks) for ranks in (1, 2))
    shape = apart.shape
    linears = sum(inputs * outputs for inputs, outputs in shape.linears.values()) * shape.layers
    assert together.rank_shape.parameters == shape.parameters - linears // 2
    held = MemoryPlan(together).held.device
    assert held["parameters"] == 4 * together.rank_shape.parameters
    assert held["master weights"] == 4 * together.rank_shape.parameters
    unsharded = replace(apart, method=replace(apart.method, zero_stage=0))
    limit = MemoryPlan(replace(unsharded, method=replace(unsharded.method, tensor_parallel=2))).peak(on_gpu=True)
    assert limit < 0.9 * MemoryPlan(unsharded).peak(on_gpu=True)
    assert ("trainer.tensor_parallel=2",) in [
        suggestion.settings for suggestion in suggestions(unsharded, limit, on_gpu=True)
    ]
    adapted = replace(apart, method=replace(apart.method, lora_rank=8))
    found = suggestions(adapted, int(0.9 * MemoryPlan(adapted).peak(on_gpu=True)), on_gpu=True)
    assert all("tensor_parallel" not in " ".join(one.settings) for one in found)


def test_a_layout_that_the_heads_do_not_allow_is_not_planned() -> None:
    settings = load(
        TrainerSettings, overrides=["model.path=m", "trainer.num_ranks=5", "trainer.sequence_parallel=5"]
    ).settings
    with pytest.raises(ConfigError, match=r"sequence_parallel = 5 does not divide the 8 attention heads of model.path"):
        plan_inputs(settings, shape_of(QWEN3, "m"))


@pytest.mark.parametrize(
    "layers", [{"max_window_layers": 1}, {"layer_types": ["full_attention", *["sliding_attention"] * 27]}]
)
def test_pairs_beyond_a_window_are_no_operations(layers: dict[str, Any]) -> None:
    """A long prompt costs about its tokens in 27 of 28 layers; a window that is not used changes nothing."""
    method = Method(dtype="bfloat16", zero_stage=1)
    windows = {**QWEN3, "num_hidden_layers": 28, "sliding_window": 512, **layers}

    def operations(**more: Any) -> float:
        shape = shape_of({**windows, **more}, "m")
        return PlanInputs(shape, method, Batch(40_000, 1, 1, 1), 50_000).operations

    whole = operations()
    pairs = 27 * 3 * 4 * 40_001 * (40_001 / 2 - 512 + 512**2 / 80_002)
    width = QWEN3["num_attention_heads"] * QWEN3["head_dim"]
    assert operations(use_sliding_window=True) == pytest.approx(whole - pairs * width, rel=1e-3)
    assert operations(use_sliding_window=False) == whole


def test_an_offload_moves_states_from_the_device_to_the_host() -> None:
    """All of them: master weights and moments, then the parameters, then what checkpointing keeps; in all nothing is saved."""
    plain = MemoryPlan(_inputs("short-stage-3-2-ranks"))
    optimizer, parameters = (
        MemoryPlan(_inputs("short-stage-3-2-ranks", offload=what)) for what in ("optimizer", "parameters")
    )
    states = {"master weights", "optimizer states", "gradients"}
    assert states <= plain.held.device.keys()
    assert states <= optimizer.held.host.keys()
    assert not states & optimizer.held.device.keys()
    assert {"parameters"} == optimizer.held.device.keys() - parameters.held.device.keys()
    assert parameters.held.host["parameters"] == plain.held.device["parameters"]
    activations = MemoryPlan(_inputs("short-stage-3-2-ranks", activation_offload=True))
    for phase, same in zip(activations.phases, plain.phases, strict=True):
        moved = phase.needs.host.get("activations", 0)
        assert (moved > 0) == (phase.name in {"log-probabilities and loss", "backward"})
        assert (phase.on_device + moved, phase.total) == (same.on_device, same.total)
    assert parameters.peak(on_gpu=True) < optimizer.peak(on_gpu=True) < plain.peak(on_gpu=True)
    assert optimizer.peak(on_gpu=False) > plain.peak(on_gpu=False)


def test_an_offload_is_suggested_where_it_helps_and_only_there() -> None:
    """With the ZeRO stage that it needs; never where the CPU trains."""
    inputs = _inputs("short")
    found = suggestions(inputs, int(0.75 * MemoryPlan(inputs).peak(on_gpu=True)), on_gpu=True)
    assert ("trainer.offload=optimizer",) in [one.settings for one in found]
    inputs = replace(inputs, method=replace(inputs.method, zero_stage=3, offload="optimizer"))
    found = suggestions(inputs, int(0.95 * MemoryPlan(inputs).peak(on_gpu=True)), on_gpu=True)
    assert ("trainer.offload=parameters",) in [one.settings for one in found]
    unsharded = replace(_inputs("stage-0"), budget_tokens=768)
    found = suggestions(unsharded, int(0.95 * MemoryPlan(unsharded).peak(on_gpu=True)), on_gpu=True)
    assert ("trainer.offload=optimizer", "trainer.zero_stage=1") in [one.settings for one in found]
    for share in (0.9, 0.6, 0.3):
        on_cpu = suggestions(inputs, int(share * MemoryPlan(inputs).peak(on_gpu=False)), on_gpu=False)
        assert not any("offload" in setting for one in on_cpu for setting in one.settings)


@pytest.mark.parametrize(
    ("changes", "on_device", "on_host"),
    [
        ({"zero_stage": 2}, (1, 0), (1, 0)), ({"zero_stage": 3}, (1 / 4, 1), (0, 1)),
        ({"zero_stage": 3, "offload": "parameters"}, (0, 1), (1 / 4, 1)), ({"zero_stage": 3, "tensor_parallel": 2}, (1, 0), (1, 0)),
    ],
)  # fmt: skip
def test_what_is_held_while_a_model_is_read(
    changes: dict[str, Any], on_device: tuple[float, int], on_host: tuple[float, int]
) -> None:
    """Shares of the model, and the largest tensor: at ZeRO 3 a rank's part and one tensor, unless ranks share weights."""
    plan = MemoryPlan(_inputs("standard", num_ranks=4, **changes))
    whole = plan.inputs.shape.parameters * plan.inputs.method.width
    tensor = (
        max(plan.inputs.shape.table, *(a * b for a, b in plan.inputs.shape.linears.values())) * plan.inputs.method.width
    )
    (phase,) = [phase for phase in plan.phases if phase.name == LOADING]
    assert phase.on_device == int(on_device[0] * whole) + on_device[1] * tensor
    assert plan.loading_host == int(on_host[0] * whole) + on_host[1] * tensor


def test_nothing_is_suggested_where_nothing_fits() -> None:
    assert suggestions(_inputs("standard"), 10**6, on_gpu=True) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "model_type = mixtral: memory is estimated for granite, llama, mistral"),
        ({"model_type": ["llama"]}, "memory is estimated for"),
        ({"hidden_size": None}, "hidden_size = None: expected a positive number"),
        ({"num_hidden_layers": -2}, "num_hidden_layers = -2: expected a positive number"),
        ({"vocab_size": True}, "vocab_size = True: expected a positive number"),
    ],
)
def test_a_shape_that_is_not_known_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(NotEstimated, match=words):
        shape_of({**QWEN3, **change}, "config.json")


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ("[1]", "model_type = None")])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(NotEstimated, match=words):
        read_shape(tmp_path, "model.path")


def test_the_estimate_imports_no_torch() -> None:
    """It needs settings and a config.json alone."""
    code = "import sys, penstock.deploy.plan.memory.report; print(sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"
