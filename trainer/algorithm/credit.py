"""Advantage and weight of each trajectory of a batch, from its rewards: shaping, estimator, filters, weights; pure.

The order is that of `trainer/algorithm/reward_shaping.py`.

`AlgorithmState` is kept between steps and is part of every checkpoint, so that a resumed run computes the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.protocol.episode import Turn
from penstock.trainer.algorithm import reward_shaping
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.estimators.interface import Outcomes, Turns
from penstock.trainer.algorithm.filters.interface import Candidate, Kept, keep
from penstock.trainer.algorithm.kl import KlController
from penstock.trainer.algorithm.reward_shaping import RunningMoments
from penstock.trainer.errors import CheckpointError

_STATE_TAG = "algorithm_state.v1"
_ROUNDING = 1e-9  # of the largest advantage of a batch, as for rewards; sums in another order differ by less


@dataclass(slots=True)
class AlgorithmState:
    kl: KlController
    scaling: RunningMoments = field(default_factory=RunningMoments)  # of rewards before reward_scaling
    norm: RunningMoments = field(default_factory=RunningMoments)  # of rewards before reward_norm = "running"

    @classmethod
    def fresh(cls, settings: AlgorithmSettings) -> AlgorithmState:
        coefficient = settings.reward_kl_coefficient or settings.kl_coefficient
        return cls(KlController(coefficient, settings.kl_target, settings.kl_horizon))

    @classmethod
    def resumed(cls, settings: AlgorithmSettings, document: Mapping[str, Any]) -> AlgorithmState:
        """Return the state that `to_document` wrote; the coefficient is the run file's, or an adapted one's last value.

        Raises CheckpointError for a document of another kind. A checkpoint written before this state existed
        has an empty one: the run continues with a fresh state.
        """
        state = cls.fresh(settings)
        if not document:
            return state
        if document.get("schema_tag") != _STATE_TAG:
            raise CheckpointError(f"algorithm state: expected {_STATE_TAG}, got {document.get('schema_tag')!r}")
        try:
            state.scaling = RunningMoments(**document["scaling"])
            state.norm = RunningMoments(**document["norm"])
            if settings.kl_target is not None:
                state.kl.coefficient = float(document["kl_coefficient"])
        except (KeyError, TypeError, ValueError) as err:
            raise CheckpointError(
                f"algorithm state: {type(err).__name__}: {err}; the checkpoint's state.json was changed, restore it"
            ) from None
        return state

    def to_document(self) -> dict[str, Any]:
        return {
            "schema_tag": _STATE_TAG,
            "scaling": asdict(self.scaling),
            "norm": asdict(self.norm),
            "kl_coefficient": self.kl.coefficient,
        }


@dataclass(frozen=True, slots=True)
class Scored:
    rewards: Sequence[float]
    lengths: Sequence[int]  # sampled tokens of each trajectory
    truncated: Sequence[bool]
    source: str = ""  # kind of task, the row's data_source
    kl: Sequence[float] = ()  # of each trajectory to the reference, summed over its tokens; none: 0
    influences: Sequence[float] = ()  # of each trajectory, w² ‖∇ log π‖², where the estimator is by gradient
    baseline: tuple[float, int] | None = None  # reward and length of the prompt's greedy completion
    turns: Sequence[Sequence[Turn]] = ()  # of each trajectory, by number; none: every trajectory is one turn

    @property
    def shaped_together(self) -> tuple[list[float], list[int]]:
        more = [] if self.baseline is None else [self.baseline]
        return [*self.rewards, *(r for r, _ in more)], [*self.lengths, *(n for _, n in more)]


@dataclass(frozen=True, slots=True)
class Credit:
    advantages: list[float]
    weights: list[float]  # factor on its tokens' weights; 0: left out, and out of the denominators
    rewards: list[float]  # as shaped
    skipped: Counter[str]  # left out by a filter, by its reason
    turns: list[list[float]] = field(default_factory=list)  # of each trajectory, the advantages of its turns by number
    turns_are_rewards: bool = False  # for a critic: what each turn was rewarded with

    def of_turns(self, place: int, numbers: Sequence[int]) -> tuple[float, ...]:
        """Return what the plan gives to the turns of one row, by their numbers in the episode; (): all the same.

        A critic credits each row alone. It gets the rewards of the turns that came between two of the row, and of those
        after its last one, with the earlier of them: the return of a turn is then that of the episode.
        """
        if not self.turns:
            return ()
        turn_values = self.turns[place]
        if not self.turns_are_rewards:
            return tuple([turn_values[number] for number in numbers])
        return tuple([sum(turn_values[a:b]) for a, b in itertools.pairwise([*numbers, len(turn_values)])])


CreditRule = Callable[[Sequence[Scored]], Credit]


def credit_rule(settings: AlgorithmSettings, *, longest: int, state: AlgorithmState | None = None) -> CreditRule:
    running = AlgorithmState.fresh(settings) if state is None else state
    parts = settings.parts
    estimator = parts.estimator.value
    estimate = partial(estimator.fn, **settings.options_of(estimator).model_dump())
    filters = [
        (part.value.reason, partial(part.value.fn, **settings.options_of(part.value).model_dump()))
        for part in parts.filters
    ]
    buffer = max(1, round(settings.overlong_buffer * longest)) if settings.overlong_buffer else 0

    def rule(groups: Sequence[Scored]) -> Credit:
        members = [g.shaped_together for g in groups]
        rewards = torch.tensor([r for some, _ in members for r in some], dtype=torch.float64)
        lengths = torch.tensor([n for _, some in members for n in some], dtype=torch.int64)
        index = torch.tensor([number for number, (some, _) in enumerate(members) for _ in some], dtype=torch.int64)
        if buffer:
            rewards = rewards + reward_shaping.overlong_penalty(
                _longest_turns(groups, members), longest=longest, buffer=buffer, factor=settings.overlong_factor
            )
        if settings.efficiency_spread or settings.efficiency_failure_spread:
            rewards = rewards + _efficiency(settings, groups, rewards, index)
        rewards = reward_shaping.clip_symmetric(rewards, settings.reward_clip)
        shaped = rewards
        rewards = _scaled(settings, running, rewards)
        rewards = _normalised(settings, running, rewards, groups, index)
        is_baseline = torch.tensor(
            [n == len(g.rewards) for g, (some, _) in zip(groups, members, strict=True) for n in range(len(some))],
            dtype=torch.bool,
        )
        baselines = rewards[is_baseline][index[~is_baseline]] if estimator.needs_baseline else None
        rewards, shaped, lengths, index = (values[~is_baseline] for values in (rewards, shaped, lengths, index))
        if settings.reward_kl_coefficient and not estimator.has_critic:  # with a critic, it is in each token's reward
            gaps = [gap for g in groups for gap in (g.kl or [0.0] * len(g.rewards))]
            rewards = rewards - running.kl.coefficient * torch.tensor(gaps, dtype=torch.float64)
        turns = turns_of(groups, rewards) if estimator.by_turn or any(g.turns for g in groups) else None
        sources = reward_shaping.numbered([g.source for g in groups for _ in g.rewards])
        influences = torch.tensor([one for g in groups for one in g.influences], dtype=torch.float64)
        advantages = estimate(Outcomes(rewards, index, lengths, baselines, turns, sources, influences))
        by_turn: list[list[float]] = []
        if estimator.by_turn:
            assert turns is not None
            advantages = _finished(settings, advantages, turn_lengths(groups))
            by_turn = _split(advantages, turns)
            advantages = torch.tensor(
                [max(turn_advantages, key=abs) for turn_advantages in by_turn], dtype=torch.float64
            )
        elif estimator.has_critic:
            by_turn = [] if turns is None else _split(turns.rewards, turns)
        else:
            advantages = _finished(settings, advantages, lengths)
        kept = keep(_candidates(groups, advantages, shaped, lengths), filters)
        if not kept.places and settings.empty_batch == "ignore_filters":
            kept = Kept(tuple(range(len(advantages))))
        weights = torch.zeros_like(advantages)
        weights[list(kept.places)] = 1.0
        weights = weights * _sample_weights(settings, shaped, index, lengths)
        return Credit(
            advantages.tolist(), weights.tolist(), shaped.tolist(), kept.skipped, by_turn, estimator.has_critic
        )

    return rule


def turns_of(groups: Sequence[Scored], rewards: Tensor) -> Turns:
    """Return the turns of a batch with its shaped ``rewards`` [B]; the last turn has what no turn was given."""
    trajectory: list[int] = []
    number: list[int] = []
    turn_rewards: list[float] = []
    state: list[int] = []
    states: dict[tuple[int, str], int] = {}
    for place, (group, turns) in enumerate(_each_turns(groups)):
        episode_rewards = [turn.reward for turn in turns]
        episode_rewards[-1] += float(rewards[place]) - sum(episode_rewards)
        turn_rewards += episode_rewards
        trajectory += [place] * len(turns)
        number += range(len(turns))
        state += [states.setdefault((group, turn.state), len(states)) if turn.state else -1 for turn in turns]
    return Turns(
        torch.tensor(trajectory, dtype=torch.int64),
        torch.tensor(number, dtype=torch.int64),
        torch.tensor(turn_rewards, dtype=torch.float64),
        torch.tensor(state, dtype=torch.int64),
    )


def turn_lengths(groups: Sequence[Scored]) -> Tensor:
    return torch.tensor([turn.end - turn.start for _, turns in _each_turns(groups) for turn in turns])


def _each_turns(groups: Sequence[Scored]) -> Iterator[tuple[int, Sequence[Turn]]]:
    for number, group in enumerate(groups):
        yield from ((number, turns) for turns in group.turns or [(Turn(0, 0, length),) for length in group.lengths])


def _longest_turns(groups: Sequence[Scored], members: Sequence[tuple[list[float], list[int]]]) -> Tensor:
    """Return the lengths that an overlong penalty judges, [B] with baselines: of an episode its longest turn's."""
    longest = [
        [*(max(turn.end - turn.start for turn in turns) for turns in group.turns), *lengths[len(group.turns) :]]
        for group, (_, lengths) in zip(groups, members, strict=True)
    ]
    return torch.tensor([length for some in longest for length in some], dtype=torch.int64)


