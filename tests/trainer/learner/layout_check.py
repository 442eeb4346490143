"""Trains the same batch in every layout of the ranks and of memory, and prints losses, norms and weights.

Arguments: MODEL FOLDER [[SEQUENCE_PARALLEL,TENSOR_PARALLEL]]; checkpoints go below FOLDER.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import load_file, save_file
from tests.servers import wait_for
from tests.trainer.learner.tiny import HOW, qwen3
from torch import Tensor, nn

from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import MicroBatch, Row, build, plan_micro_batches, prefixes_of
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.errors import UnsupportedModel
from penstock.trainer.learner.adapter import Lora, attach
from penstock.trainer.learner.load_model import load_language_model, load_policy
from penstock.trainer.learner.logprobs import CompletionScorer, read_batch
from penstock.trainer.learner.optimizer_state import part_of
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.shard_files import CapturedPart, Fragment
from penstock.trainer.learner.step_metrics import layer_groups
from penstock.trainer.learner.trainable import Optimisation, Trainable
from penstock.trainer.parallel_dims import ParallelDims, ParallelLayout
from penstock.trainer.ranks import Ranks

NUM_STEPS = 3
PLAIN = "plain"
_CHUNKS = {"max_logits": 7 * 55}  # seven tokens go through the output head at once
OFFLOADS: dict[str, dict[str, Any]] = {
    "offload-1": {"offload": "optimizer"},
    "offload-2": {"offload": "optimizer", "zero_stage": 2},
    "offload-3": {
        "offload": "parameters",
        "zero_stage": 3,
        "gradient_checkpointing": True,
        "activation_offload": True,
        **_CHUNKS,
    },
    "activations-2": {"gradient_checkpointing": True, "activation_offload": True, "zero_stage": 2},
}
SEQUENCE: dict[str, dict[str, Any]] = {  # both ranks compute the same rows
    "sequence-0": {"zero_stage": 0},
    "sequence-1": {},
    "sequence-2": {"zero_stage": 2, "gradient_checkpointing": True},
    "sequence-3": {"zero_stage": 3, **_CHUNKS},
}
MEASURED_SEQUENCE, MEASURED_DIVIDED = "measured-sequence", "measured-divided"
TENSOR: dict[str, dict[str, Any]] = {  # both ranks have a part of the weights
    "tensor-0": {"zero_stage": 0},
    "tensor-1": {**_CHUNKS},
    "tensor-2": {"zero_stage": 2, "gradient_checkpointing": True},
    "tensor-3": {"zero_stage": 3},
}
EXPERTS = "experts"  # a mixture of experts, with given ones for every token
WITHOUT_EXPERTS = "without experts"
EXPERTS_OF_TWO: dict[str, dict[str, Any]] = {
    "experts-1": {},
    "experts-3": {"zero_stage": 3, "gradient_checkpointing": True},
    "experts-sequence-1": {},
    "experts-sequence-3": {"zero_stage": 3},
}
FROM_DIVIDED, DIVIDED_SAVED = "from-tensor-1", "divided.saved"
ONE_KEY_HEAD = "one key head"  # fewer than ranks
MEASURED: dict[str, dict[str, Any]] = {
    "measured-0": {"zero_stage": 0},
    "measured-2": {"zero_stage": 2, "offload": "optimizer"},
    "measured-3": {"zero_stage": 3},
    "measured-lora-3": {"lora": Lora(4, 8.0), "zero_stage": 3},
    "measured-bfloat16-1": {"dtype": "bfloat16"},
}


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


def with_experts(some: Sequence[Row]) -> list[Row]:
    """Return rows with random experts: 2 of 4 in both layers, the same for the same tokens of a prompt."""
    found = []
    for row in some:
        num_prompt = int(np.flatnonzero(row.loss_mask)[0])
        order = [
            np.random.default_rng(row.token_ids[: at + 1] if at < num_prompt else row.token_ids).random((at + 1, 2, 4))[
                -1
            ]
            for at in range(len(row.token_ids) - 1)
        ]
        experts = np.sort(np.stack(order).argsort(-1)[..., :2], axis=-1)
        found.append(replace(row, experts=experts.astype(np.uint8)))
    return found


def mixture(folder: Path) -> Path:
    """Write a tiny Qwen3-MoE."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=55, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
        initializer_range=0.1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def micro_batches(dims: ParallelDims, *, replays: bool = False) -> list[MicroBatch]:
    chosen = with_experts(rows()) if replays else rows()
    tokens, masks = [row.token_ids for row in chosen], [row.loss_mask for row in chosen]
    prefixes = prefixes_of(tokens, masks, [row.experts for row in chosen])
    plan = plan_micro_batches(list(map(len, tokens)), budget_tokens=40, num_ranks=dims.rows.count, prefixes=prefixes)
    found = [build([chosen[number] for number in piece]) for piece in plan[dims.rows.index]]
    assert len(found) > 1 or dims.rows.count > 2, "a rank adds up the gradients of several micro-batches"
    return found


