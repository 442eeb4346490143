"""Completion → trajectory, or episode → group; pure. Token ids are never re-tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.protocol.episode import Episode
from penstock.protocol.errors import PackError
from penstock.protocol.facts import AbandonedCompletion, RowImages, Task
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.versions import VersionRun
from penstock.rollout_service.engines.completion import Completion


def build_trajectory(prompt_ids: Sequence[int], completion: Completion, images: RowImages | None = None) -> Trajectory:
    """Join a prompt and its completion; version runs move to positions in the whole trajectory.

    The policy sampled every completion token, the matched stop token or stop string included, so the loss mask is
    True on all of them and False on the prompt, which has the ``images``. Raises PackError when lengths do not fit.
    """
    start = len(prompt_ids)
    length = start + len(completion.token_ids)
    token_ids = np.empty(length, dtype=np.int32)
    token_ids[:start] = prompt_ids
    token_ids[start:] = completion.token_ids
    loss_mask = np.zeros(length, dtype=np.bool_)
    loss_mask[start:] = True
    logprobs = np.zeros(length, dtype=np.float32)
    logprobs[start:] = completion.logprobs
    return Trajectory(
        token_ids=token_ids,
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        version_runs=tuple(
            VersionRun(run.version, run.start + start, run.end + start) for run in completion.version_runs
        ),
        finish_reason=completion.finish_reason,
        completion_text=completion.text,
        experts=completion.experts,
        images=images,
    )


def rows_of(one: Trajectory | Episode) -> list[Trajectory]:
    """Return the rows of token ids of what an environment returned for one member of a group."""
    return [row.trajectory for row in one.rows] if isinstance(one, Episode) else [one]


def as_baseline(one: Trajectory | Episode, index: int) -> Trajectory | Episode:
    """Return the greedy member of a group, marked as its baseline; an episode gets the place ``index``."""
    if isinstance(one, Trajectory):
        return replace(one, is_baseline=True)
    rows = [replace(row, trajectory=replace(row.trajectory, is_baseline=True)) for row in one.rows]
    return replace(one, rows=tuple(rows), index=index, episode_id=f"{one.episode_id}.baseline")


def build_group(
    task: Task, members: Sequence[Trajectory | Episode], abandoned: tuple[AbandonedCompletion, ...] = ()
) -> Group:
    """Join the trajectories or episodes of one task with its reward, prompt text and versions.

    ``abandoned`` are completions that were started besides and not kept.

    Raises PackError for episodes that are not those of one group, or did not end by the policy's doing.
    """
    episodes = tuple([member for member in members if isinstance(member, Episode)])
    trajectories = [member for member in members if isinstance(member, Trajectory)]
    if episodes and trajectories:
        raise PackError(
            f"group {task.group_id} has {len(episodes)} episodes and {len(trajectories)} other trajectories"
        )
    if episodes:
        if episodes[0].group_id != task.group_id:
            raise PackError(f"task {task.group_id} came back with an episode of group {episodes[0].group_id}")
        return Group.of_episodes(
            episodes,
            split=task.split,
            attempt=task.attempt,
            issued_version=task.issued_version,
            prompt_text=task.prompt_text,
            reward=task.reward,
        )
    return Group(
        group_id=task.group_id,
        split=task.split,
        attempt=task.attempt,
        issued_version=task.issued_version,
        prompt_text=task.prompt_text,
        num_prompt_tokens=len(task.prompt_ids),
        reward=task.reward,
        trajectories=tuple(trajectories),
        abandoned=abandoned,
    )
