"""Models that are divided among the ranks while they are read (ZeRO 3)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.trainer.learner.forks import Fork
from tests.trainer.learner.layout_check import mixture
from tests.trainer.learner.tiny import HOW, row_of

from penstock.trainer.algorithm.batch import MicroBatch, build
from penstock.trainer.algorithm.objective import CrossEntropy
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.adapter import Lora
from penstock.trainer.learner.load_model import (
    PartitionedParameters,
    from_folder,
    load_language_model,
    load_policy,
    load_reference,
)
from penstock.trainer.learner.optimizer_state import Communication
from penstock.trainer.learner.reference import WithoutAdapter
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks

pytestmark = pytest.mark.slow

TIED, UNTIED, EXPERTS = "tied", "untied", "experts"
BROKEN = {"not-finite": "has NaN", "missing": "the files have no", "not-tied": "tie_word_embeddings"}
VOCABULARY = 1009
TRACED: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters": {"lora": Lora(4, 8.0), "gradient_checkpointing": True, "offload": "parameters"},
}


def how(**changes: Any) -> Optimisation:
    return replace(HOW, **{"zero_stage": 3, "dtype": "bfloat16", **changes})


def models(folder: Path) -> None:
    """Write a model in one file, one in several, a mixture of experts, and broken ones."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    for name in (TIED, UNTIED):
        config = Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, tie_word_embeddings=name == TIED,
        )  # fmt: skip
        Qwen3ForCausalLM(config).save_pretrained(folder / name, max_shard_size="5GB" if name == TIED else "300KB")
    assert len(list((folder / UNTIED).glob("*.safetensors"))) > 1
    mixture(folder / EXPERTS)
    for name in BROKEN:
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes((folder / TIED / "config.json").read_bytes())
        tensors = load_file(folder / TIED / "model.safetensors")
        if name == "not-finite":
            tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = float("nan")  # in the part of the last rank
        elif name == "missing":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        else:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})


def compared(folder: Path, dtype: str, dims: ParallelDims) -> dict[str, Any]:
    """Return whether each parameter and buffer is that of the whole model, and the share that this rank holds."""
    whole, _ = from_folder("AutoModelForCausalLM", "a model", folder, dtype)
    parts = load_language_model(folder, how(dtype=dtype), dims)
    expected, found = dict(whole.named_parameters()), dict(parts.named_parameters())
    buffers = dict(parts.named_buffers())
    differing = [name for name, buffer in whole.named_buffers() if not torch.equal(buffer, buffers[name])]
    for name, parameter in found.items():
        assert parameter.numel() == 0, f"{name} is whole"
        with deepspeed.zero.GatheredParameters([parameter]):
            if parameter.dtype != expected[name].dtype or not torch.equal(parameter, expected[name]):
                differing.append(name)
    held: Sequence[Any] = list(found.values())
    num = sum(parameter.numel() for parameter in expected.values())
    return {
        "names": list(found) == list(expected) and list(buffers) == [name for name, _ in whole.named_buffers()],
        "differing": differing,
        "share": sum(parameter.ds_tensor.numel() for parameter in held) / num,
    }


def refusal(folder: Path, dims: ParallelDims) -> str:
    try:
        load_language_model(folder, how(), dims)
    except UnsupportedModel as err:
        return str(err)
    return "accepted"


def out_of_memory(folder: Path, dims: ParallelDims) -> str:
    """Return the kind of the error of a device that is full while a model is read in parts."""
    partition = PartitionedParameters._partition

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.16 GiB")

    PartitionedParameters._partition = full  # type: ignore[method-assign]
    try:
        load_language_model(folder, how(), dims)
    except (torch.OutOfMemoryError, UnsupportedModel) as err:
        return type(err).__name__
    finally:
        PartitionedParameters._partition = partition  # type: ignore[method-assign]
    return "read"


def rows(num_sampled: int) -> MicroBatch:
    tokens = np.random.default_rng(num_sampled).integers(0, VOCABULARY, 50 + num_sampled)
    return build([row_of(tokens[:50], tokens[50:], 1.0 / num_sampled)])


def traced(folder: Path, changes: Mapping[str, Any], dims: ParallelDims) -> list[bool]:
    """Return whether DeepSpeed knows the order of the layers after passes of other kinds, lengths and chunks.

    Each step has one micro-batch, and passes without a gradient before it, as those of a reference without adapters.
    """
    policy = load_policy(folder, how(max_logits=64 * VOCABULARY, **changes), dims, temperature=1.0)
    coordinator = policy._trainable._engine.optimizer.parameter_offload.get_param_coordinator()
    complete = []
    for num_sampled in (100, 700, 1500):
        policy.logprobs(rows(200))
        if "lora" in changes:
            policy.logprobs_without_adapter(rows(200))
            policy.full_kl(rows(300), WithoutAdapter(policy))
        complete.append(coordinator.is_complete_trace())
        policy.train_step([rows(num_sampled)], CrossEntropy())
        complete.append(coordinator.is_complete_trace())
    return complete[2:]  # the first step is recorded


def reference_scores(folder: Path, dims: ParallelDims) -> bool:
    """Return True if a reference in parts, parked or not, scores bit for bit as a whole one."""
    device = torch.device("cpu")
    whole = load_reference(folder, how(zero_stage=1), device, dims, temperature=0.7).logprobs(rows(60))
    return all(
        torch.equal(
            load_reference(folder, how(), device, dims, temperature=0.7, parked=parked).logprobs(rows(60)), whole
        )
        for parked in (False, True)
    )


