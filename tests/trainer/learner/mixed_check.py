"""Trains groups and pairs together in a few ways on one rank or several, and prints what each way gave.

Arguments: FOLDER (model/, other/, rows.jsonl with prompts and pairs, and scored.msgpack, the message of a pack in the folder).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.protocol.facts import GroupScored, decode
from penstock.protocol.groups import BlobRef
from penstock.protocol.packs import group_pack
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.learner.learner import Learner, build_learner
from penstock.trainer.learner.pair_planner import open_mixed_pairs, pair_metrics
from penstock.trainer.learner.planning import Planner, learn
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings

SCORED = "scored.msgpack"
NUM_STEPS, COEFFICIENT, BETA, NUM_PAIRS = 3, 0.5, 0.3, 5
WAYS: dict[str, dict[str, Any]] = {
    "sigmoid": {"trainer": {"zero_stage": 0}},
    "sigmoid-3": {"trainer": {"zero_stage": 3}},
    "coupled": {"dpo": {"loss": "aot"}},
    "without reference": {"dpo": {"loss": "orpo", "beta": 0.1}, "algorithm": {"reference_path": None}},
    "lora": {"model": {"lora": {"rank": 4}}, "trainer": {"zero_stage": 2}, "algorithm": {"reference_path": None}},
    "whole": {"algorithm": {"dpo_coefficient": 1.0}},
    "groups alone": {"algorithm": {"dpo_coefficient": 0.0, "reference_path": None}, "dpo": {}},
}


class PackFolder:
    """Packs below a folder, as `Learner` fetches them from an object store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, ref: BlobRef) -> bytes:
        return (self._folder / ref.key).read_bytes()


def settings(folder: Path, changes: dict[str, Any]) -> TrainerSettings:
    given: dict[str, dict[str, Any]] = {
        "run": {"id": "mixed", "dir": folder / "runs", "seed": 7},
        "model": {"path": folder / "model"},
        "data": {"train": folder / "rows.jsonl", "max_prompt_tokens": 64},
        "reward": {"name": "exact_match"},
        "rollout": {"group_size": 4, "groups_per_step": 3, "max_new_tokens": 16},
        "algorithm": {"name": "gspo", "dpo_coefficient": COEFFICIENT, "reference_path": folder / "other"},
        "dpo": {"beta": BETA, "batch_size": NUM_PAIRS},
        "trainer": {"lr": 1e-3, "steps": 10, "micro_batch_tokens": 128},
    }
    return TrainerSettings.model_validate(
        {name: {**given.get(name, {}), **changes.get(name, {})} for name in {**given, **changes}}
    )


def trained(folder: Path, way: str, ranks: Ranks) -> dict[str, Any]:
    """Make some steps, and the last of them again from a checkpoint (rank 0)."""
    chosen, dims = settings(folder, WAYS[way]), ParallelDims(ranks)
    pairs = open_mixed_pairs(chosen)
    learner = build_learner(chosen, dims, PackFolder(folder), pairs)  # type: ignore[arg-type]
    if not ranks.is_leader:
        learner.follow()
        return {}
    message = decode((folder / SCORED).read_bytes(), GroupScored)
    groups = group_pack.decode((folder / message.pack.key).read_bytes())
    batch = [ReadyGroup(group, message.pack, groups[group.generated.row_group]) for group in message.groups]
    planner, steps = Planner(chosen, learner, {}), []
    for step in range(NUM_STEPS):
        if step == NUM_STEPS - 1:
            saved = folder / f"{way}-{ranks.num_ranks}"
            learner.save(saved)
        steps.append(line(learner, planner, batch))
    weights = learner.snapshot()
    learner.load(saved)
    again = line(learner, planner, batch)
    mixed = learner._pairs
    found = {
        "prompts": [[pair.prompt.tolist() for pair in mixed.at(step)] for step in range(2)] if mixed else [],
        "steps": steps,
        "again": again == steps[-1] and same(weights, learner.snapshot()),
        "checksum": float(sum(tensor.double().abs().sum() for tensor in weights.values())),
        "digests": learner.data_digests,
    }
    learner.dismiss()
    return found


def line(learner: Learner, planner: Planner, batch: list[ReadyGroup]) -> dict[str, Any]:
    learned = learn(planner, learner, batch, 0, keep_groups="all")
    figures, kept = learned.metrics, learned.metrics.kept
    assert kept is not None
    return {
        "loss": figures.loss,
        "grad_norm": figures.grad_norm,
        "tokens": figures.sums["tokens"],
        "ratio": figures.sums["ratio"],
        "kept": sorted(kept.rows.tolist()),
        **pair_metrics(figures.sums),
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def by_hand(folder: Path) -> dict[str, Any]:
    """Return the loss and the gradient's norm of the first step's pairs, from plain logits, and the prompts of two steps."""
    chosen = settings(folder, {})
    pairs = open_mixed_pairs(chosen)
    assert pairs is not None
    order = DataOrder(len(pairs), chosen.run.seed)
    steps = [[pairs[order.at(NUM_PAIRS * step + place).prompt] for place in range(NUM_PAIRS)] for step in range(2)]
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in ("model", "other"))
    losses = []
    for pair in steps[0]:
        margin = torch.zeros(())
        for answer, sign in ((pair.chosen, 1.0), (pair.rejected, -1.0)):
            with torch.no_grad():
                held = logprob(reference, pair.prompt, answer)
            margin = margin + sign * (logprob(policy, pair.prompt, answer) - held)
        losses.append(-torch.nn.functional.logsigmoid(BETA * margin))
    loss = torch.stack(losses).mean()
    loss.backward()
    squares = sum(float(p.grad.double().square().sum()) for p in policy.parameters() if p.grad is not None)
    return {
        "pair_loss": float(loss),
        "grad_norm": squares**0.5,
        "num_pairs": len(pairs),
        "prompts": [[pair.prompt.tolist() for pair in step] for step in steps],
    }


def logprob(model: torch.nn.Module, prompt: Any, answer: Any) -> Tensor:
    ids = torch.tensor([*prompt, *answer], dtype=torch.int64)
    scores = model(ids[None]).logits[0].float().log_softmax(-1)
    return scores[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]).sum()


def main(arguments: Sequence[str]) -> int:
    folder, ranks = Path(arguments[0]), Ranks()
    found: dict[str, Any] = {way: trained(folder, way, ranks) for way in WAYS}
    if ranks.num_ranks == 1:
        found["by hand"] = by_hand(folder)
    if ranks.is_leader:
        print(json.dumps(found))
    ranks.leave(0)
    return 0
