"""Builders of episodes of several rows, small enough to read in a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.protocol.episode import Episode, EpisodeRow, Turn
from penstock.protocol.groups import RewardRequest
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.versions import PolicyVersion, VersionRun


def make_row(
    pieces: Sequence[tuple[int, Sequence[int]]],
    *,
    first_turn: int = 0,
    versions: Sequence[int] = (),
    rewards: Sequence[float] = (),
    states: Sequence[str] = (),
    text: str = "",
    logprob: float = -0.5,
    **more: Any,
) -> EpisodeRow:
    tokens, mask, runs, turns = [], [], [], []
    for sampled, ids in pieces:
        start = len(tokens)
        tokens += ids
        mask += [bool(sampled)] * len(ids)
        if sampled:
            place = len(turns)
            version = PolicyVersion(versions[place] if versions else 0)
            runs.append(VersionRun(version, start, len(tokens)))
            turns.append(
                Turn(
                    first_turn + place,
                    start,
                    len(tokens),
                    rewards[place] if rewards else 0.0,
                    states[place] if states else "",
                )
            )
    where = np.array(mask, dtype=np.bool_)
    trajectory = Trajectory(
        token_ids=np.array(tokens, dtype=np.int32),
        loss_mask=where,
        behaviour_logprobs=np.where(where, np.float32(logprob), np.float32(0.0)).astype(np.float32),
        version_runs=tuple(runs),
        finish_reason="stop",
        completion_text=text,
    )
    return EpisodeRow(trajectory, tuple(turns), **more)


def forked(number: int = 0, *, group_id: str = "e0.p0.a0", reward: float | None = 1.0, **more: Any) -> Episode:
    """An episode of three rows: two turns; a fork behind the first; a sub-agent's."""
    rows = (
        make_row([(0, [5, 6, 7]), (1, [11, 12]), (0, [8]), (1, [13, 2])], text="thirteen", versions=(1, 2)),
        make_row([(0, [5, 6, 7, 11, 12, 9]), (1, [14, 2])], first_turn=2, versions=(2,), parent=0, prefix_len=5),
        make_row([(0, [20, 21]), (1, [22])], first_turn=3, versions=(3,), root="sub:search"),
    )
    given: dict[str, Any] = {"environment_version": "1.2", "seed": 7, "status": "done", "rows": rows} | more
    return Episode(
        episode_id=f"{group_id}#{number}", group_id=group_id, index=number, environment="lookup", reward=reward, **given
    )


def one_turn(number: int, *, group_id: str = "e0.p0.a0", reward: float | None = 0.0, **more: Any) -> Episode:
    rows = (make_row([(0, [5, 6, 7]), (1, [15 + number, 2])], text="other", versions=(2,)),)
    given: dict[str, Any] = {"environment_version": "1.2", "seed": 7, "status": "done", "rows": rows} | more
    return Episode(
        episode_id=f"{group_id}#{number}", group_id=group_id, index=number, environment="lookup", reward=reward, **given
    )


def group_of(*episodes: Episode, reward_name: str = "environment") -> Group:
    return Group.of_episodes(
        episodes,
        split="train",
        attempt=0,
        issued_version=1,
        prompt_text="look up 37",
        reward=RewardRequest(name=reward_name, data_source="lookup", ground_truth='"82"'),
    )
