"""Requests to endpoints and their answers: the `penstock` dialect, and what every other dialect translates to.

The service sends ``POST <url>`` with a `ScoreRequest` as JSON and a header ``Idempotency-Key``; the endpoint answers 200 with a
`ScoreResponse`. A score of null, or an error text, means *could not be scored*: the whole group is delivered again. It never means 0.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from penstock.protocol.groups import Finite
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.scores import extra_info, ground_truth

MAX_PARTS = 32
CALL_HEADER = "penstock-endpoint-call"  # of every request sent here; an API that gets one refuses it: a loop
ERROR_HEADER = "penstock-error"  # of an answer: why, for the people who read the errors of this endpoint


class _Answer(BaseModel):
    """Base of answers: values are strict, extra fields are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class GroupToScore(BaseModel):
    """One prompt with all its completions, and the row of the data set it came from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    group_id: str = Field("group", description="Repeat it in the answer.")
    prompt: str = Field("", description="The prompt's text.")
    completions: list[str] = Field(min_length=1, max_length=4096, description="One text for each trajectory.")
    data_source: str = Field("", description="The row's `data_source`.")
    ground_truth: JsonValue = Field(None, description="The row's answer, as the data set has it.")
    extra_info: JsonValue = Field(default_factory=dict, description="The row's other columns.")

    @classmethod
    def of(cls, group: GroupTexts) -> GroupToScore:
        return cls(
            group_id=group.group_id, prompt=group.prompt_text, completions=list(group.completions),
            data_source=group.reward.data_source, ground_truth=ground_truth(group.reward),
            extra_info=extra_info(group.reward),
        )  # fmt: skip


class ScoreRequest(BaseModel):
    """The body of a request to an endpoint."""

    request_id: str = Field("", description="The same for every try of one call; also in the header Idempotency-Key.")
    reward: str = Field(description="The reward's name.")
    groups: list[GroupToScore] = Field(min_length=1, max_length=1024)


class Score(_Answer):
    """The score of one completion, or why there is none."""

    score: Finite | None = None
    error: str | None = None
    parts: dict[Annotated[str, Field(min_length=1, max_length=64)], Finite] = Field(
        default_factory=dict, max_length=MAX_PARTS
    )


class GroupScore(_Answer):
    """The scores of one group, one for each completion, in the order they were sent."""

    group_id: str
    scores: list[Score]


class ScoreResponse(_Answer):
    """The body of an answer: every group that was sent, each once, in any order."""

    results: list[GroupScore]


def example_groups() -> list[GroupToScore]:
    row: dict[str, Any] = {"data_source": "example", "ground_truth": "4", "extra_info": {}}
    return [
        GroupToScore(group_id="example-1", prompt="What is 2 + 2?", completions=["4", "#### 4", "\\boxed{5}"], **row)
    ]
