"""Builders of groups, packs and the facts that announce them, small enough to read in a failure."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from penstock.protocol.facts import GroupGenerated, GroupScored, TaskIssued
from penstock.protocol.groups import BlobRef, FinishReason, RewardRequest, Sampling, ScoredGroup, Split, Task
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.versions import PolicyVersion, VersionRun


def make_trajectory(
    *,
    prompt_ids: Sequence[int] = (5, 6, 7),
    completion_ids: Sequence[int] = (11, 12, 13, 2),
    logprob: float = -0.5,
    version: int = 0,
    finish_reason: FinishReason = "stop",
    text: str = "abc",
) -> Trajectory:
    start, length = len(prompt_ids), len(prompt_ids) + len(completion_ids)
    mask = np.zeros(length, dtype=np.bool_)
    mask[start:] = True
    return Trajectory(
        token_ids=np.array([*prompt_ids, *completion_ids], dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, np.float32(logprob), np.float32(0.0)).astype(np.float32),
        version_runs=(VersionRun(PolicyVersion(version), start, length),),
        finish_reason=finish_reason,
        completion_text=text,
    )


def make_group(
    group_id: str = "e0.p0.a0",
    *,
    size: int = 8,
    split: Split = "train",
    attempt: int = 0,
    version: int = 0,
    issued_version: int | None = None,
    prompt_ids: Sequence[int] = (5, 6, 7),
    prompt_text: str = "sort: 3 1 2",
    texts: Sequence[str] | None = None,
    ground_truth: object = "1 2 3",
    reward_name: str = "exact_match",
    data_source: str = "sort",
    extra_info: dict[str, object] | None = None,
    seed: int = 0,
) -> Group:
    """A group whose completions have different lengths and log-probabilities, the same for one ``seed``."""
    random = np.random.default_rng(seed)
    trajectories = tuple(
        make_trajectory(
            prompt_ids=prompt_ids,
            completion_ids=random.integers(3, 100, size=int(random.integers(2, 12))).tolist(),
            logprob=-float(random.uniform(0.05, 2.0)),
            version=version,
            text=texts[i] if texts is not None else f"completion {i} of {group_id}",
        )
        for i in range(size)
    )
    return Group(
        group_id=group_id,
        split=split,
        attempt=attempt,
        issued_version=version if issued_version is None else issued_version,
        prompt_text=prompt_text,
        num_prompt_tokens=len(prompt_ids),
        reward=RewardRequest(
            name=reward_name,
            data_source=data_source,
            ground_truth=json.dumps(ground_truth),
            extra_info=json.dumps(extra_info or {}),
        ),
        trajectories=trajectories,
    )


def make_groups(num: int, *, size: int = 8, version: int = 0, split: Split = "train", epoch: int = 0) -> list[Group]:
    """Several groups of different prompts, as one pack holds them."""
    return [
        make_group(f"e{epoch}.p{i}.a0", size=size, version=version, split=split, seed=epoch * 10_000 + i)
        for i in range(num)
    ]


def make_task(
    group_id: str = "e0.p0.a0",
    *,
    group_size: int = 8,
    split: Split = "train",
    prompt_ids: Sequence[int] = (5, 6, 7),
    prompt_text: str = "sort: 3 1 2",
    max_new_tokens: int = 16,
    temperature: float = 1.0,
    stop_token_ids: Sequence[int] = (2,),
    ground_truth: object = "1 2 3",
    reward_name: str = "exact_match",
    issued_version: int = 0,
    pinned_version: int | None = None,
) -> Task:
    return Task(
        group_id=group_id,
        prompt_ids=tuple(prompt_ids),
        prompt_text=prompt_text,
        group_size=group_size,
        sampling=Sampling(max_new_tokens=max_new_tokens, temperature=temperature, stop_token_ids=tuple(stop_token_ids)),
        reward=RewardRequest(name=reward_name, data_source="sort", ground_truth=json.dumps(ground_truth)),
        split=split,
        issued_version=issued_version,
        pinned_version=pinned_version,
    )


def make_task_issued(run_id: str, pack_id: str = "p0", tasks: Sequence[Task] = ()) -> TaskIssued:
    """A message with the given tasks (one, when none is given)."""
    return TaskIssued(run_id=run_id, pack_id=pack_id, tasks=tuple(tasks) or (make_task(),))


def make_generated(
    run_id: str, groups: Sequence[Group], pack: BlobRef | None = None, *, pack_id: str = "p0", worker_id: str = "w0"
) -> GroupGenerated:
    """The announcement of a pack; without ``pack`` the reference names an object that is not stored."""
    return GroupGenerated(
        run_id=run_id,
        pack_id=pack_id,
        worker_id=worker_id,
        pack=pack or BlobRef(key=f"runs/{run_id}/groups/absent.parquet", size_bytes=1, sha256="0" * 64),
        groups=tuple(group.summary(i) for i, group in enumerate(groups)),
    )


def make_scored(
    generated: GroupGenerated, rewards: Sequence[Sequence[float]] | None = None, *, scorer: str = "test"
) -> GroupScored:
    """The scored form of an announcement; without ``rewards`` every other trajectory gets 1.0."""
    scored = []
    for i, group in enumerate(generated.groups):
        count = len(group.completion_tokens)
        values = tuple(rewards[i]) if rewards is not None else tuple(float(n % 2) for n in range(count))
        scored.append(ScoredGroup(generated=group, rewards=values, parts={}, scorer=scorer))
    return GroupScored(
        run_id=generated.run_id,
        pack_id=generated.pack_id,
        worker_id=generated.worker_id,
        pack=generated.pack,
        groups=tuple(scored),
    )


def pack_bytes(groups: Sequence[Group]) -> bytes:
    return group_pack.encode(groups)