def with_one_key_head(model: Path, folder: Path) -> Path:
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
    objective = build_objective(AlgorithmSettings(entropy_coefficient=0.01))
    batches = micro_batches(dims, replays=how.router_replay)
    steps = [policy.train_step(batches, objective) for _ in range(NUM_STEPS - 1)]
    policy.save(folder)
    steps.append(policy.train_step(batches, objective))
    tensors = policy.weights.snapshot()
    policy.load(folder)
    policy.train_step(batches, objective)
    again = policy.weights.snapshot()
    policy.load(plain)
    policy.train_step(batches, objective)
    from_plain = policy.weights.snapshot()
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


def error_of_head(how: Optimisation, dims: ParallelDims) -> float:
    """Return how far the gradient of an output head is from float64, in seven chunks of a vocabulary of 2,000."""
    count, vocabulary = 140, 2_000
    model = qwen3(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=64, head_dim=64, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.02,
    ).to(torch.bfloat16)  # fmt: skip
    ids, weights = torch.randint(0, vocabulary, (1, count + 1)), torch.randn(count)
    weight, asked = model.lm_head.weight.detach().double(), (ids, torch.arange(count), ids[0, 1:])
    trainable = Trainable(CompletionScorer(model, 1.0, max_logits=20 * vocabulary), how, dims)
    with torch.no_grad():
        hidden = trainable(*asked, hidden_only=True).double()
    chances = (hidden @ weight.T).softmax(-1)
    of_logits = weights.double()[:, None] * (torch.nn.functional.one_hot(ids[0, 1:], vocabulary) - chances)
    true = of_logits.T @ hidden
    trainable.begin(is_last=True)
    trainable.backward((trainable(*asked) * weights).sum() / dims.states.count)
    return float((safe_get_full_grad(model.lm_head.weight).double() - true).norm() / true.norm())


def measured(model: Path, folder: Path, how: Optimisation, dims: ParallelDims) -> dict[str, Any]:
    """Make two steps, an outlier and another step; return what was measured, and what the outlier changed."""
    policy = load_policy(model, replace(how, skip_above=5.0, skip_after=2), dims, temperature=1.0)
    objective = build_objective(AlgorithmSettings())
    batches = micro_batches(dims)
    first = policy.train_step(batches, objective)
    before = masters(policy)
    second = policy.train_step(batches, objective)
    moved = update_ratios(policy, before, dims)
    kept = policy.capture().shard
    outlier = policy.train_step([replace(batch, weights=batch.weights * 100.0) for batch in batches], objective)
    after = policy.capture().shard
    last = policy.train_step(batches, objective)
    steps, work = (first, second, outlier, last), policy.take_work()
    if how.zero_stage == 0:  # one case suffices: the norms are in the same place at every stage
        CapturedPart("engine", after).write(folder)
        dims.ranks.barrier()
        policy._trainable.load(folder / "engine")
    return {
        "norm": [step.grad_norm for step in steps],
        "first_layers": {name: one.grad_norm for name, one in first.layers.items()},
        "layers": {name: one.grad_norm for name, one in second.layers.items()},
        "ratios": {name: one.update_ratio for name, one in second.layers.items()},
        "moved": moved,
        "work": [work.flops, work.tokens],
        "left_out": [step.left_out for step in steps],
        "outlier_layers": {name: one.grad_norm for name, one in outlier.layers.items()},
        "outlier_ratios": [layer.update_ratio for layer in outlier.layers.values()],
        "is_unchanged": same_fragments(kept.fragments, after.fragments),
        "stored": after.state["recent_grad_norms"],
        "restored": list(policy._trainable._outliers.norms),
        "by_hand": by_hand(model, how, objective) if dims.ranks.num_ranks == 1 else {},
    }


