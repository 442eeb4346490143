"""Trains batches in several passes, or of which nothing may be trained, on one rank or two; prints each case.

Arguments: KIND ("passes" or "empty") FOLDER (model/, batch.scored, connections.json; checkpoints go below it).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.trainer.groups.stored_groups import ready, store_scored
from tests.trainer.learner import forks
from tests.trainer.learner.tiny import HOW
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.config.run_file import load
from penstock.protocol.facts import GroupScored, decode, encode
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs
from penstock.trainer.algorithm.corrections.interface import Drift
from penstock.trainer.algorithm.estimators.gae import gae
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.learner.critic import TokenCredit, load_critic
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.load_model import load_policy, load_reference
from penstock.trainer.learner.planning import Learned, Planner, learn
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.optimizer_settings import CriticSettings
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings
from penstock.trainer.telemetry.metrics import step_fields

NUM_STEPS, LR, WARMUP = 2, 4e-3, 2
TWICE = ["algorithm.epochs=2", "algorithm.minibatches=2"]
Cases = dict[str, tuple[int, list[str]]]  # ZeRO stage, settings
PASSES: Cases = {
    "plain": (1, ["algorithm.name=grpo", "algorithm.importance=token", *TWICE]),
    "critic": (3, ["algorithm.name=ppo", "algorithm.minibatches=3"]),
    "stopped": (
        0,
        ["algorithm.name=grpo", "algorithm.epochs=4", "algorithm.stop_kl=1e-9", "algorithm.ess_level=token"],
    ),
}

CUT: Cases = {
    "plain": (1, []),
    "passes": (0, ["algorithm.epochs=2", "algorithm.minibatches=2", "algorithm.importance=token"]),
    "critic": (3, ["algorithm.name=ppo"]),
    "m2po": (2, ["algorithm.name=m2po_released", "algorithm.ess_level=token"]),
    "steered": (1, ["algorithm.kl_coefficient=0.1", "algorithm.kl_target=0.01", "algorithm.entropy_coefficient=0.1"]),
}
FOUR = ["algorithm.epochs=2", "algorithm.minibatches=4", "algorithm.importance=token"]
KL = ["algorithm.kl_coefficient=0.1", "algorithm.entropy_coefficient=0.1"]
REJECTED: Cases = {  # of which a correction rejects tokens of old groups
    "plain": (1, []),
    "passes": (0, FOUR),
    "critic": (3, ["algorithm.name=ppo"]),
    "regularised": (2, KL),
    "successes": (1, ["algorithm.sft_coefficient=0.1"]),
    "recorded before": (0, ["algorithm.empty_batch=ignore_filters"]),
}
BY_SETTINGS: Cases = {  # that reject every token of these batches, from the first step on
    "sequences": (3, ["algorithm.rejection=seq_max_k2", "algorithm.rejection_high=1e-12"]),
    "veto": (1, ["algorithm.veto=0.99999", "algorithm.rejection=token_k2", "algorithm.rejection_high=1e-12", *FOUR]),
}


def plain_torch(model: str, groups: Sequence[ReadyGroup], plans: Sequence[Sequence[Sequence[int]]]) -> dict[str, Any]:
    """Train one batch after another without Penstock's learner; ``plans`` are the groups of each optimizer step."""
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


def lead_passes(learner: Learner, settings: TrainerSettings, groups: list[ReadyGroup], folder: Path) -> dict[str, Any]:
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


