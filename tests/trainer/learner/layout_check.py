"""Trains the same batch in every layout of the ranks and of memory, and prints losses, norms and weights.

Arguments: MODEL FOLDER; checkpoints go below FOLDER.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import MicroBatch, Row, build, plan_micro_batches, prefixes_of
from penstock.trainer.algorithm.build_objective import build_objective
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.trainable import Optimisation, Trainable
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.parallel_layout import ParallelLayout
from penstock.trainer.ranks import Ranks

NUM_STEPS = 3
HOW = Optimisation(
    num_steps=10, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01, warmup_steps=0, schedule="constant", min_lr_ratio=1.0,
    max_grad_norm=1.0, zero_stage=1, dtype="float32", keep_whole_below=0,
)  # fmt: skip
PLAIN = "plain"
OFFLOADS: dict[str, dict[str, Any]] = {
    "offload-1": {"offload": "optimizer"},
    "offload-2": {"offload": "optimizer", "zero_stage": 2},
    "offload-3": {"offload": "parameters", "zero_stage": 3, "gradient_checkpointing": True, "activation_offload": True},
    "activations-2": {"gradient_checkpointing": True, "activation_offload": True, "zero_stage": 2},
}
SEQUENCE: dict[str, dict[str, Any]] = {  # both ranks compute the same rows
    "sequence-0": {"zero_stage": 0},
    "sequence-1": {},
    "sequence-2": {"zero_stage": 2, "gradient_checkpointing": True},
    "sequence-3": {"zero_stage": 3},
}
ONE_KEY_HEAD = "one key head"  # fewer than ranks


def rows() -> list[Row]:
    """Return three prompts with two to four answers each, of unequal lengths."""
    rng, found = np.random.default_rng(0), []
    for answers in (2, 3, 4):
        prompt = rng.integers(3, 50, 5 + 4 * answers)
        for _ in range(answers):
            tokens = np.concatenate([prompt, rng.integers(3, 50, rng.integers(3, 12))]).astype(np.int32)
            sampled = np.arange(len(tokens)) >= len(prompt)
            logprobs = np.full(len(tokens), -4.0, np.float32)
            found.append(Row(tokens, sampled, logprobs, float(rng.normal()), 1 / 60))
    return found


def micro_batches(dims: ParallelDims) -> list[MicroBatch]:
    """Return this rank's micro-batches."""
    chosen = rows()
    tokens, masks = [row.token_ids for row in chosen], [row.loss_mask for row in chosen]
    plan = plan_micro_batches(
        list(map(len, tokens)), budget_tokens=40, num_ranks=dims.rows.count, prefixes=prefixes_of(tokens, masks)
    )
    found = [build([chosen[number] for number in piece]) for piece in plan[dims.rows.index]]
    assert len(found) > 1, "a rank adds up the gradients of several micro-batches"
    return found


def with_one_key_head(model: Path, folder: Path) -> Path:
    """Write a model with the first key head of another one."""
    shutil.copytree(model, folder)
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    kept = {
        name: tensor[: config["head_dim"]].clone() if "k_proj" in name or "v_proj" in name else tensor
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def trained(model: Path, folder: Path, plain: Path, how: Optimisation, dims: ParallelDims) -> dict[str, Any]:
    """Make a few steps, and the last one again from the checkpoint before it and from that of the plain layout."""
    policy = load_policy(model, how, dims, temperature=1.0)
    policy._scorer._chunk_tokens = 7
    objective = build_objective(AlgorithmSettings(entropy_coefficient=0.01))
    steps = [policy.train_step(micro_batches(dims), objective) for _ in range(NUM_STEPS - 1)]
    policy.save(folder)
    steps.append(policy.train_step(micro_batches(dims), objective))
    tensors = policy.snapshot()
    policy.load(folder)
    policy.train_step(micro_batches(dims), objective)
    again = policy.snapshot()
    policy.load(plain)
    policy.train_step(micro_batches(dims), objective)
    from_plain = policy.snapshot()
    return {
        "resumed_equal": all(torch.equal(tensor, again[name]) for name, tensor in tensors.items()),
        "loss": [step.loss for step in steps],
        "norm": [step.grad_norm for step in steps],
        "sums": [step.sums for step in steps],
        "weights": {name: float(tensor.double().norm()) for name, tensor in tensors.items()},
        "weights_from_plain": {name: float(tensor.double().norm()) for name, tensor in from_plain.items()},
    }


def error_of_sum(how: Optimisation, dims: ParallelDims) -> float:
    """Return how far the norm of a gradient is from that of the float32 sum of the bfloat16 gradients it is made of."""
    torch.manual_seed(0)
    module = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
    plain = module.weight.detach().clone().requires_grad_()
    trainable = Trainable(module, how, dims)
    torch.manual_seed(dims.ranks.rank)
    true, num = torch.zeros(32, 32), 16
    for number in range(num):
        given = torch.randn(4, 32, dtype=torch.bfloat16)

        def loss_of(out: Tensor) -> Tensor:
            return (out.float() * torch.linspace(-1, 1, 32)).square().sum()

        (gradient,) = torch.autograd.grad(loss_of(given @ plain.T), plain)
        true += gradient.float()
        trainable.begin(is_last=number == num - 1)
        trainable.backward(loss_of(trainable(given)))
    dist.all_reduce(true)
    return abs(trainable.update().grad_norm / float(true.norm()) - 1)


def main(arguments: Sequence[str]) -> int:
    model, folder = map(Path, arguments)
    ranks = Ranks()
    dims = ParallelDims(ranks)
    results: dict[str, Any] = {}
    for name, changes in {PLAIN: {}, **(OFFLOADS if ranks.num_ranks > 1 else {})}.items():
        own = folder / f"{name}-{ranks.num_ranks}"
        own.mkdir(exist_ok=True)
        results[name] = trained(model, own, folder / f"{PLAIN}-{ranks.num_ranks}", replace(HOW, **changes), dims)
    one_key_head = with_one_key_head(model, folder / f"one-key-head-{ranks.num_ranks}-{ranks.rank}")
    own = folder / f"{ONE_KEY_HEAD}-{ranks.num_ranks}"
    own.mkdir(exist_ok=True)
    dims_of_one = ParallelDims(ranks, ParallelLayout(sequence_parallel=ranks.num_ranks))
    results[ONE_KEY_HEAD] = trained(one_key_head, own, own, HOW, dims_of_one)
    if ranks.num_ranks > 1:
        together = ParallelDims(ranks, ParallelLayout(sequence_parallel=2))
        for name, changes in SEQUENCE.items():
            own = folder / f"{name}-{ranks.num_ranks}"
            own.mkdir(exist_ok=True)
            how = replace(HOW, **changes)
            results[name] = trained(model, own, folder / f"{PLAIN}-{ranks.num_ranks}", how, together)
    if ranks.num_ranks > 1:
        for stage in (1, 2, 3):
            how = replace(HOW, dtype="bfloat16", zero_stage=stage)
            results[f"sum-{stage}"] = error_of_sum(how, dims)
            results[f"offloaded-sum-{stage}"] = error_of_sum(replace(how, offload="optimizer"), dims)
            results[f"rounded-sum-{stage}"] = error_of_sum(replace(how, gradient_dtype="as-trained"), dims)
    if ranks.is_leader:
        print(json.dumps(results))
    ranks.leave(0)
    return 0
