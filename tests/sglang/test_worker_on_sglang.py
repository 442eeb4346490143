"""A worker on a real SGLang: weights change and servers are killed in mid-generation; no token is wrong or lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.deploy.processes.child import Child
from penstock.protocol.groups import Task
from penstock.protocol.trajectory import Group
from penstock.rollout_service.engines.engine_process import group_members
from tests.contracts.real_sglang import START_S
from tests.contracts.tiny_model import Dense, check_groups, read_tensors, write_tensors
from tests.groups import make_task
from tests.rollout_service.trainer_side import TrainerSide, num_running
from tests.servers import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

NEW_TOKENS = 100  # of the model's 128


def long_tasks(names: Sequence[str], size: int = 24) -> list[Task]:
    """Tasks that keep the server busy for seconds."""
    return [
        make_task(
            name, prompt_ids=[5 + number, 17, 9, 30 - number], group_size=size, max_new_tokens=NEW_TOKENS,
            stop_token_ids=(),
        )
        for number, name in enumerate(names)
    ]  # fmt: skip


def wait_until_it_generates(worker: Child) -> None:
    """Wait until the server reports running requests."""
    wait_for(lambda: re.search(r'"url": "[^"]+".*"engine is ready"', worker.log.read_text()), "the server", START_S)
    wait_for(lambda: num_running(worker) > 0, "the server to generate", START_S)


def check_every_token(groups: Sequence[Group], folder: Path) -> set[int]:
    return check_groups(groups, lambda version: Dense(folder / f"model-{version}"))


def server_of(worker: Child) -> int:
    """The process id of the server's first process: the worker's child that leads a group."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == worker.pid and int(fields[2]) == int(path.parent.name):
            return int(path.parent.name)
    raise AssertionError(f"worker {worker.pid} has no server")


def names(groups: Sequence[Group]) -> list[str]:
    return sorted(group.group_id for group in groups)


def test_updates_under_long_generations_lose_and_mislabel_nothing(trainer_side: TrainerSide, sglang_worker: Child):
    """Versions pass in mid-generation: every group arrives whole, every token is of the version it names."""
    wanted = []
    for number in range(6):
        ids = [f"g{number}-{index}" for index in range(6)]
        trainer_side.issue(f"pack-{number}", long_tasks(ids))
        wanted += ids
    wait_until_it_generates(sglang_worker)
    for version in (1, 2):
        trainer_side.publish(version)
        trainer_side.wait_applied("w0", version, START_S)
    groups = trainer_side.collect_groups(6, START_S)
    assert names(groups) == sorted(wanted)
    assert {len(group.trajectories) for group in groups} == {24}
    assert check_every_token(groups, trainer_side.folder) >= {0, 2}
    assert any(len(row.version_runs) > 1 for group in groups for row in group.trajectories)
    assert trainer_side.dead == []
    beat = trainer_side.heartbeat("w0")
    assert beat is not None
    assert beat.figures["packs_given_back"] == 0
    wait_for(
        lambda: (beat := trainer_side.heartbeat("w0")) and beat.figures.get("engine_generated_tokens", 0) > 0,
        "the server's own figures in the heartbeat",
    )


@pytest.mark.parametrize("victim", ["server", "scheduler"])
def test_a_server_killed_in_mid_generation_loses_no_group(trainer_side: TrainerSide, sglang_worker: Child, victim: str):
    """After SIGKILL another server starts from the newest weights, and every group arrives, once."""
    newest = max(fact.version for fact in trainer_side.applied)
    ids = [f"{victim}-g{number}" for number in range(12)]
    for number in range(3):
        trainer_side.issue(f"{victim}-pack-{number}", long_tasks(ids[4 * number : 4 * number + 4], size=48))
    wait_until_it_generates(sglang_worker)
    first = server_of(sglang_worker)
    members = group_members(first)
    assert len(members) >= 3, "tokenizer, scheduler and detokenizer"
    os.kill(first if victim == "server" else scheduler_among(members), signal.SIGKILL)
    groups = trainer_side.collect_groups(3, 2 * START_S)
    assert names(groups) == sorted(ids)
    assert check_every_token(groups, trainer_side.folder) == {newest}
    assert trainer_side.dead == []
    assert server_of(sglang_worker) != first
    wait_for(lambda: not group_members(first), "the old server's processes to be gone")


def test_a_version_that_changes_little_is_patched(trainer_side: TrainerSide, sglang_worker: Child):
    """From the trainer's patch over the worker's mirror into the server: its tokens are of the published weights."""
    newest = max(fact.version for fact in trainer_side.applied)
    for version in (newest + 1, newest + 2, newest + 3):
        source = trainer_side.folder / f"model-{version - 1}"
        write_tensors(source, trainer_side.folder / f"model-{version}", moved(read_tensors(source), seed=version))
        trainer_side.publish(version)
        trainer_side.wait_applied("w0", version, START_S)
    trainer_side.issue("patched-pack", long_tasks(["patched"]))
    [group] = trainer_side.collect_groups(1, START_S)
    assert check_every_token([group], trainer_side.folder) == {newest + 3}
    wait_for(
        lambda: (beat := trainer_side.heartbeat("w0")) and beat.figures.get("engine_loads_patch", 0) >= 3,
        "three patches in the heartbeat",
    )


def moved(tensors: dict[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    """A copy in which a thousandth of the values are others, at least one of each tensor."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        flat = tensor.view(-1)
        chosen = torch.randint(len(flat), (max(1, len(flat) // 1000),), generator=generator)
        flat[chosen] += 0.1
    return tensors


def scheduler_among(members: Sequence[int]) -> int:
    for pid in members:
        if "scheduler" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise AssertionError(f"no scheduler among {members}")
