"""OpenAI's HTTP API that runs a grader: ``POST .../fine_tuning/alpha/graders/run``.

``{"grader": {...}, "item": {...}, "model_sample": "..."}`` is sent for every completion. The response has ``reward``,
``sub_rewards``, and ``metadata.errors`` with a flag for every kind of failure. If a flag is set there is no
score, whatever ``reward`` is.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue

from penstock.reward_service.endpoints.dialects import foreign_scores
from penstock.reward_service.endpoints.dialects.dialect import BadAnswer, Call, Dialect, DialectKind, Payload
from penstock.reward_service.endpoints.wire import GroupToScore, Score


class OpenAiGraderDialect(Dialect):
    """What OpenAI's ``graders/run``, and servers of the same form, expect."""

    carries: ClassVar[Literal["groups", "group", "completion"]] = "completion"

    grader: dict[str, JsonValue] = Field(min_length=1, description="The grader, as OpenAI describes it in JSON.")
    reference_key: str = Field(
        "reference_answer", min_length=1, max_length=100, description="The item's field that holds the ground truth."
    )

    def request(self, call: Call) -> Payload:
        (group,) = call.groups
        (text,) = group.completions
        body = {"grader": self.grader, "item": item_of(group, self.reference_key), "model_sample": text}
        return Payload(json.dumps(body).encode())

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        value = foreign_scores.parse(answer)
        if not isinstance(value, dict) or "reward" not in value:
            raise BadAnswer("answers no object with 'reward'")
        metadata = value.get("metadata")
        errors = metadata.get("errors") if isinstance(metadata, dict) else None
        if isinstance(errors, dict) and (raised := [name for name, flag in errors.items() if flag is True]):
            details = [f"{name}: {text}" for name, text in errors.items() if isinstance(text, str) and text]
            return [[Score(error=f"the grader reports {', '.join(raised)} {'; '.join(details)}".strip()[:1000])]]
        score = foreign_scores.score_of(value["reward"], "reward")
        parts = value.get("sub_rewards")
        if score.score is None or not isinstance(parts, dict):
            return [[score]]
        return [[score.model_copy(update={"parts": foreign_scores.parts_of(parts, "sub_rewards")})]]


def item_of(group: GroupToScore, reference_key: str) -> dict[str, Any]:
    row = dict(group.extra_info) if isinstance(group.extra_info, dict) else {"extra_info": group.extra_info}
    return {"prompt": group.prompt, "data_source": group.data_source, **row, reference_key: group.ground_truth}


OPENAI_GRADER = DialectKind("openai-grader", OpenAiGraderDialect)
