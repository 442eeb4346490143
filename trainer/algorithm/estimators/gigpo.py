"""GiGPO: the advantage of the episode in its group, plus that of the turn among turns of the same state."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.trainer.algorithm.estimators.interface import Outcomes, StdNormalisation, advantage_estimator
from penstock.trainer.algorithm.estimators.return_to_go import compared
from penstock.trainer.algorithm.lazy_torch import Tensor, torch


class GigpoOptions(StdNormalisation):
    step_discount: float = Field(
        default=0.95,
        ge=0.0,
        le=1.0,
        description="Factor on a reward for each turn between it and the turn it counts for.",
    )
    episode_weight: float = Field(default=1.0, ge=0.0, description="Weight of the episode's advantage in its group.")
    step_weight: float = Field(
        default=1.0, ge=0.0, description="Weight of a turn's advantage among the group's turns of the same state."
    )
    episode_baseline: Literal["group", "source", "batch"] = Field(
        default="group",
        description="Compare an episode with those of its group, of the batch's rows of one data_source, or of the batch.",
    )


@advantage_estimator(
    options=GigpoOptions,
    source="arXiv 2505.10978",
    presets={
        "gigpo": {"advantage": "gigpo", "normalise_by_std": True, "loss": "ppo_clip", "aggregation": "token-mean"}
    },
    group_relative=True,
    by_turn=True,
)
def gigpo(
    outcomes: Outcomes,
    *,
    step_discount: float = 0.95,
    episode_weight: float = 1.0,
    step_weight: float = 1.0,
    episode_baseline: str = "group",
    normalise_by_std: bool = True,
) -> Tensor:
    """Add a turn's advantage among the turns of one state to its episode's advantage in the group.

    ``A_t = episode_weight * norm(R) + step_weight * norm(G_t)``: the first over the group's episodes, as `grpo`; the second,
    ``G_t = sum over k >= t of discount^(k - t) r_k``, over the group's turns with the same ``state``. A state that is not
    known, or that one turn alone has, adds nothing. ROLL: ``episode_reward_weight``, ``step_reward_weight``,
    ``step_reward_gamma``, and ``grouping`` traj_group_id (state), tags (inductive) or batch, which is ``episode_baseline``.

    Returns:
        [K] one advantage per turn.
    """
    turns = outcomes.each_turn
    group = outcomes.groups[turns.trajectory]
    episodes = compared(outcomes.rewards, outcomes.sets(episode_baseline)[:, None], normalise_by_std=normalise_by_std)
    alone = -1 - torch.arange(len(group))  # a separate key for every turn of no known state
    state = torch.where(turns.state >= 0, turns.state, alone)
    steps = compared(
        turns.returns(step_discount), torch.stack([group, state], dim=1), normalise_by_std=normalise_by_std
    )
    return episode_weight * episodes[turns.trajectory] + step_weight * steps
