"""Which scorer a reward name means: a built-in, one that the run file makes of parts, an endpoint, or the row's own.

Of a reward made of parts every part is scored and kept, and the definition's rule makes one reward of them.
"""

from __future__ import annotations

import asyncio
import copy
import difflib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from penstock.protocol.config.reward_settings import RewardDefinition
from penstock.protocol.groups import RewardRequest
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.endpoints.endpoint import Endpoint
from penstock.reward_service.endpoints.endpoint_queue import EndpointClient
from penstock.reward_service.endpoints.endpoint_registry import EndpointRegistry
from penstock.reward_service.errors import NotCalled, RewardError, RewardUnavailable, SandboxUnavailable, UnknownReward
from penstock.reward_service.registry.built_in import AUTO, BUILT_INS, BY_SOURCE
from penstock.reward_service.scores import GroupScores, Outcome, Scorer

Find = Callable[[RewardRequest], Awaitable[Scorer]]


@dataclass(frozen=True, slots=True, eq=False)
class ComposedReward:
    """Scores groups by all parts of a definition. Parts in ``own`` are made already, ``find`` looks the others up."""

    name: str
    definition: RewardDefinition
    own: Mapping[str, Scorer]
    find: Find

    @property
    def slow(self) -> bool:
        return any(name not in self.own or self.own[name].slow for name in self.definition.parts)

    async def score(self, groups: Sequence[GroupTexts], *, attempt: int) -> list[Outcome]:
        """Score every part of every group and combine them; an error in any part is the group's."""
        names = list(self.definition.parts)
        columns = await asyncio.gather(*(self._part(name, groups, attempt) for name in names))
        return [self._combine(dict(zip(names, outcomes, strict=True))) for outcomes in zip(*columns, strict=True)]

    async def _part(self, name: str, groups: Sequence[GroupTexts], attempt: int) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        by_scorer: dict[Scorer, list[int]] = {}
        asked = [self._part_of(name, group) for group in groups]
        for place, group in enumerate(asked):
            try:
                scorer = self.own.get(name) or await self.find(group.reward)
            except RewardError as err:
                outcomes[place] = err
            else:
                by_scorer.setdefault(scorer, []).append(place)
        outcome_lists = await asyncio.gather(
            *(scorer.score([asked[place] for place in places], attempt=attempt) for scorer, places in by_scorer.items())
        )
        for places, some in zip(by_scorer.values(), outcome_lists, strict=True):
            outcomes |= dict(zip(places, some, strict=True))
        return [outcomes[place] for place in range(len(groups))]

    def _part_of(self, name: str, group: GroupTexts) -> GroupTexts:
        request = group.reward.model_copy(update={"name": self.definition.parts[name].reward})
        return replace(group, reward=request)

    def _combine(self, outcomes: Mapping[str, Outcome]) -> Outcome:
        errors = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, RewardError)}
        if errors:  # permanent ones count first, then failed calls, then calls not made
            name, err = min(errors.items(), key=lambda item: (not item[1].permanent, isinstance(item[1], NotCalled)))
            named = copy.copy(err)
            named.args = (f"part {name}: {err}",)
            return named
        scores = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, GroupScores)}
        parts = {name: outcome.rewards for name, outcome in scores.items()}
        details = {f"{name}.{sub}": values for name, scored in scores.items() for sub, values in scored.parts.items()}
        scorers = dict.fromkeys(outcome.scorer for outcome in scores.values())
        return GroupScores(
            rewards=self.definition.totals(parts),
            scorer=f"{self.name}({', '.join(scorers)})",
            parts={**parts, **details},
        )