def _num_turns(groups: Sequence[Scored]) -> list[int]:
    return [len(turns) for _, turns in _each_turns(groups)]


def _efficiency(settings: AlgorithmSettings, groups: Sequence[Scored], rewards: Tensor, index: Tensor) -> Tensor:
    adjustments = torch.zeros_like(rewards)
    is_trained = torch.tensor([n < len(g.rewards) for g in groups for n in range(len(g.shaped_together[0]))])
    adjustments[is_trained] = reward_shaping.efficiency(
        rewards[is_trained],
        torch.tensor(_num_turns(groups), dtype=torch.int64),
        index[is_trained],
        success=settings.efficiency_success,
        spread=settings.efficiency_spread,
        failure_spread=settings.efficiency_failure_spread,
    )
    return adjustments


def _split(values: Tensor, turns: Turns) -> list[list[float]]:
    sizes = torch.bincount(turns.trajectory).tolist()
    return [part.tolist() for part in values.split(sizes)]


def _candidates(groups: Sequence[Scored], advantages: Tensor, shaped: Tensor, lengths: Tensor) -> list[Candidate]:
    cut = [(truncated, group.source) for group in groups for truncated in group.truncated]
    turns = _num_turns(groups)
    exact = (
        torch.where(advantages.abs() <= _ROUNDING * advantages.abs().max(), 0.0, advantages)
        if len(advantages)
        else advantages
    )
    columns = zip(exact.tolist(), shaped.tolist(), lengths.tolist(), cut, turns, strict=True)
    return [Candidate(a, is_cut, reward, length, source, num) for a, reward, length, (is_cut, source), num in columns]