def masters(policy: Policy) -> dict[tuple[str, int], Tensor]:
    """Copy the master weights that this rank accounts for."""
    places = policy._trainable._optimizer_state().places()
    return {(place.name, place.start): part_of(place.stepped, place).clone() for place in places if place.is_written}


def update_ratios(policy: Policy, before: dict[tuple[str, int], Tensor], dims: ParallelDims) -> dict[str, float]:
    """Return the norm of the change of the master weights over theirs, by group of layers, over all ranks."""
    groups, after = policy._trainable._watch._groups, masters(policy)
    names = sorted({group for own in groups.values() for group in own})
    sums = {name: [0.0, 0.0] for name in names}
    for key, old in before.items():
        for group in groups[key[0]]:
            sums[group][0] += float((after[key] - old).double().square().sum())
            sums[group][1] += float(old.double().square().sum())
    flat = dims.ranks.sum([value for name in names for value in sums[name]])
    return {name: (flat[2 * at] / flat[2 * at + 1]) ** 0.5 for at, name in enumerate(names)}


def same_fragments(one: Sequence[Fragment], other: Sequence[Fragment]) -> bool:
    """Return True if weights and moments are bit for bit the same."""
    return all(
        torch.equal(tensor, after.tensors[kind])
        for before, after in zip(one, other, strict=True)
        for kind, tensor in before.tensors.items()
    )


def by_hand(model: Path, how: Optimisation, objective: Any) -> dict[str, float]:
    """Return the gradient norm of each group of layers on the first batch, without DeepSpeed or ranks."""
    alone = ParallelDims(SimpleNamespace(rank=0, num_ranks=1))  # type: ignore[arg-type]
    module = load_language_model(model, replace(how, zero_stage=0), alone)
    if how.lora is not None:
        attach(module, how.lora)
    scorer = CompletionScorer(module, 1.0)
    for batch in micro_batches(alone):
        objective(read_batch(scorer, batch), batch).loss.backward()
    learning = {name: p for name, p in scorer.named_parameters() if p.requires_grad}
    squares: dict[str, float] = {}
    for name, groups in layer_groups(learning).items():
        gradient = learning[name].grad
        assert gradient is not None
        for group in (*groups, "all"):
            squares[group] = squares.get(group, 0.0) + float(gradient.double().square().sum())
    return {name: square**0.5 for name, square in squares.items()}


class Cases:
    """Trains one model in layouts that this number of ranks allows."""

    def __init__(self, model: Path, folder: Path, ranks: Ranks) -> None:
        self.model, self.folder, self.ranks = model, folder, ranks
        self.dims = ParallelDims(ranks)
        self.results: dict[str, Any] = {}

    def add(self, name: str, dims: ParallelDims, changes: Mapping[str, Any], *, model: Path | None = None) -> None:
        """Train a case, and also from the checkpoint of the plain one, unless it has a model of its own."""
        own = self.folder / f"{name}-{self.ranks.num_ranks}"
        own.mkdir(exist_ok=True)
        plain = own if model else self.folder / f"{PLAIN}-{self.ranks.num_ranks}"
        self.results[name] = trained(model or self.model, own, plain, replace(HOW, **changes), dims)

    def measure(self, name: str, dims: ParallelDims, changes: Mapping[str, Any]) -> None:
        own = self.folder / f"{name}-{self.ranks.num_ranks}"
        own.mkdir(exist_ok=True)
        self.results[name] = measured(self.model, own, replace(HOW, **changes), dims)

    def add_experts(self, together: ParallelDims) -> None:
        """Add what two ranks do with given experts, of rows of their own or ``together``."""
        model = self.folder / "experts"
        for name, changes in EXPERTS_OF_TWO.items():
            dims = together if "sequence" in name else self.dims
            self.add(name, dims, {**changes, "router_replay": True}, model=model)

    def add_sums(self) -> None:
        """Add how far sums of bfloat16 gradients are from those in float32."""
        for stage in (1, 2, 3):
            how = replace(HOW, dtype="bfloat16", zero_stage=stage)
            self.results[f"sum-{stage}"] = error_of_sum(how, self.dims)
            self.results[f"head-{stage}"] = error_of_head(how, self.dims)
            self.results[f"offloaded-sum-{stage}"] = error_of_sum(replace(how, offload="optimizer"), self.dims)
            self.results[f"rounded-sum-{stage}"] = error_of_sum(replace(how, gradient_dtype="as-trained"), self.dims)


