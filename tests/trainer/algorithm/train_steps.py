"""Run a few steps of each of several algorithms in a separate process; prints the metrics of each step.

Its arguments: the model folder, and the overrides of each case as JSON: {"name": ["algorithm.name=gspo", ...], ...}.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.trainer.groups.stored_groups import invent_group, taught
from tests.trainer.learner.batch_check import logprobs
from tests.trainer.learner.rank_check import how
from transformers import AutoModelForCausalLM

from penstock.protocol.config.run_file import load
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.load_model import load_policy, load_reference
from penstock.trainer.learner.planning import Planner
from penstock.trainer.learner.reference import RemoteReference
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings

NUM_STEPS = 3


def figures(model: str, overrides: list[str], dims: ParallelDims) -> list[dict[str, Any]]:
    """Train a fresh policy and return the metrics of each step."""
    given = [f"model.path={model}", "trainer.micro_batch_tokens=120", "data.max_prompt_tokens=100"]
    loaded = load(TrainerSettings, overrides=[*given, "rollout.max_new_tokens=10", *overrides]).settings
    settings = loaded.algorithm
    policy = load_policy(Path(model), how(1, "float32"), dims, temperature=1.0)
    reference = None
    if settings.needs_reference and settings.reference_device == "remote":
        reference = RemoteReference()
    elif settings.needs_reference:
        reference = load_reference(Path(model), how(1, "float32"), policy.device, dims, temperature=1.0)
    nothing: Any = None  # a rank that is given its groups fetches none
    learner = Learner(policy, dims, nothing, build_objective(settings), reference)
    pack = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)
    groups = []
    for number in range(3):
        group = invent_group(f"e0.p{number}.a0", version=2, seed=number)
        if settings.needs_teacher:
            group = taught(group, loaded.teacher.top_k)
        scored = ScoredGroup(generated=group.summary(number), rewards=(1.0, 0.0, 1.0, 0.0), scorer="test")
        groups.append(ReadyGroup(scored, pack, group))
    found, planner = [], Planner(loaded, learner, {})
    for _ in range(NUM_STEPS):
        plan = planner.plan(groups, 5)
        done = learner.step(plan, groups)
        found.append({"loss": done.loss, "lr": done.lr, "sums": done.sums, **planner.learned(done)})
        found[-1]["advantages"] = [row.advantage for row in plan.rows]
    if settings.parts.estimator.value.by_gradient:
        found[0]["plain"] = [advantage for group in groups for advantage in plain_vcpo(model, group)]
    return found


def plain_vcpo(model: str, group: ReadyGroup) -> list[float]:
    """VCPO's advantages of a group, without any of Penstock's learner: one trajectory after another."""
    policy, rewards = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), group.scored.rewards
    shares = []
    for row, scored in zip(group.group.trajectories, logprobs(policy, group), strict=True):
        policy.zero_grad()
        scored.sum().backward()
        weight = float((scored.detach() - torch.from_numpy(row.behaviour_logprobs[row.loss_mask])).sum().exp())
        squares = sum(float(p.grad.double().square().sum()) for p in policy.parameters() if p.grad is not None)
        shares.append(weight**2 * squares)
    baseline = sum(share * reward for share, reward in zip(shares, rewards, strict=True)) / sum(shares)
    return [(reward - baseline) / statistics.pstdev(rewards) for reward in rewards]


def main(arguments: Sequence[str]) -> None:
    model, cases = arguments
    torch.set_num_threads(1)
    ranks = Ranks()
    print(
        json.dumps(
            {name: figures(model, overrides, ParallelDims(ranks)) for name, overrides in json.loads(cases).items()}
        )
    )
    ranks.leave(0)