class RewardRegistry:
    """The rewards that this replica can give. An endpoint's name may hide an alias, no built-in or defined reward."""

    def __init__(
        self, built_ins: Mapping[str, Scorer], registry: EndpointRegistry, client: EndpointClient, *,
        notes: Mapping[str, str] = MappingProxyType({}),
        define: Mapping[str, RewardDefinition] = MappingProxyType({}),
        own: Mapping[str, Mapping[str, Scorer]] = MappingProxyType({}),
        user: Mapping[str, Scorer] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Look names up in the built-ins, the run file's (``define``, ``user``), the endpoints, then among the aliases.

        ``notes`` say how a built-in works on this machine; one that cannot be offered here is not among the built-ins,
        and its note says why. ``define`` are the run file's rewards, ``own`` the scorers of their built-in parts,
        and ``user`` the rewards that the run file names by import path, file or entry point.
        """
        self.notes = notes
        self._built_ins = built_ins
        self._registry = registry
        self._client = client
        self._user = user
        self._defined = {
            name: ComposedReward(name, definition, own.get(name, {}), self.find) for name, definition in define.items()
        }

    @property
    def definitions(self) -> dict[str, RewardDefinition]:
        return {name: reward.definition for name, reward in self._defined.items()}

    @property
    def user_rewards(self) -> tuple[str, ...]:
        return tuple(self._user)

    def names(self) -> tuple[str, ...]:
        """Return every name that a task may request; a data set's name only if it is valid in a message."""
        aliases = (name for name, reward in BY_SOURCE.items() if "/" not in name and reward in self._built_ins)
        single = {AUTO, *self._built_ins, *self._user, *self._registry.in_service(), *aliases}
        composed = (name for name, reward in self._defined.items() if self._can_give(reward, single))
        return tuple(sorted({*single, *composed}))

    def by_source(self) -> dict[str, str]:
        claimed = {source: e.name for e in self._registry.in_service().values() for source in e.data_sources}
        return {**{source: name for source, name in BY_SOURCE.items() if name in self._built_ins}, **claimed}

    def success(self) -> dict[str, float]:
        thresholds = {name: BUILT_INS[name].success for name in self._built_ins if name in BUILT_INS}
        return {name: least for name, least in thresholds.items() if least is not None}

    def _can_give(self, reward: ComposedReward, single: set[str]) -> bool:
        return all(name in reward.own or part.reward in single for name, part in reward.definition.parts.items())

    async def find(self, request: RewardRequest) -> Scorer:
        """Return the scorer of a request; raises UnknownReward, or NotCalled for one that is out of service.

        A name that is unknown here may have been registered at another replica a moment ago, so the
        registry is read once more before the name is called unknown.
        """
        scorer = self._look_up(request)
        if scorer is None:
            await self._registry.refresh()
            scorer = self._look_up(request)
        if scorer is None:
            raise self._unknown(request)
        return scorer

    def _look_up(self, request: RewardRequest) -> Scorer | None:
        name = request.data_source if request.name == AUTO else request.name
        for candidate in (name, BY_SOURCE.get(name, "")):
            for known in (self._built_ins, self._defined, self._user):
                if candidate in known:
                    return known[candidate]
            if candidate in self._registry.endpoints:
                return self._queue(self._registry.endpoints[candidate])
        for endpoint in self._registry.endpoints.values() if request.name == AUTO else ():
            if request.data_source in endpoint.data_sources:
                return self._queue(endpoint)
        return None

    def _queue(self, endpoint: Endpoint) -> Scorer:
        problem = self._registry.problem(endpoint)
        if problem is not None:
            raise problem
        return self._client.queue(endpoint)

    def _unknown(self, request: RewardRequest) -> UnknownReward | RewardUnavailable | SandboxUnavailable:
        name = request.data_source if request.name == AUTO else request.name
        if why := self.notes.get(BY_SOURCE.get(name, name)):
            return SandboxUnavailable(f"reward {name!r}: {why}")
        if ":" in name:
            return UnknownReward(
                f"reward {name!r} is code that the run file of this reward service does not name, so it is not loaded; "
                "set it as reward.name, in reward.by_source or in a part of reward.define there"
            )
        if name in self._registry.retired:
            return RewardUnavailable(
                f"the endpoint of reward {name!r} was unregistered; register it again "
                "(penstock reward serve FILE.py, or POST /v1/endpoints)"
            )
        asked = f"data_source {name!r} (reward 'auto')" if request.name == AUTO else f"reward {name!r}"
        near = difflib.get_close_matches(name, self.names(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        there = sorted({*self._built_ins, *self._defined, *self._user, *self._registry.endpoints})
        return UnknownReward(f"no {asked}: {hint}There are: {', '.join(there)}")
