"""What a file that holds an advantage estimator needs: `advantage_estimator`, `Outcomes`, `Options`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.trainer.algorithm.lazy_torch import Tensor, torch
from penstock.trainer.algorithm.parts import Options, OptionsT_co, Part, StdNormalisation, decorator

__all__ = ["AdvantageFunction", "Estimator", "Options", "Outcomes", "StdNormalisation", "Turns", "advantage_estimator"]
AdvantageFunction = Callable[..., Tensor]
STD_EPSILON = 1e-6  # verl's; TRL uses 1e-4
_FLAT = 1e-9  # rewards closer together than this, relative to their size, are one and the same reward


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """The K turns of the batch, those of one trajectory together and in order."""

    trajectory: Tensor  # [K] int64, 0..B-1
    number: Tensor  # [K] int64, place among the turns of the trajectory
    rewards: Tensor  # [K] float64; those of a trajectory sum to its reward, what no turn received is in the last
    state: Tensor  # [K] int64, equal for turns of one group that chose in the same situation; -1: not known

    def returns(self, discount: float) -> Tensor:
        """Return the discounted sum of each turn's reward and all later ones of its trajectory, [K]."""
        discounted = self.rewards.clone()
        for turn in range(len(discounted) - 2, -1, -1):
            if self.trajectory[turn] == self.trajectory[turn + 1]:
                discounted[turn] += discount * discounted[turn + 1]
        return discounted


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """One reward per trajectory, for a batch of B of them."""

    rewards: Tensor  # [B] float64, finite
    groups: Tensor  # [B] int64, equal for the completions of one prompt
    lengths: Tensor  # [B] sampled tokens of each
    baselines: Tensor | None = None  # [B] reward of the prompt's greedy completion, for ReMax
    turns: Turns | None = None  # for an estimator by turn; None: every trajectory is one turn
    sources: Tensor | None = None  # [B] int64, equal for rows of one data_source; None: there is one
    influences: Tensor | None = None  # [B] float64, w² ‖∇ log π‖² of each, for an estimator by gradient

    @property
    def group_index(self) -> tuple[Tensor, int]:
        """Groups renumbered 0..G-1 [B], and G."""
        names, index = torch.unique(self.groups, return_inverse=True)
        return index, len(names)

    def sets(self, name: str) -> Tensor:
        """Return a number for each trajectory, [B], equal for those of one group, one source, or the whole batch."""
        if name == "group":
            return self.groups
        alike = torch.zeros_like(self.groups)
        return alike if name == "batch" or self.sources is None else self.sources

    @property
    def each_turn(self) -> Turns:
        if self.turns is not None:
            return self.turns
        places = torch.arange(len(self.rewards))
        return Turns(places, torch.zeros_like(places), self.rewards, torch.full_like(places, -1))


@dataclass(frozen=True, eq=False, kw_only=True)
class Estimator(Part[OptionsT_co]):
    """An advantage estimator: ``fn(outcomes, **options)`` returns one advantage per trajectory, [B], or turn, [K]."""

    needs_baseline: bool = False  # every group carries a greedy completion, not trained on: ``outcomes.baselines``
    group_relative: bool = False  # compares the completions of a group: a group of one has an advantage of 0
    has_critic: bool = False  # `trainer/learner/critic.py` credits tokens; fn returns the rewards that it starts from
    by_turn: bool = False  # fn reads ``outcomes.turns`` and returns one advantage per turn
    by_gradient: bool = False  # fn reads ``outcomes.influences``: one more forward and backward pass of each trajectory
    beyond_groups: Callable[[OptionsT_co], bool] = lambda _: False  # options with which it compares more than a group


advantage_estimator = decorator(Estimator)
"""Make a function an advantage estimator of the function's name; the arguments are the fields of `Estimator`."""


def group_sum(outcomes: Outcomes, values: Tensor) -> Tensor:
    """Return the sum of values [B] over each member's group, [B]."""
    index, count = outcomes.group_index
    return values.new_zeros(count).index_add(0, index, values)[index]


def group_sizes(outcomes: Outcomes) -> Tensor:
    """Return the number of trajectories of each member's group, [B]."""
    return group_sum(outcomes, torch.ones_like(outcomes.rewards))


def group_mean(outcomes: Outcomes, values: Tensor) -> Tensor:
    return group_sum(outcomes, values) / group_sizes(outcomes)


def weighted_mean(outcomes: Outcomes, weights: Tensor) -> Tensor:
    """Return the mean reward of each member's group by weights [B], [B]; its own reward where the group's weights are 0."""
    total = group_sum(outcomes, weights)
    return (group_sum(outcomes, weights * outcomes.rewards) / total).where(total > 0, outcomes.rewards)


def rewards_differ(outcomes: Outcomes) -> Tensor:
    """Return which trajectories are in a group whose rewards differ, [B] bool."""
    index, count = outcomes.group_index
    rewards = outcomes.rewards
    top = rewards.new_full((count,), float("-inf")).scatter_reduce(0, index, rewards, "amax")
    low = rewards.new_full((count,), float("inf")).scatter_reduce(0, index, rewards, "amin")
    size = rewards.new_zeros(count).scatter_reduce(0, index, rewards.abs(), "amax")
    return ((top - low) > _FLAT * size)[index]


def group_std(outcomes: Outcomes) -> Tensor:
    """Return the unbiased standard deviation of each member's group, [B]; 0 for a group of one."""
    centred = outcomes.rewards - group_mean(outcomes, outcomes.rewards)
    sizes = group_sizes(outcomes)
    return (group_mean(outcomes, centred.square()) * sizes / (sizes - 1.0).clamp(min=1.0)).sqrt()
