"""Trains a few steps on stored groups and prints what came out; run alone or under torchrun.

python -m tests.trainer.rank_check S3_JSON RUN_ID MODEL FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from protocol import group_pack
from protocol.adapter_format import AdapterConfig, factor_pairs
from protocol.connection import S3Settings
from protocol.facts import GroupScored, decode
from protocol.transport.blobs import Blobs
from trainer import adapter
from trainer.adapter import Lora
from trainer.algorithm_settings import AlgorithmSettings
from trainer.algorithms import objective
from trainer.credit import credit_rule
from trainer.crew import Crew
from trainer.critic import Regression, load_critic
from trainer.policy import load_policy, load_reference
from trainer.ranks import Ranks
from trainer.reference import WithoutAdapter
from trainer.step_plan import ReadyGroup, all_rows, make_plan
from trainer.token_credit import TokenCredit
from trainer.trainable import Optimisation

CASES = [
    *((f"{stage}-float32", stage, "float32", "grpo") for stage in (0, 1, 2, 3)),
    *((f"{stage}-bfloat16", stage, "bfloat16", "grpo") for stage in (1, 2)),
    *((f"ppo-{stage}", stage, "float32", "ppo") for stage in (0, 1, 2, 3)),
    ("ppo-bfloat16", 2, "bfloat16", "ppo"),
    *((f"lora-{stage}", stage, "float32", "grpo") for stage in (1, 2, 3)),
    ("lora-bfloat16", 2, "bfloat16", "grpo"),
]
CRITIC = Regression(updates=2, clip=0.2, head_start_steps=1)
NUM_STEPS = 4
CHUNK_TOKENS = 7  # through the output head at once: every micro-batch takes several chunks, and not equally many


def how(zero_stage: int, dtype: str) -> Optimisation:
    return Optimisation(
        num_steps=10, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01, warmup_steps=2, schedule="linear",
        min_lr_ratio=0.1, max_grad_norm=1.0, zero_stage=zero_stage, dtype=dtype, keep_whole_below=0,  # type: ignore[arg-type]
        gradient_checkpointing=zero_stage == 2,
    )  # fmt: skip


def lead(crew: Crew, blobs: Blobs, message: GroupScored, folder: Path, settings: AlgorithmSettings) -> dict:
    """Four steps, a checkpoint after two of them; returns what must not depend on the number of ranks."""
    groups = group_pack.decode(blobs.get(message.pack))
    ready = [ReadyGroup(s, message.pack, groups[s.generated.row_group]) for s in message.groups]
    plan = make_plan(
        ready, credit=credit_rule(settings, longest=10), aggregation="token-mean",
        max_completion_tokens=10, budget_tokens=160, num_ranks=crew.num_ranks,
    )  # fmt: skip
    if settings.has_critic:
        plan = replace(plan, token_kl=0.05)
    figures = []
    for step in range(NUM_STEPS):
        if step == 2:
            crew.save(folder)
        figures.append(crew.step(plan, ready))
    crew.load(folder)
    again = [crew.step(plan, ready) for _ in range(2)]
    tensors = crew.snapshot()
    return {
        "micro_batches": len(plan.micro_batches[0]),
        "loss": [f.loss for f in figures],
        "grad_norm": [f.grad_norm for f in figures],
        "critic": [dict(f.critic) for f in figures],
        "lr": [f.lr for f in figures],
        "tokens": figures[0].sums["tokens"],
        "clipped": figures[-1].sums["clipped"],
        "gaps": crew.reference_gaps(all_rows(ready, budget_tokens=160, num_ranks=crew.num_ranks), ready, "k2"),
        "full_gaps": crew.reference_gaps(all_rows(ready, budget_tokens=160, num_ranks=crew.num_ranks), ready, "full"),
        "resumed_equal": [(f.loss, f.critic) for f in again] == [(f.loss, f.critic) for f in figures[2:]],
        "names": sorted(tensors),
        "adapter": published_adapter(crew, tensors),
        "num_parameters": crew.policy.num_parameters,
        "checkpoint_bytes": sum(path.stat().st_size for path in (folder / "engine").iterdir()),
        "checksum": float(sum(t.double().abs().sum() for t in tensors.values())),
    }


def published_adapter(crew: Crew, merged: dict[str, torch.Tensor]) -> dict:
    """Return what is published of adapters, and whether base and factors make exactly the model that is exported."""
    weights = crew.weights(None, as_adapter=True)
    if weights.base is None:
        return {}
    base, scale = weights.base.tensors, AdapterConfig.from_json(weights.base.config).scale
    made = dict(base)
    for name, down, up in factor_pairs(weights.tensors):
        made[name] = adapter.merged(base[name], weights.tensors[down], weights.tensors[up], scale)
    return {
        "shapes": {name: list(tensor.shape) for name, tensor in weights.tensors.items()},
        "scale": scale,
        "base": weights.base.root,
        "is_exact": made.keys() == merged.keys() and all(torch.equal(made[name], merged[name]) for name in merged),
    }


def main() -> None:
    s3, run_id, model, folder = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = Ranks()
    blobs = Blobs(S3Settings.model_validate_json(s3))
    results = {}
    for name, stage, dtype, algorithm in CASES:
        full_kl = {"kl_coefficient": 0.1, "kl_form": "full"} if "lora" in name else {}
        settings = AlgorithmSettings(name=algorithm, **full_kl)  # type: ignore[arg-type]
        lora = Lora(rank=4, alpha=8.0) if "lora" in name else None
        policy = load_policy(Path(model), replace(how(stage, dtype), lora=lora), ranks, temperature=1.0)
        reference = (
            WithoutAdapter(policy)
            if lora
            else load_reference(Path(model), how(0, "float32"), policy.device, temperature=1.0)
        )
        critic = None
        if settings.has_critic:
            credit = TokenCredit(gamma=0.99, lam=0.9, kl_form="full", whiten_rewards=True)
            critic = load_critic(Path(model), how(stage, dtype), CRITIC, credit, ranks)
        policy._scorer._chunk_tokens = CHUNK_TOKENS
        crew = Crew(policy, ranks, blobs, objective(settings), reference, critic)
        if ranks.is_leader:
            message = decode((Path(model).parent / f"{run_id}.scored").read_bytes(), GroupScored)
            target = Path(folder) / name
            target.mkdir(parents=True)
            results[name] = lead(crew, blobs, message, target, settings)
            crew.dismiss()
        else:
            crew.follow()
        ranks.barrier()
    if ranks.is_leader:
        print(json.dumps(results))
    ranks.leave(0)


if __name__ == "__main__":
    main()