def lead_batches(
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


def trained(
    folder: Path,
    ranks: Ranks,
    cases: Cases,
    lead: Callable[[str, Learner, TrainerSettings, list[ReadyGroup]], Any],
    *,
    head_start_steps: int = 0,
    **how: Any,
) -> dict[str, Any]:
    """Train each case on every rank; ``lead`` has rank 0 do it, ``how`` is what differs from `HOW`."""
    dims, model = ParallelDims(ranks), folder / "model"
    blobs = Blobs(S3Settings.model_validate(json.loads((folder / "connections.json").read_text())))
    message = decode((folder / "batch.scored").read_bytes(), GroupScored)
    groups = ready(message, group_pack.decode(blobs.get(message.pack)))
    results: dict[str, Any] = {}
    for name, (stage, overrides) in cases.items():
        given = [f"model.path={model}", "trainer.micro_batch_tokens=120", "data.max_prompt_tokens=100"]
        settings = load(TrainerSettings, overrides=[*given, "rollout.max_new_tokens=10", *overrides]).settings
        chosen = replace(HOW, zero_stage=stage, **{"lr": LR, "warmup_steps": WARMUP, "max_grad_norm": 0.5, **how})
        policy, critic, reference = load_policy(model, chosen, dims, temperature=1.0), None, None
        if settings.algorithm.has_critic:
            credit = TokenCredit(whiten_rewards=settings.algorithm.options_of(gae).whiten_rewards)
            how_to_learn = CriticSettings(updates=2, head_start_steps=head_start_steps)
            critic = load_critic(model, chosen, how_to_learn, credit, dims)
        if settings.algorithm.needs_reference:
            reference = load_reference(model, chosen, policy.device, dims, temperature=1.0)
        objective = build_objective(settings.algorithm)
        if name.startswith("rejected: ") and name.removeprefix("rejected: ") in REJECTED:
            objective = replace(objective, corrections={"young": young})
        learner = Learner(policy, dims, blobs, objective, reference, critic)
        if ranks.is_leader:
            results[name] = lead(name, learner, settings, groups)
            learner.dismiss()
        else:
            learner.follow()
        ranks.barrier()
    return results


def trained_in_passes(folder: Path, ranks: Ranks) -> dict[str, Any]:
    def lead(name: str, learner: Learner, settings: TrainerSettings, groups: list[ReadyGroup]) -> dict[str, Any]:
        target = folder / f"out{ranks.num_ranks}" / name
        target.mkdir(parents=True)
        batch[:] = groups
        return lead_passes(learner, settings, groups, target)

    batch: list[ReadyGroup] = []
    results = trained(folder, ranks, PASSES, lead, head_start_steps=1)
    if ranks.is_leader:
        results["hand"] = plain_torch(str(folder / "model"), batch, results["plain"]["updates"])
    return results


def trained_on_nothing(folder: Path, ranks: Ranks) -> dict[str, Any]:
    def lead(name: str, learner: Learner, settings: TrainerSettings, groups: list[ReadyGroup]) -> dict[str, Any]:
        if name in rejected:
            old: list[dict[int, int]] = [{}, {0: 9, 1: 9}, {0: 9}]
            return lead_batches(learner, settings, [(groups, ages) for ages in old], with_critic=False)
        return lead_batches(learner, settings, [(groups, {}), ([cut(group) for group in groups], {}), (groups, {})])

    rejected = {f"rejected: {name}": case for name, case in {**REJECTED, **BY_SETTINGS}.items()}
    cases = {
        name: (stage, ["algorithm.mask_truncated=true", *given]) for name, (stage, given) in {**CUT, **rejected}.items()
    }
    return trained(folder, ranks, cases, lead, schedule="linear", min_lr_ratio=0.0, warmup_steps=0)


def main(arguments: Sequence[str]) -> int:
    kind, folder = arguments
    ranks = Ranks()
    results = {"passes": trained_in_passes, "empty": trained_on_nothing}[kind](Path(folder), ranks)
    if ranks.is_leader:
        print(json.dumps(results))
    ranks.leave(0)
    return 0


def results_by_ranks(folder: Path, settings: S3Settings, kind: str, groups: list[Group]) -> dict[int, dict[str, Any]]:
    """Store a batch of groups and train a model on it by one process and by two ranks; return what each printed."""
    write_model(folder / "model", seed=0)
    (folder / "batch.scored").write_bytes(encode(store_scored(Blobs(settings), kind, "p0", groups, seed=3)))
    connections = {**settings.model_dump(mode="json"), "secret_key": settings.secret_key}
    (folder / "connections.json").write_text(json.dumps(connections))
    return forks.results(folder, __name__, kind, str(folder), ranks=(1, 2))
