"""Completion → trajectory → group; pure. Token ids are never re-tokenised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.protocol.facts import Task
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.versions import VersionRun
from penstock.rollout_service.engines.completion import Completion


def build_trajectory(prompt_ids: Sequence[int], completion: Completion) -> Trajectory:
    """Join a prompt and its completion; version runs move to positions in the whole trajectory.

    The policy sampled every completion token, the matched stop token or stop string included, so the loss mask is
    True on all of them and False on the prompt. Raises PackError when lengths do not fit.
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
    )


def build_group(task: Task, trajectories: Sequence[Trajectory]) -> Group:
    """Join the trajectories of one task with its reward, prompt text and versions."""
    return Group(
        group_id=task.group_id,
        split=task.split,
        attempt=task.attempt,
        issued_version=task.issued_version,
        prompt_text=task.prompt_text,
        num_prompt_tokens=len(task.prompt_ids),
        reward=task.reward,
        trajectories=tuple(trajectories),
    )
