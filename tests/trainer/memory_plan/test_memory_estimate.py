"""The memory of a rank: estimates beside recorded peaks, and what the settings change."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.trainer.errors import NotEstimated
from penstock.trainer.learner import logprobs
from penstock.trainer.memory_plan import estimate
from penstock.trainer.memory_plan.estimate import Method
from penstock.trainer.memory_plan.memory_plan import CHECKPOINT, COPY, MemoryPlan
from penstock.trainer.memory_plan.model_shape import read_shape, shape_of
from penstock.trainer.memory_plan.plan_inputs import Batch, PlanInputs
from penstock.trainer.memory_plan.suggestions import suggestions

RECORD = json.loads((Path(__file__).parents[3] / "benchmarks/trainer_memory.json").read_text())
MEASURED: dict[str, Any] = RECORD["configurations"]
TOLERANCE = 0.1
QWEN3 = MEASURED["standard"]["fields"]


def _inputs(name: str) -> PlanInputs:
    one, fields = MEASURED[name]["configuration"], MEASURED[name]["fields"]
    method = Method(
        dtype=one["dtype"], zero_stage=one["zero_stage"], num_ranks=one["num_ranks"], checkpointing=one["checkpointing"],
        lora_rank=one["lora"], with_entropy=one["entropy"],
    )  # fmt: skip
    batch = Batch(one["prompt"], one["answer"], one["group_size"], one["groups"])
    return PlanInputs(shape_of(fields, name), method, batch, one["budget"], publishes_adapter=bool(one["lora"]))


def test_a_dozen_configurations_and_three_widths_are_recorded() -> None:
    """Without these a wrong formula could agree with the few that are there."""
    assert len(MEASURED) >= 12
    assert len({one["fields"]["hidden_size"] for one in MEASURED.values()}) >= 3
    assert {one["fields"]["model_type"] for one in MEASURED.values()} == {"llama", "qwen2", "qwen3"}


@pytest.mark.parametrize("name", MEASURED)
def test_the_largest_phase_is_within_a_tenth_of_its_measured_peak(name: str) -> None:
    """The peak of the resident memory of a rank, as `benchmarks.trainer_memory` recorded it, without a checkpoint."""
    peaks, plan = MEASURED[name]["peaks"], MemoryPlan(_inputs(name))
    assert plan.peak(on_gpu=False) - plan.host[CHECKPOINT] == pytest.approx(max(peaks.values()), rel=TOLERANCE)


@pytest.mark.parametrize("name", [name for name, one in MEASURED.items() if COPY in one["peaks"]])
def test_the_optimizer_step_and_the_copy_are_near_their_peaks_too(name: str) -> None:
    """They are not the largest here, and are for a model whose rows are short."""
    plan = MemoryPlan(_inputs(name))
    found = {phase.name: phase.total - plan.host[CHECKPOINT] for phase in plan.phases}
    for phase in ("optimizer step", COPY):
        assert found[phase] == pytest.approx(MEASURED[name]["peaks"][phase], rel=TOLERANCE), phase


def test_the_chunk_of_logits_is_the_trainers() -> None:
    """The trainer's constant is in a module that imports torch."""
    assert estimate.MAX_LOGITS == logprobs.MAX_LOGITS


def test_ranks_share_what_their_stage_shards() -> None:
    """Stage 1 splits optimizer states and master weights, stage 3 the parameters too; buckets of a copy are never split."""
    inputs = _inputs("standard")
    whole = MemoryPlan(inputs).device
    for stage, parameters in ((1, 1), (2, 1), (3, 4)):
        method = replace(inputs.method, zero_stage=stage, num_ranks=4)
        held = MemoryPlan(replace(inputs, method=method)).device
        assert held["parameters"] == whole["parameters"] // parameters
        assert held["optimizer states"] == whole["optimizer states"] // 4
        assert held["master weights"] == whole["master weights"] // 4


def test_a_gpu_counts_no_copies_and_no_parked_reference() -> None:
    """Copies of the weights and of a checkpoint are in the memory of the host, and so is a reference that `reference_device = "cpu"` parks."""
    inputs = _inputs("standard")
    here, parked = (
        MemoryPlan(replace(inputs, reference=inputs.shape, reference_on_host=on_host)) for on_host in (False, True)
    )
    model = inputs.shape.parameters * 4
    assert here.peak(on_gpu=True) - parked.peak(on_gpu=True) == model
    assert here.peak(on_gpu=False) == parked.peak(on_gpu=False)
    # The reference, two copies of the weights, and one of weights and two moments for a checkpoint.
    assert parked.peak(on_gpu=False) - parked.peak(on_gpu=True) == (3 + 3) * model


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ranks_share_the_copy_for_a_checkpoint(stage: int) -> None:
    """Master weights and two moments in float32, 12 bytes of each parameter, of the critic too; adapters hold few."""
    inputs = _inputs("standard")
    method = replace(inputs.method, zero_stage=stage, num_ranks=4)
    shared = replace(inputs, method=method)
    copied = MemoryPlan(shared).host[CHECKPOINT]
    of_rank = (
        inputs.shape.parameters // 4 if stage else inputs.shape.table
    )  # whole parameters: one rank has the embedding
    assert copied == 12 * of_rank
    assert MemoryPlan(replace(shared, critic=inputs.shape)).host[CHECKPOINT] == 2 * copied
    adapters = replace(shared, method=replace(method, lora_rank=8))
    assert MemoryPlan(adapters).host[CHECKPOINT] < 0.1 * copied


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3, 0.1])
def test_every_suggestion_fits(share: float) -> None:
    """Into any share of what the run needs, or there is none."""
    inputs = _inputs("standard")
    limit = int(share * MemoryPlan(inputs).peak(on_gpu=True))
    found = suggestions(inputs, limit, on_gpu=True)
    assert found
    assert all(one.peak <= limit and one.settings for one in found)


def test_nothing_is_suggested_where_nothing_fits() -> None:
    """A megabyte does not hold a layer."""
    assert suggestions(_inputs("standard"), 10**6, on_gpu=True) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "model_type = mixtral: memory is estimated for llama, qwen2, qwen3"),
        ({"hidden_size": None}, "hidden_size = None: expected a positive number"),
        ({"num_hidden_layers": -2}, "num_hidden_layers = -2: expected a positive number"),
        ({"vocab_size": True}, "vocab_size = True: expected a positive number"),
    ],
)
def test_a_shape_that_is_not_known_is_refused(change: dict[str, Any], words: str) -> None:
    """With the key and its value, and without a guess."""
    with pytest.raises(NotEstimated, match=words):
        shape_of({**QWEN3, **change}, "config.json")


@pytest.mark.parametrize(("content", "words"), [("{", "is not JSON"), ("[1]", "model_type = None")])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: str, words: str) -> None:
    """By the name of the file."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(NotEstimated, match=words):
        read_shape(tmp_path, "model.path")


def test_the_estimate_imports_no_torch() -> None:
    """It needs settings and a config.json alone."""
    code = "import sys, penstock.deploy.plan.rank_memory; print(sorted({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"