def _scaled(settings: AlgorithmSettings, state: AlgorithmState, rewards: Tensor) -> Tensor:
    if settings.reward_scaling == "none":
        return rewards
    state.scaling.update(rewards)
    return state.scaling.normalise(rewards, shift=settings.reward_scaling == "mean_std")


def _normalised(
    settings: AlgorithmSettings, state: AlgorithmState, rewards: Tensor, groups: Sequence[Scored], index: Tensor
) -> Tensor:
    shift, scale = settings.reward_shift, settings.reward_scale
    match settings.reward_norm:
        case "none":
            return rewards
        case "running":
            state.norm.update(rewards)
            rewards = state.norm.normalise(rewards, shift=shift, scale=scale)
        case "source":
            sources = [g.source for g in groups for _ in g.shaped_together[0]]
            rewards = reward_shaping.normalise(rewards, reward_shaping.numbered(sources), shift=shift, scale=scale)
        case "batch":
            rewards = reward_shaping.normalise(rewards, shift=shift, scale=scale)
        case "group":
            rewards = reward_shaping.normalise(rewards, index, shift=shift, scale=scale)
    return reward_shaping.asym_clip(rewards) if settings.asym_clip else rewards


def _finished(settings: AlgorithmSettings, advantages: Tensor, lengths: Tensor) -> Tensor:
    if settings.whiten_advantages:
        advantages = reward_shaping.whiten(advantages, weights=lengths)
    return reward_shaping.clip_symmetric(advantages, settings.advantage_clip)


def _sample_weights(settings: AlgorithmSettings, rewards: Tensor, index: Tensor, lengths: Tensor) -> Tensor:
    factors = [torch.ones_like(rewards)]
    if settings.difficulty_weight:
        count = int(index.max()) + 1
        sums = rewards.new_zeros(count).index_add(0, index, rewards)
        sizes = rewards.new_zeros(count).index_add(0, index, torch.ones_like(rewards))
        factors.append(reward_shaping.difficulty_weights(1.0 - (sums / sizes)[index]))
    if settings.length_weight:
        factors.append(reward_shaping.length_weights(lengths))
    return reward_shaping.sample_weights(*factors)