def communicated(folder: Path, dims: ParallelDims) -> list[list[float]]:
    """Return losses and norms of two steps with DeepSpeed's own communication, and with each setting changed.

    In float32 at stage 2, whose bucket rounds the output head's gradient to bfloat16, unless the head is larger.
    """
    found = []
    for stage, changed in (
        (2, {}), (2, {"overlap_comm": True, "reduce_bucket_size": 10_000}), (3, {}),
        (3, {"prefetch_bucket_size": 0, "max_live_parameters": 0, "reduce_bucket_size": 10_000, "overlap_comm": False}),
        (3, {"hpz_partition_size": dims.ranks.num_ranks}),
    ):  # fmt: skip
        policy = load_policy(
            folder,
            how(
                zero_stage=stage, dtype="float32" if stage == 2 else "bfloat16", communication=Communication(**changed)
            ),
            dims,
            temperature=1.0,
        )
        steps = [policy.train_step([rows(40), rows(70)], CrossEntropy()) for _ in range(2)]
        found.append([value for step in steps for value in (step.loss, step.grad_norm)])
    return found


def resumed(folder: Path, stage: int, dims: ParallelDims) -> bool:
    """Return True if a step of the fused AdamW, which a GPU uses, is bitwise equal after its checkpoint was read."""
    plain = torch.optim.AdamW
    torch.optim.AdamW = lambda *given, **more: plain(*given, **{**more, "fused": True})  # type: ignore[assignment,misc]
    try:
        policy = load_policy(folder, how(zero_stage=stage), dims, temperature=1.0)
    finally:
        torch.optim.AdamW = plain  # type: ignore[misc]
    assert policy._trainable._optimizer_state().base.defaults["fused"]
    policy.train_step([rows(40)], CrossEntropy())
    policy.save(folder / f"fused-{stage}")
    weights = []
    for is_resumed in (False, True):
        if is_resumed:
            policy.load(folder / f"fused-{stage}")
        ratios = policy.train_step([rows(70)], CrossEntropy()).layers
        weights.append({**policy.weights.snapshot(), "ratio": torch.tensor(ratios["all"].update_ratio)})
    return all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def main(arguments: Sequence[str]) -> int:
    """Read the models of the folder that is the argument, and write what was found below it."""
    folder, ranks = Path(arguments[0]), Ranks()
    dims = ParallelDims(ranks)
    results: dict[str, Any] = {
        f"{name} {dtype}": compared(folder / name, dtype, dims)
        for name in (TIED, UNTIED, EXPERTS)
        for dtype in ("float32", "bfloat16")
    }
    if ranks.num_ranks == 2:
        results.update({name: refusal(folder / name, dims) for name in BROKEN})
        results["memory"] = out_of_memory(folder / TIED, dims)
        results["reference"] = reference_scores(folder / UNTIED, dims)
        results.update({case: traced(folder / TIED, changes, dims) for case, changes in TRACED.items()})
        results["resumed"] = [resumed(folder / UNTIED, stage, dims) for stage in (1, 3)]
        results["communication"] = communicated(folder / UNTIED, dims)
    (folder / f"{ranks.num_ranks}-{ranks.rank}.json").write_text(json.dumps(results))
    ranks.leave(0)
    return 0


Results = dict[int, list[dict[str, Any]]]  # by number of ranks, of each rank


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("partitioned")
    models(folder)
    for num in (1, 2, 4):
        fork = Fork(folder, __name__, str(folder), num_ranks=num)
        try:
            fork.wait()
        finally:
            fork.kill()
    return {num: [json.loads((folder / f"{num}-{rank}.json").read_text()) for rank in range(num)] for num in (1, 2, 4)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [TIED, UNTIED, EXPERTS])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_a_model_read_in_parts_is_the_one_that_is_read_whole(results: Results, num: int, name: str, dtype: str) -> None:
    """Bit for bit, buffers too, from one file or several, in any dtype; each rank holds a part of every parameter."""
    for one in results[num]:
        found = one[f"{name} {dtype}"]
        assert found["names"]
        assert found["differing"] == []
        assert found["share"] == pytest.approx(1 / num, rel=0.02)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused_on_every_rank(results: Results, name: str) -> None:
    for one in results[2]:
        assert BROKEN[name] in one[name]
        assert "model.path" in one[name]
        assert name == "not-tied" or "model.layers.1.mlp.up_proj.weight" in one[name]


def test_a_full_device_is_not_a_fault_of_the_model(results: Results) -> None:
    """What is known of the hardware, or of other ranks, is said as such, while all ranks read a model together."""
    assert all(one["memory"] == "OutOfMemoryError" for one in results[2])


def test_a_reference_in_parts_scores_as_a_whole_one(results: Results) -> None:
    assert all(one["reference"] for one in results[2])


@pytest.mark.parametrize("case", TRACED)
def test_parameters_are_fetched_ahead_for_rows_of_any_length(results: Results, case: str) -> None:
    """DeepSpeed does so only while layers are called in the order it recorded: none more often for longer rows."""
    for one in results[2]:
        assert all(one[case])


def test_a_fused_step_is_the_same_after_a_checkpoint(results: Results) -> None:
    assert all(one["resumed"] == [True, True] for one in results[2])


def test_settings_of_communication_change_no_number(results: Results) -> None:
    for one in results[2]:
        plain_2, changed_2, plain_3, *changed_3 = one["communication"]
        assert changed_2 == plain_2
        assert all(changed == plain_3 for changed in changed_3)
