"""NeMo-Gym's ``POST /verify`` of a resources server: one completion as an OpenAI response, ``reward`` comes back.

As in ``nemo_gym/base_resources_server.py`` (``BaseVerifyRequest``, ``BaseVerifyResponse``): the row's columns
are on the same level as ``responses_create_params`` and ``response``, where a server's request model reads
them. Only servers that verify without a session (``/seed_session``) work: the completion was sampled elsewhere.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field

from penstock.reward_service.endpoints.dialects import foreign_scores
from penstock.reward_service.endpoints.dialects.dialect import BadAnswer, Call, Dialect, DialectKind, Payload
from penstock.reward_service.endpoints.wire import Score


class NemoGymDialect(Dialect):
    """What a NeMo-Gym resources server's ``/verify`` expects."""

    carries: ClassVar[Literal["groups", "group", "completion"]] = "completion"

    ground_truth_key: str = Field(
        "expected_answer", min_length=1, max_length=100, description="The request's field that holds the ground truth."
    )
    model: str = Field("policy", max_length=200, description="The model name in the response object.")

    def request(self, call: Call) -> Payload:
        (group,) = call.groups
        (text,) = group.completions
        row: dict[str, Any] = dict(group.extra_info) if isinstance(group.extra_info, dict) else {}
        message = {
            "id": f"msg_{call.request_id}", "type": "message", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": []}],
        }  # fmt: skip
        response = {
            "id": f"resp_{call.request_id}",
            "object": "response",
            "created_at": 0.0,  # the time of sampling is not known here
            "model": self.model,
            "output": [message],
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
        }
        asked = {"input": [{"role": "user", "content": group.prompt}]}
        truth = {} if group.ground_truth is None else {self.ground_truth_key: group.ground_truth}
        body = {**row, **truth, "response": response}
        body.setdefault("responses_create_params", asked)
        return Payload(json.dumps(body).encode())

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        """Read ``reward``; the numbers of ``reward_components`` are parts."""
        value = foreign_scores.parse(answer)
        if not isinstance(value, dict) or "reward" not in value:
            raise BadAnswer("answers no object with 'reward'")
        components = value.get("reward_components")
        score = foreign_scores.score_of(value["reward"], "reward")
        if score.score is None or not isinstance(components, dict):
            return [[score]]
        return [[score.model_copy(update={"parts": foreign_scores.parts_of(components, "reward_components")})]]


NEMO_GYM = DialectKind("nemo-gym", NemoGymDialect)
