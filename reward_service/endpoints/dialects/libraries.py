"""The formats of other libraries and services: verl, TRL, OpenRLHF, slime, NeMo-Gym and OpenAI's graders.

verl and TRL call Python functions and define no wire format; their keyword arguments are sent as a JSON object and the return
value is read as JSON, so a server is one line around the function: ``compute_score(**await request.json())``. The arguments are
those of verl's reward managers (``verl/workers/reward_manager``: ``naive`` and ``batch``), and TRL's
``f(prompts, completions, **columns) -> list[float | None]`` without token ids and the trainer's state, which exist only there.

OpenRLHF's remote reward model (``--remote_rm_url``, ``openrlhf/cli/serve_rm.py``) answers ``{"rewards": [...]}``, in newer
versions with ``scores`` and ``extra_logs``; training uses ``rewards``. slime's ``remote_rm`` (``slime/rollout/rm_hub``) takes the
JSON that comes back as the reward: a number, or an object of which ``--reward-key`` names the number.

NeMo-Gym's ``POST /verify`` gets one completion as an OpenAI response, as in ``nemo_gym/base_resources_server.py``
(``BaseVerifyRequest``, ``BaseVerifyResponse``): the row's columns are on the same level as ``responses_create_params`` and
``response``, where a server's request model reads them. Only servers that verify without a session (``/seed_session``) work: the
completion was sampled elsewhere.

OpenAI's ``POST .../fine_tuning/alpha/graders/run`` gets ``{"grader": {...}, "item": {...}, "model_sample": "..."}`` for every
completion. The response has ``reward``, ``sub_rewards``, and ``metadata.errors`` with a flag for every kind of failure. If a flag
is set there is no score, whatever ``reward`` is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue

from penstock.reward_service.endpoints.dialects import dialect
from penstock.reward_service.endpoints.dialects.dialect import (
    BadAnswer,
    Call,
    ColumnsDialect,
    CompletionDialect,
    Dialect,
    DialectKind,
    Row,
)
from penstock.reward_service.endpoints.wire import MAX_PARTS, GroupToScore, Score

_VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


class VerlDialect(CompletionDialect):
    """One ``compute_score(data_source, solution_str, ground_truth, extra_info)``; it has no options."""

    def body(self, group: GroupToScore, text: str, request_id: str) -> dict[str, Any]:
        return verl_row(group, text)

    def score(self, value: JsonValue) -> Score:
        return dialect.score_of(value, "body")


class VerlBatchDialect(ColumnsDialect):
    """One ``compute_score(data_sources, solution_strs, ground_truths, extra_infos)``; it has no options."""

    def columns(self, rows: Sequence[Row]) -> dict[str, list[Any]]:
        return verl_columns(rows)

    def scores(self, value: JsonValue, size: int) -> list[Score]:
        return dialect.scores_of(value, size, "body")


class TrlDialect(Dialect):
    """One group: prompts, completions and the row's columns, all as lists of equal length."""

    carries: ClassVar[Literal["groups", "group", "completion"]] = "group"

    conversational: bool = Field(
        False, description="Prompts and completions as lists of messages, as TRL gives them for such data sets."
    )

    def request(self, call: Call) -> bytes:
        (group,) = call.groups
        return json.dumps(trl_columns(group, conversational=self.conversational)).encode()

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        (group,) = call.groups
        return [dialect.scores_of(dialect.parse(answer), len(group.completions), "body")]


class OpenRlhfDialect(ColumnsDialect):
    """What a server behind OpenRLHF's ``--remote_rm_url`` expects; it has no options."""

    def columns(self, rows: Sequence[Row]) -> dict[str, list[Any]]:
        columns = openrlhf_columns(rows)
        return {"query": columns.pop("queries"), **columns}

    def scores(self, value: JsonValue, size: int) -> list[Score]:
        rewards, answer = dialect.member(value, "rewards")
        scores = dialect.scores_of(rewards, size, "rewards")
        columns = {}
        if answer.get("scores") is not None:
            columns["scores"] = dialect.list_of(answer["scores"], size, "scores")
        logs = answer.get("extra_logs")
        for name, column in list(logs.items())[: MAX_PARTS - 1] if isinstance(logs, dict) else ():
            if isinstance(column, list) and name and all(isinstance(item, int | float) for item in column):
                columns[name] = dialect.list_of(column, size, f"extra_logs.{name}")
        parts = [
            {
                name[:64]: dialect.number(column[place], f"{name}[{place}]")
                for name, column in columns.items()
                if column[place] is not None
            }
            for place in range(size)
        ]
        return [
            score if score.score is None else score.model_copy(update={"parts": own})
            for score, own in zip(scores, parts, strict=True)
        ]


class SlimeDialect(CompletionDialect):
    """What a server behind slime's ``--rm-url`` expects."""

    reward_key: str = Field("", max_length=100, description="slime's --reward-key: the key of the score in an object.")

    def body(self, group: GroupToScore, text: str, request_id: str) -> dict[str, Any]:
        return {"prompt": group.prompt, "response": text, "label": group.ground_truth}

    def score(self, value: JsonValue) -> Score:
        if isinstance(value, dict) and not self.reward_key:
            raise BadAnswer(
                f"answers an object of {len(value)} keys; name the key of its number with the option reward_key"
            )
        return dialect.score_of(value, "body", key=self.reward_key)


def verl_row(group: GroupToScore, text: str) -> dict[str, Any]:
    return {
        "data_source": group.data_source, "solution_str": text, "ground_truth": group.ground_truth,
        "extra_info": group.extra_info,
    }  # fmt: skip


def verl_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    named = [verl_row(group, text) for group, text in rows]
    return {f"{name}s": [row[name] for row in named] for name in _VERL_NAMES}


def openrlhf_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    return {
        "queries": [group.prompt + text for group, text in rows],
        "prompts": [group.prompt for group, _ in rows],
        "labels": ["" if group.ground_truth is None else group.ground_truth for group, _ in rows],
    }


def trl_columns(group: GroupToScore, *, conversational: bool = False) -> dict[str, list[Any]]:
    """Return a group as TRL's keyword arguments: every value a list with one item for each completion.

    The columns of ``extra_info`` are separate arguments, as are ``data_source`` and ``ground_truth``;
    ``extra_info`` itself is passed too.
    """
    size = len(group.completions)
    row: dict[str, Any] = {"data_source": group.data_source, "ground_truth": group.ground_truth}
    row |= group.extra_info if isinstance(group.extra_info, dict) else {}
    row.setdefault("extra_info", group.extra_info)
    prompt: Any = [{"role": "user", "content": group.prompt}] if conversational else group.prompt
    texts: list[Any] = list(group.completions)
    if conversational:
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    return {**{name: [value] * size for name, value in row.items()}, "prompts": [prompt] * size, "completions": texts}


VERL, VERL_BATCH = DialectKind("verl", VerlDialect), DialectKind("verl-batch", VerlBatchDialect)
TRL, OPENRLHF = DialectKind("trl", TrlDialect), DialectKind("openrlhf", OpenRlhfDialect)
SLIME = DialectKind("slime", SlimeDialect)


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
