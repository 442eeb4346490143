"""Credit by turn: the rewards from a turn on, compared with one mean of the same."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.trainer.algorithm.estimators.interface import STD_EPSILON, Options, Outcomes, advantage_estimator
from penstock.trainer.algorithm.lazy_torch import Tensor, torch

_FLAT = 1e-9  # a spread below this, relative to the values, is rounding


class TurnDiscount(Options):
    """How later turns count for earlier ones."""

    turn_discount: float = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Factor on a reward for each turn between it and the turn that is credited.",
    )


class ReturnToGoOptions(TurnDiscount):
    turn_baseline: Literal["turn", "state", "group", "source", "batch"] = Field(
        default="turn",
        description="Compare a turn with the group's turns of the same number, or of the same state where it is known; or with all turns of "
        "the group, of the batch's rows of one data_source, or of the batch.",
    )
    turn_scale: bool = Field(
        default=False, description="Divide by the standard deviation of what a turn is compared with."
    )


@advantage_estimator(
    options=ReturnToGoOptions,
    source="Williams 1992; verl issue 7244; ROLL step_reinforce",
    presets={
        "return_to_go": {"advantage": "return_to_go", "loss": "ppo_clip", "aggregation": "token-mean"},
        "step_reinforce": {
            "advantage": "return_to_go", "turn_baseline": "group", "turn_discount": 0.95, "loss": "ppo_clip",
            "aggregation": "token-mean",
        },
    },
    group_relative=True,
    by_turn=True,
    beyond_groups=lambda options: options.turn_baseline in ("source", "batch"),
)  # fmt: skip
def return_to_go(
    outcomes: Outcomes, *, turn_discount: float = 1.0, turn_baseline: str = "turn", turn_scale: bool = False
) -> Tensor:
    """Subtract from the discounted rewards of a turn and all later ones their mean over the group's turns of that number.

    ``G_t = sum over k >= t of discount^(k - t) r_k``, ``A_t = G_t - mean(G_t)`` over the episodes of the group that have a
    turn t, or over the group's turns of the same ``state``. One baseline is subtracted from one return. Normalising the
    rewards of each turn number first and summing then (verl issue 7244) is biased where the policy chooses when to stop:
    of "stop for 1" and "0.5 now, 0.5 next", which are equal, it rewards stopping with .25 and going on with -.25.

    With ``turn_baseline`` group, source or batch the mean is over all turns of that set, whatever their numbers: ROLL's
    ``step_reinforce`` with ``grouping`` traj_group_id (state), tags (inductive) or batch.

    Returns:
        [K] one advantage per turn; 0 where nothing compares. An episode of one turn has the advantage of Dr. GRPO.
    """
    turns = outcomes.each_turn
    returns = turns.returns(turn_discount)
    group = outcomes.groups[turns.trajectory]
    if turn_baseline in ("group", "source", "batch"):
        every = outcomes.sets(turn_baseline)[turns.trajectory]
        return compared(returns, every[:, None], normalise_by_std=turn_scale)
    by_number = torch.stack([group, turns.number, torch.zeros_like(group)], dim=1)
    if turn_baseline == "state":
        by_state = torch.stack([group, turns.state, torch.ones_like(group)], dim=1)
        by_number = torch.where((turns.state >= 0)[:, None], by_state, by_number)
    return compared(returns, by_number, normalise_by_std=turn_scale)


def compared(values: Tensor, keys: Tensor, *, normalise_by_std: bool) -> Tensor:
    """Subtract the mean of the values [K] with equal keys [K, n], and divide by their unbiased deviation where asked.

    Values without another to compare with, or that are all equal, become 0.
    """
    _, index = torch.unique(keys, dim=0, return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    sizes = values.new_zeros(count).index_add(0, index, torch.ones_like(values))
    centred = values - (values.new_zeros(count).index_add(0, index, values) / sizes)[index]
    largest = values.new_zeros(count).scatter_reduce(0, index, values.abs(), "amax")
    spread = values.new_zeros(count).scatter_reduce(0, index, centred.abs(), "amax")
    centred = torch.where((spread > _FLAT * largest)[index], centred, torch.zeros_like(centred))
    if not normalise_by_std:
        return centred
    variance = values.new_zeros(count).index_add(0, index, centred.square()) / (sizes - 1.0).clamp(min=1.0)
    return centred / (variance.sqrt() + STD_EPSILON)[index]
