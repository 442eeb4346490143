"""Trains on a batch, on one whose answers are all cut, and on the first again, on one rank or two; prints what changed.

Arguments: MODEL CONNECTIONS, where MODEL/../empty.scored are the groups of the batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.trainer.groups.stored_groups import ready
from tests.trainer.learner.pass_check import HOW

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.config.run_file import load
from penstock.protocol.facts import GroupScored, decode
from penstock.protocol.packs import group_pack
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.learner.critic import Regression, TokenCredit, load_critic
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.load_model import load_policy, load_reference
from penstock.trainer.learner.planning import Planner, learn
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings
from penstock.trainer.telemetry.metrics import step_fields

CASES: dict[str, tuple[int, list[str]]] = {  # ZeRO stage, settings
    "plain": (1, []),
    "passes": (0, ["algorithm.epochs=2", "algorithm.minibatches=2", "algorithm.importance=token"]),
    "critic": (3, ["algorithm.name=ppo"]),
    "m2po": (2, ["algorithm.name=m2po_released", "algorithm.ess_level=token"]),
    "steered": (1, ["algorithm.kl_coefficient=0.1", "algorithm.kl_target=0.01", "algorithm.entropy_coefficient=0.1"]),
}


def state(learner: Learner) -> str:
    """Hash this rank's weights and moments, and the critic's."""
    found = hashlib.sha256()
    parts = [learner.policy.capture(), *([learner._critic.capture()] if learner._critic is not None else [])]
    for fragment in (fragment for part in parts for fragment in part.shard.fragments):
        for kind, tensor in sorted(fragment.tensors.items()):
            found.update(kind.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def cut(group: ReadyGroup) -> ReadyGroup:
    generated = group.scored.generated
    reasons = ("length",) * len(generated.finish_reasons)
    return replace(
        group,
        scored=group.scored.model_copy(update={"generated": generated.model_copy(update={"finish_reasons": reasons})}),
    )


def lead(learner: Learner, settings: TrainerSettings, groups: list[ReadyGroup]) -> dict[str, Any]:
    planner, steps = Planner(settings, learner, {}), []
    for batch in (groups, [cut(group) for group in groups], groups):
        before, algorithm = state(learner), planner.document()
        learned = learn(planner, learner, batch, 0, keep_groups=2)
        steps.append(
            {
                "moved": state(learner) != before,
                "steered": planner.document() != algorithm,
                "steps_done": learner.policy.steps_done,
                "skipped": dict(learned.skipped),
                "updates": learned.updates,
                "left_out": learned.left_out,
                "fields": step_fields(1, 0, learned.metrics, batch, {0: 1}),
            }
        )
    return {"steps": steps}


def main(arguments: Sequence[str]) -> int:
    model, connections = arguments
    ranks = Ranks()
    dims = ParallelDims(ranks)
    blobs = Blobs(S3Settings.model_validate(json.loads(Path(connections).read_text())))
    message = decode((Path(model).parent / "empty.scored").read_bytes(), GroupScored)
    groups = ready(message, group_pack.decode(blobs.get(message.pack)))
    results: dict[str, Any] = {}
    for name, (stage, overrides) in CASES.items():
        given = [f"model.path={model}", "trainer.micro_batch_tokens=120", "data.max_prompt_tokens=100"]
        given += ["rollout.max_new_tokens=10", "algorithm.mask_truncated=true"]
        settings = load(TrainerSettings, overrides=[*given, *overrides]).settings
        how = replace(HOW, zero_stage=stage, schedule="linear", min_lr_ratio=0.0, warmup_steps=0)
        policy, critic, reference = load_policy(Path(model), how, dims, temperature=1.0), None, None
        if settings.algorithm.has_critic:
            critic = load_critic(Path(model), how, Regression(updates=2), TokenCredit(), dims)
        if settings.needs_reference:
            reference = load_reference(Path(model), how, policy.device, dims, temperature=1.0)
        learner = Learner(policy, dims, blobs, build_objective(settings.algorithm), reference, critic)
        if ranks.is_leader:
            results[name] = lead(learner, settings, groups)
            learner.dismiss()
        else:
            learner.follow()
        ranks.barrier()
    if ranks.is_leader:
        print(json.dumps(results))
    ranks.leave(0)
    return 0
