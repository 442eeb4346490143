"""Trains batches in several passes, on one rank or two, and the same with plain torch; prints both.

Arguments: MODEL FOLDER (FOLDER/setup.json: connections).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.trainer.groups.stored_groups import ready
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.config.run_file import load
from penstock.protocol.facts import GroupScored, decode
from penstock.protocol.packs import group_pack
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer.algorithm.estimators.gae import gae
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.learner.critic import Regression, TokenCredit, load_critic
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.planning import Learned, Planner, learn
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings

NUM_STEPS, LR, WARMUP = 2, 4e-3, 2
HOW = Optimisation(
    num_steps=10, lr=LR, betas=(0.9, 0.95), weight_decay=0.01, warmup_steps=WARMUP, schedule="constant", min_lr_ratio=1.0,
    max_grad_norm=0.5, zero_stage=1, dtype="float32", keep_whole_below=0,
)  # fmt: skip
TWICE = ["algorithm.epochs=2", "algorithm.minibatches=2"]
CASES: dict[str, tuple[int, list[str]]] = {  # ZeRO stage, settings
    "plain": (1, ["algorithm.name=grpo", "algorithm.importance=token", *TWICE]),
    "critic": (3, ["algorithm.name=ppo", "algorithm.minibatches=3"]),
    "stopped": (
        0,
        ["algorithm.name=grpo", "algorithm.epochs=4", "algorithm.stop_kl=1e-9", "algorithm.ess_level=token"],
    ),
}


def plain_torch(model: str, groups: Sequence[ReadyGroup], plans: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """Train one batch after another without any of Penstock's learner; ``plans`` are the groups of each optimizer step."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.01)
    losses, norms, clipped, first = [], [], [], []
    for step, updates in enumerate(plans):
        first.append({})
        with torch.no_grad():
            before = [logprobs(policy, group) for group in groups]
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP)
        for places in updates:
            total, count, num_clipped = torch.zeros(()), 0, 0
            for place in places:
                rewards = torch.tensor(groups[place].scored.rewards)
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6) if rewards.std() > 0 else rewards * 0.0
                for row, (new, old) in enumerate(zip(logprobs(policy, groups[place]), before[place], strict=True)):
                    first[-1].setdefault(f"{place}.{row}", new.tolist())
                    trajectory = groups[place].group.trajectories[row]
                    sampled = torch.from_numpy(trajectory.behaviour_logprobs[trajectory.loss_mask])
                    ratio = (new - old).exp()
                    clip = torch.minimum(ratio * advantages[row], ratio.clamp(0.8, 1.2) * advantages[row])
                    total = total - ((old - sampled).exp().clamp(max=2.0) * clip).sum()
                    num_clipped += int((clip < ratio * advantages[row]).sum())
                    count += len(new)
            optimizer.zero_grad()
            (total / count).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)))
            optimizer.step()
            losses.append(float(total.detach() / count))
            clipped.append(num_clipped)
    return {
        "losses": losses, "norms": norms, "clipped": clipped, "first": first,
        "weights": sketch(dict(policy.named_parameters())),
    }  # fmt: skip


def logprobs(policy: torch.nn.Module, group: ReadyGroup) -> list[Tensor]:
    """Score each trajectory's sampled tokens, one trajectory at a time."""
    found = []
    for trajectory in group.group.trajectories:
        ids = torch.from_numpy(trajectory.token_ids).long()
        scores = policy(ids[None]).logits[0].float().log_softmax(-1)
        sampled = np.flatnonzero(trajectory.loss_mask)
        found.append(scores[sampled - 1, ids[sampled]])
    return found


def sketch(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    found = {}
    for name, tensor in sorted(tensors.items()):
        values = tensor.detach().double().flatten()
        wave = torch.arange(len(values), dtype=torch.float64).cos()
        found[name] = [float(values.abs().sum()), float((values * wave).sum())]
    return found


def digest(learner: Learner) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(learner.snapshot().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def lead(learner: Learner, settings: TrainerSettings, groups: list[ReadyGroup], folder: Path) -> dict[str, Any]:
    """Train two batches, then the second one again from a checkpoint."""
    planner, learned, digests = Planner(settings, learner, {}), [], []
    for step in range(NUM_STEPS):
        if step == 1:
            learner.save(folder)
        learned.append(learn(planner, learner, groups, 0, keep_groups="all" if step else 2))
        digests.append(digest(learner))
    last = learner.snapshot()
    learner.load(folder)
    again = learn(Planner(settings, learner, {}), learner, groups, 0)
    return {
        "updates": [one.updates for one in learned],
        "steps_done": learner.policy.steps_done,
        "loss": [one.metrics.loss for one in learned],
        "lr": [one.metrics.lr for one in learned],
        "lr_factor": [one.metrics.lr_factor for one in learned],
        "grad_norm": [one.metrics.grad_norm for one in learned],
        "tokens": [one.metrics.sums["tokens"] for one in learned],
        "fresh": [one.metrics.sums["fresh_tokens"] for one in learned],
        "passes": [[(p.num_updates, p.clip_fraction, p.kl_proximal) for p in one.metrics.passes] for one in learned],
        "critic": [dict(one.metrics.critic) for one in learned],
        "kept": [kept(one, groups) for one in learned],
        "weights": sketch(last),
        "again_equal": (again.metrics == learned[1].metrics, digest(learner) == digests[1]),
    }


def kept(learned: Learned, groups: list[ReadyGroup]) -> dict[str, tuple[list[float], list[int]]]:
    """Return the log-probabilities and outcomes that a step kept, by group and trajectory."""
    places = {group.scored.generated.row_group: place for place, group in enumerate(groups)}
    rows = learned.metrics.kept
    assert rows is not None
    found, end = {}, 0
    for number, count in zip(rows.rows.tolist(), rows.counts.tolist(), strict=True):
        row, part, end = learned.plan.rows[number], slice(end, end + count), end + count
        name = f"{places[row.row_group]}.{row.trajectory}"
        found[name] = rows.logprobs[part].tolist(), rows.outcomes[part].tolist()
    return found


def main(arguments: Sequence[str]) -> int:
    model, folder = arguments
    ranks = Ranks()
    dims = ParallelDims(ranks)
    blobs = Blobs(S3Settings.model_validate(json.loads(Path(folder, "setup.json").read_text())))
    message = decode((Path(model).parent / "passes.scored").read_bytes(), GroupScored)
    groups = ready(message, group_pack.decode(blobs.get(message.pack)))
    results: dict[str, Any] = {}
    for name, (stage, overrides) in CASES.items():
        given = [f"model.path={model}", "trainer.micro_batch_tokens=120", "data.max_prompt_tokens=100"]
        settings = load(TrainerSettings, overrides=[*given, "rollout.max_new_tokens=10", *overrides]).settings
        how = replace(HOW, zero_stage=stage)
        policy, critic = load_policy(Path(model), how, dims, temperature=1.0), None
        if settings.algorithm.has_critic:
            credit = TokenCredit(whiten_rewards=settings.algorithm.options_of(gae).whiten_rewards)
            critic = load_critic(Path(model), how, Regression(updates=2, head_start_steps=1), credit, dims)
        learner = Learner(policy, dims, blobs, build_objective(settings.algorithm), None, critic)
        if ranks.is_leader:
            target = Path(folder) / name
            target.mkdir()
            results[name] = lead(learner, settings, groups, target)
            learner.dismiss()
        else:
            learner.follow()
        ranks.barrier()
    if ranks.is_leader:
        results["hand"] = plain_torch(model, groups, results["plain"]["updates"])
        print(json.dumps(results))
    ranks.leave(0)
    return 0
