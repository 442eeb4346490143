"""The formats of services that grade: NeMo-Gym's resources servers, and OpenAI's API that runs a grader.

NeMo-Gym's ``POST /verify`` gets one completion as an OpenAI response, as in ``nemo_gym/base_resources_server.py``
(``BaseVerifyRequest``, ``BaseVerifyResponse``): the row's columns are on the same level as ``responses_create_params`` and
``response``, where a server's request model reads them. Only servers that verify without a session (``/seed_session``) work: the
completion was sampled elsewhere.

OpenAI's ``POST .../fine_tuning/alpha/graders/run`` gets ``{"grader": {...}, "item": {...}, "model_sample": "..."}`` for every
completion. The response has ``reward``, ``sub_rewards``, and ``metadata.errors`` with a flag for every kind of failure. If a flag
is set there is no score, whatever ``reward`` is.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, JsonValue

from penstock.reward_service.endpoints.dialects import dialect
from penstock.reward_service.endpoints.dialects.dialect import CompletionDialect, DialectKind
from penstock.reward_service.endpoints.wire import GroupToScore, Score


class NemoGymDialect(CompletionDialect):
    """What a NeMo-Gym resources server's ``/verify`` expects."""

    ground_truth_key: str = Field(
        "expected_answer", min_length=1, max_length=100, description="The request's field that holds the ground truth."
    )
    model: str = Field("policy", max_length=200, description="The model name in the response object.")

    def body(self, group: GroupToScore, text: str, request_id: str) -> dict[str, Any]:
        row: dict[str, Any] = dict(group.extra_info) if isinstance(group.extra_info, dict) else {}
        message = {
            "id": f"msg_{request_id}", "type": "message", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": []}],
        }  # fmt: skip
        response = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": 0.0,  # the time of sampling is not known here
            "model": self.model,
            "output": [message],
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
        }
        truth = {} if group.ground_truth is None else {self.ground_truth_key: group.ground_truth}
        asked = {"input": [{"role": "user", "content": group.prompt}]}
        return {"responses_create_params": asked, **row, **truth, "response": response}

    def score(self, value: JsonValue) -> Score:
        """Read ``reward``; the numbers of ``reward_components`` are parts."""
        reward, answer = dialect.member(value, "reward")
        return dialect.with_parts(
            dialect.score_of(reward, "reward"), answer.get("reward_components"), "reward_components"
        )


class OpenAiGraderDialect(CompletionDialect):
    """What OpenAI's ``graders/run``, and servers of the same form, expect."""

    grader: dict[str, JsonValue] = Field(min_length=1, description="The grader, as OpenAI describes it in JSON.")
    reference_key: str = Field(
        "reference_answer", min_length=1, max_length=100, description="The item's field that holds the ground truth."
    )

    def body(self, group: GroupToScore, text: str, request_id: str) -> dict[str, Any]:
        return {"grader": self.grader, "item": item_of(group, self.reference_key), "model_sample": text}

    def score(self, value: JsonValue) -> Score:
        reward, answer = dialect.member(value, "reward")
        metadata = answer.get("metadata")
        errors = metadata.get("errors") if isinstance(metadata, dict) else None
        if isinstance(errors, dict) and (raised := [name for name, flag in errors.items() if flag is True]):
            details = [f"{name}: {text}" for name, text in errors.items() if isinstance(text, str) and text]
            return Score(error=f"the grader reports {', '.join(raised)} {'; '.join(details)}".strip()[:1000])
        return dialect.with_parts(dialect.score_of(reward, "reward"), answer.get("sub_rewards"), "sub_rewards")


def item_of(group: GroupToScore, reference_key: str) -> dict[str, Any]:
    row = dict(group.extra_info) if isinstance(group.extra_info, dict) else {"extra_info": group.extra_info}
    return {"prompt": group.prompt, "data_source": group.data_source, **row, reference_key: group.ground_truth}


NEMO_GYM = DialectKind("nemo-gym", NemoGymDialect)
OPENAI_GRADER = DialectKind("openai-grader", OpenAiGraderDialect)
