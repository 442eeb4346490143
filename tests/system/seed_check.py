"""Runs three synchronous runs on one embedded engine and prints the digest of every version.

Arguments: MODEL FOLDER URL; the adapters' first values, dropout, the order of the prompts and all samples follow from ``run.seed``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from penstock.protocol.config.run_file import load
from penstock.protocol.groups import BlobRef, RewardRequest, Sampling, ScoredGroup
from penstock.protocol.trajectory import Group
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.environments.environment import build_group
from penstock.rollout_service.environments.single_turn import SINGLE_TURN
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import Prompt
from penstock.trainer.groups.dispatch import Dispatch
from penstock.trainer.groups.group_totals import Drop, DropReason
from penstock.trainer.learner.learner import build_learner
from penstock.trainer.learner.planning import Planner, learn
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.publishing.version_writer import small_files
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings

SEEDS = {"first": 5, "again": 5, "other": 6}
NUM_STEPS = 2


class Prompts(list[Prompt]):
    fingerprint, num_tokens = "prompts", 40


class Client:
    def __init__(self, url: str) -> None:
        self.engine = SglangClient(url)

    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int, *, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        assert seeds is not None
        return await self.engine.generate(prompts, sampling, n, None, seeds)


def scored(group: Group, number: int) -> ReadyGroup:
    """Give every completion a reward that follows from its tokens."""
    rewards = tuple(float(row.token_ids[row.loss_mask].sum() % 3) for row in group.trajectories)
    pack = BlobRef(key=group.group_id, size_bytes=1, sha256="0" * 64)
    return ReadyGroup(ScoredGroup(generated=group.summary(number), rewards=rewards, scorer="test"), pack, group)


def write_model(folder: Path, tensors: dict[str, Tensor], like: Path) -> None:
    folder.mkdir()
    for name, data in small_files(like, "float32").items():
        (folder / name).write_bytes(data)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


async def run(settings: TrainerSettings, dims: ParallelDims, folder: Path, url: str) -> dict[str, list[Any]]:
    """Make the steps of a run; return the order of its groups, its completions and the digests of its versions."""
    packs: Any = SimpleNamespace(get=None)  # the groups are given
    learner, client = build_learner(settings, dims, packs), Client(url)
    planner = Planner(settings, learner, {})
    prompts = Prompts(Prompt(n, (5, 6, 7 + n), "", RewardRequest(name="test")) for n in range(8))
    order = DataOrder(len(prompts), settings.run.seed, settings.data.shuffle)
    dispatch = Dispatch(prompts, order=order, rollout=settings.rollout, stop_token_ids=())
    found: dict[str, list[Any]] = {"groups": [], "tokens": [], "digests": []}
    for version in map(PolicyVersion, range(NUM_STEPS)):
        tensors = learner.snapshot()
        found["digests"].append(hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors.values())).hexdigest())
        write_model(folder / str(version), tensors, settings.model.path)
        await client.engine.load_weights(folder / str(version), version)
        (pack,) = dispatch.next_packs(version)
        rolled = await SINGLE_TURN.rollout(pack.tasks, client)
        groups = [build_group(task, rows) for task, rows in zip(pack.tasks, rolled, strict=True)]
        batch = sorted((scored(group, 0) for group in groups), key=lambda group: group.group_id)
        found["groups"].append([group.group_id for group in batch])
        found["tokens"].append([row.token_ids.tolist() for group in batch for row in group.group.trajectories])
        learn(planner, learner, batch, version)
        for group in batch:
            dispatch.drop(Drop(group.group_id, DropReason.NO_SIGNAL, 0, is_final=True))
    tensors = learner.snapshot()
    found["digests"].append(hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors.values())).hexdigest())
    await client.engine.close()
    return found


def main(arguments: Sequence[str]) -> int:
    model, folder, url = arguments
    ranks, results = Ranks(), {}
    for name, seed in SEEDS.items():
        overrides = [
            f"model.path={model}", f"run.seed={seed}", "model.lora.rank=4", "model.lora.dropout=0.2",
            "rollout.max_staleness=0", "rollout.groups_per_step=4", "rollout.groups_per_message=4", "rollout.group_size=4",
            "rollout.max_new_tokens=6", "data.max_prompt_tokens=8", "trainer.lr=1e-2",
        ]  # fmt: skip
        settings = load(TrainerSettings, overrides=overrides).settings
        target = Path(folder) / name
        target.mkdir()
        results[name] = asyncio.run(run(settings, ParallelDims(ranks), target, url))
    print(json.dumps(results))
    ranks.leave(0)
    return 0