def without_experts(model: Path, dims: ParallelDims) -> list[Any]:
    """Return how a policy that replays routers refuses rows without experts, and its mean score without replay."""
    policy = load_policy(model, replace(HOW, router_replay=True), dims, temperature=1.0)
    batch = micro_batches(dims)[0]
    try:
        policy.logprobs(batch)
    except UnsupportedModel as err:
        return [str(err), float(policy.logprobs(batch, replays=False).mean())]
    return ["", 0.0]


def weights_after(model: Path, checkpoint: Path, dims: ParallelDims) -> dict[str, float]:
    policy = load_policy(model, HOW, dims, temperature=1.0)
    policy.load(checkpoint)
    policy.train_step(micro_batches(dims), build_objective(AlgorithmSettings(entropy_coefficient=0.01)))
    return {name: float(tensor.double().norm()) for name, tensor in policy.weights.snapshot().items()}


def main(arguments: Sequence[str]) -> int:
    model, folder = map(Path, arguments[:2])
    ranks = Ranks()
    num, cases = ranks.num_ranks, Cases(model, folder, ranks)
    cases.add(PLAIN, cases.dims, {})
    if len(arguments) > 2:  # of `make proof NAME=layouts`
        sequence, tensor = json.loads(arguments[2])
        dims = ParallelDims(ranks, ParallelLayout(sequence, tensor))
        for stage in (0, 1, 2, 3):
            cases.add(f"{stage}", dims, {"zero_stage": stage, "gradient_checkpointing": stage == 2})
    elif num == 1:
        cases.add(ONE_KEY_HEAD, cases.dims, {}, model=with_one_key_head(model, folder / "one-key-head"))
        experts = folder / "experts"
        cases.add(EXPERTS, cases.dims, {"router_replay": True}, model=experts)
        cases.results[WITHOUT_EXPERTS] = without_experts(experts, cases.dims)
        for name, changes in MEASURED.items():
            cases.measure(name, cases.dims, changes)
        wait_for((folder / DIVIDED_SAVED).exists, "a checkpoint of ranks that share the weights", 700.0)
        cases.results[FROM_DIVIDED] = weights_after(model, folder / "tensor-1-2", cases.dims)
    else:
        for name, changes in OFFLOADS.items():
            cases.add(name, cases.dims, changes)
        together = ParallelDims(ranks, ParallelLayout(sequence_parallel=2))
        one_key_head = with_one_key_head(model, folder / f"one-key-head-of-{ranks.rank}")
        cases.add(ONE_KEY_HEAD, together, {}, model=one_key_head)
        cases.add_experts(together)
        cases.measure(MEASURED_SEQUENCE, together, {})
        for name, changes in SEQUENCE.items():
            cases.add(name, together, changes)
        for name, changes in MEASURED.items():
            cases.measure(name, cases.dims, changes)
        cases.add_sums()
        # Last: DeepSpeed makes its groups of the ranks that share weights once in a process, for all engines after.
        divided = ParallelDims(ranks, ParallelLayout(tensor_parallel=2))
        for name, changes in TENSOR.items():
            cases.add(name, divided, changes)
        cases.measure(MEASURED_DIVIDED, divided, {})
        ranks.barrier()
        (folder / DIVIDED_SAVED).touch()
    if ranks.is_leader:
        print(json.dumps(cases.results))
    ranks.leave(0)
    return 0
