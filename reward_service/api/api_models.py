"""Request and response bodies of the HTTP API."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from secrets import token_hex
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from penstock.reward_service.endpoints.endpoint import Endpoint, EndpointSpec
from penstock.reward_service.endpoints.endpoint_call import EndpointMetrics
from penstock.reward_service.endpoints.endpoint_registry import EndpointSecrets
from penstock.reward_service.endpoints.wire import GroupToScore
from penstock.reward_service.scores import GroupScores, Outcome
from penstock.serving import signature

_SPEC_FIELDS = frozenset(EndpointSpec.model_fields)


class Refusal(BaseModel):
    """The reason why a request was refused."""

    detail: str


class Registration(EndpointSpec):
    """An endpoint to register. Its secrets are stored separately and never returned."""

    replace: bool = Field(False, description="Replace the endpoint that has the name: a new version, or another URL.")
    secrets: Annotated[tuple[SecretStr, ...], Field(max_length=2)] = Field(
        (), description="Signing keys whsec_...; with two, requests carry both signatures, so that keys can be changed."
    )
    api_key: SecretStr = Field(SecretStr(""), max_length=4096, description="Sent to it as Authorization: Bearer.")

    @field_validator("secrets")
    @classmethod
    def _usable(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for secret in value:
            signature.key_bytes(secret.get_secret_value())
        return value

    @field_validator("api_key")
    @classmethod
    def _fits_a_header(cls, value: SecretStr) -> SecretStr:
        if any(not "!" <= letter <= "~" for letter in value.get_secret_value()):
            raise ValueError("an API key is printable ASCII without spaces")
        return value

    def endpoint(self, *, owner: str) -> Endpoint:
        fields = {name: getattr(self, name) for name in _SPEC_FIELDS}
        return Endpoint(**{**fields, "owner": owner}, secret_id=token_hex(8) if self.endpoint_secrets() else "")

    def endpoint_secrets(self) -> EndpointSecrets:
        return EndpointSecrets(
            tuple(secret.get_secret_value() for secret in self.secrets), self.api_key.get_secret_value()
        )


class EndpointRecord(BaseModel):
    """A registered endpoint, and its metrics in this replica."""

    endpoint: Endpoint
    live: EndpointMetrics


class LeaseRenewal(BaseModel):
    """A renewal: version and URL must be those that are registered."""

    model_config = ConfigDict(extra="forbid")

    version: str = Field(max_length=100)
    url: str = Field(max_length=2000)


class Lease(BaseModel):
    """How long the registration is valid from now; null: without a limit."""

    lease_s: float | None


class RewardRecord(BaseModel):
    """A reward that rows may request."""

    name: str
    kind: str
    description: str


class RewardList(BaseModel):
    """All rewards, and the reward of each data set."""

    rewards: list[RewardRecord]
    by_source: dict[str, str]


class Failure(BaseModel):
    """The reason why a group was not scored; ``permanent`` failures are not tried again."""

    reason: str
    detail: str
    permanent: bool


class CompletionScore(BaseModel):
    """The score of one completion."""

    score: float
    parts: dict[str, float]


class ScoredByHand(BaseModel):
    """One group: its scores and their scorer, or the error."""

    group_id: str
    scorer: str | None = None
    scores: list[CompletionScore] = []
    error: Failure | None = None


class Spread(BaseModel):
    """The score distribution; equal scores give no training signal."""

    num_scores: int
    num_errors: int = Field(description="Groups without a score.")
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    num_distinct: int = 0
    warning: str = ""

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Spread:
        scored = [outcome for outcome in outcomes if isinstance(outcome, GroupScores)]
        values = [reward for outcome in scored for reward in outcome.rewards]
        num_errors = len(outcomes) - len(scored)
        if not values:
            return cls(num_scores=0, num_errors=num_errors, warning="no completion was scored")
        distinct = len(set(values))
        same = f"all {len(values)} scores are {values[0]:g}: equal scores give no training signal"
        return cls(
            num_scores=len(values), num_errors=num_errors, mean=statistics.fmean(values),
            std=statistics.pstdev(values), min=min(values), max=max(values), num_distinct=distinct,
            warning=same if distinct == 1 and len(values) > 1 else "",
        )  # fmt: skip


class GroupByHand(GroupToScore):
    completion_tokens: list[Annotated[int, Field(ge=0)]] = Field(
        default=[], description="How many tokens each completion has, for rewards that count tokens; none: unknown."
    )

    @model_validator(mode="after")
    def _one_each(self) -> GroupByHand:
        if self.completion_tokens and len(self.completion_tokens) != len(self.completions):
            raise ValueError(
                f"{len(self.completion_tokens)} completion_tokens for {len(self.completions)} completions; give one for "
                "each, or none"
            )
        return self


class ScoreByHand(BaseModel):
    """Groups to score by hand, and the reward."""

    reward: str = Field(description="The reward's name.")
    groups: list[GroupByHand] = Field(min_length=1, max_length=1024)


class ScoreAnswer(BaseModel):
    """The outcome of every group, in the order they were sent, and the score distribution."""

    ok: bool
    results: list[ScoredByHand]
    spread: Spread

    @classmethod
    def of(cls, group_ids: Sequence[str], outcomes: Sequence[Outcome]) -> ScoreAnswer:
        results = [_by_hand(group_id, outcome) for group_id, outcome in zip(group_ids, outcomes, strict=True)]
        return cls(ok=all(result.error is None for result in results), results=results, spread=Spread.of(outcomes))


class TestRequest(BaseModel):
    """Rows to test an endpoint with; none: example rows."""

    groups: Annotated[list[GroupToScore], Field(max_length=1024)] = []


def _by_hand(group_id: str, outcome: Outcome) -> ScoredByHand:
    if isinstance(outcome, GroupScores):
        scores = [
            CompletionScore(score=reward, parts={name: values[i] for name, values in outcome.parts.items()})
            for i, reward in enumerate(outcome.rewards)
        ]
        return ScoredByHand(group_id=group_id, scorer=outcome.scorer, scores=scores)
    failure = Failure(reason=outcome.reason, detail=str(outcome), permanent=outcome.permanent)
    return ScoredByHand(group_id=group_id, error=failure)
