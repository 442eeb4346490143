"""Trains on a batch, on one whose answers are all cut or rejected, and on the first again, on one rank or two; prints what changed.

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
from torch import Tensor

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.config.run_file import load
from penstock.protocol.facts import GroupScored, decode
from penstock.protocol.packs import group_pack
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer.algorithm.corrections.interface import Drift
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
FOUR = ["algorithm.epochs=2", "algorithm.minibatches=4", "algorithm.importance=token"]
KL = ["algorithm.kl_coefficient=0.1", "algorithm.entropy_coefficient=0.1"]
REJECTED: dict[str, tuple[int, list[str]]] = {  # of which a correction rejects tokens of old groups
    "plain": (1, []),
    "passes": (0, FOUR),
    "critic": (3, ["algorithm.name=ppo"]),
    "regularised": (2, KL),
    "successes": (1, ["algorithm.sft_coefficient=0.1"]),
    "recorded before": (0, ["algorithm.empty_batch=ignore_filters"]),
}
BY_SETTINGS = {  # that reject every token of these batches, from the first step on
    "sequences": (3, ["algorithm.rejection=seq_max_k2", "algorithm.rejection_high=1e-12"]),
    "veto": (1, ["algorithm.veto=0.99999", "algorithm.rejection=token_k2", "algorithm.rejection_high=1e-12", *FOUR]),
}


def young(drift: Drift) -> Tensor:
    return drift.ages < 5


def state(learner: Learner, *, with_critic: bool = True) -> str:
    """Hash this rank's weights and moments, and the critic's."""
    found, critic = hashlib.sha256(), learner._critic
    parts = [learner.policy.capture(), *([critic.capture()] if critic is not None and with_critic else [])]
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


def lead(
    learner: Learner,
    settings: TrainerSettings,
    batches: list[tuple[list[ReadyGroup], dict[int, int]]],
    *,
    with_critic: bool = True,
) -> dict[str, Any]:
    """Train on batches, each with the ages of versions."""
    planner, steps = Planner(settings, learner, {}), []
    for batch, ages in batches:
        before, algorithm = state(learner, with_critic=with_critic), planner.document()
        learned = learn(planner, learner, batch, 1, ages=ages, keep_groups=2)
        steps.append(
            {
                "moved": state(learner, with_critic=with_critic) != before,
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
    rejected = {f"rejected: {name}": case for name, case in {**REJECTED, **BY_SETTINGS}.items()}
    for name, (stage, overrides) in {**CASES, **rejected}.items():
        given = [f"model.path={model}", "trainer.micro_batch_tokens=120", "data.max_prompt_tokens=100"]
        given += ["rollout.max_new_tokens=10", "algorithm.mask_truncated=true"]
        settings = load(TrainerSettings, overrides=[*given, *overrides]).settings
        how = replace(HOW, zero_stage=stage, schedule="linear", min_lr_ratio=0.0, warmup_steps=0)
        policy, critic, reference = load_policy(Path(model), how, dims, temperature=1.0), None, None
        if settings.algorithm.has_critic:
            critic = load_critic(Path(model), how, Regression(updates=2), TokenCredit(), dims)
        if settings.needs_reference:
            reference = load_reference(Path(model), how, policy.device, dims, temperature=1.0)
        objective = build_objective(settings.algorithm)
        if name in rejected and name.removeprefix("rejected: ") in REJECTED:
            objective = replace(objective, corrections={"young": young})
        learner = Learner(policy, dims, blobs, objective, reference, critic)
        if ranks.is_leader and name in rejected:
            old: list[dict[int, int]] = [{}, {0: 9, 1: 9}, {0: 9}]
            results[name] = lead(learner, settings, [(groups, ages) for ages in old], with_critic=False)
            learner.dismiss()
        elif ranks.is_leader:
            results[name] = lead(
                learner, settings, [(groups, {}), ([cut(group) for group in groups], {}), (groups, {})]
            )
            learner.dismiss()
        else:
            learner.follow()
        ranks.barrier()
    if ranks.is_leader:
        print(json.dumps(results))
    ranks.leave(0)
    return 0
