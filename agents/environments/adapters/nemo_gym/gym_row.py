"""A row of NeMo-Gym: what the policy is shown, its tools, and what `/seed_session` and `/verify` get; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from penstock.agents.environments.play import Row
from penstock.agents.proxy.api.responses import read_request
from penstock.agents.proxy.messages import Message, RequestRefused

_PARAMS = "responses_create_params"
# A tool's name is a path of its server, which has these for itself (`RESERVED_MCP_TOOL_NAMES` of NeMo-Gym).
_RESERVED = frozenset({"verify", "seed_session", "close_session", "sandbox_access", "aggregate_metrics", "mcp"})
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# What is read of the parameters, or refused; sampling is the run's.
_READ = ("input", "instructions", "tools", "text", "previous_response_id", "conversation", "background", "prompt")


@dataclass(frozen=True, slots=True)
class GymRow:
    fields: Mapping[str, Any]  # all of the row, as it was given
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]  # as the chat completions API writes them
    makes_one_call: bool  # of each answer

    @classmethod
    def of(cls, row: Row) -> Self:
        """Return what a row holds; raises ValueError, which names the field."""
        params = row.extra_info.get(_PARAMS)
        if not isinstance(params, dict):
            raise ValueError(f"its extra_info has no object {_PARAMS}: it is not a row of NeMo-Gym")  # noqa: TRY004 - a row's, not the caller's
        try:
            asked = read_request({name: params[name] for name in _READ if name in params}, 0.0)
        except RequestRefused as err:
            raise ValueError(f"{_PARAMS}: {err}") from None
        if params.get("tool_choice") not in (None, "auto"):
            raise ValueError(f"{_PARAMS}.tool_choice: expected auto, got {str(params['tool_choice'])[:100]}")
        parallel = params.get("parallel_tool_calls", True)
        if not isinstance(parallel, bool | None):
            raise ValueError(f"{_PARAMS}.parallel_tool_calls: expected true or false, got {str(parallel)[:100]}")  # noqa: TRY004
        for number, tool in enumerate(params.get("tools") or []):
            _check(tool, f"{_PARAMS}.tools[{number}]")
        names = [tool["function"]["name"] for tool in asked.tools]
        if len(set(names)) < len(names):
            raise ValueError(f"{_PARAMS}.tools: two have the same name; there are {', '.join(names)}")
        fields = dict(row.extra_info)
        if row.ground_truth is not None:
            fields.setdefault("ground_truth", row.ground_truth)
        return cls(fields, _shown(asked.messages, row), asked.tools, parallel is False)

    def verify(self, output: list[dict[str, Any]], response_id: str, created_s: float) -> dict[str, Any]:
        """Return the body of `/verify`: the row, and the episode as one response of the Responses API."""
        params = self.fields[_PARAMS]
        tools = [
            {"description": None, "parameters": None, "strict": None, **tool} for tool in params.get("tools") or []
        ]
        response = {
            "id": response_id,
            "object": "response",
            "created_at": created_s,
            "model": "policy",
            "status": "completed",
            "output": output,
            "parallel_tool_calls": not self.makes_one_call,
            "tool_choice": "auto",
            "tools": tools,
        }
        return {**self.fields, "response": response}


def _shown(messages: tuple[Message, ...], row: Row) -> tuple[Message, ...]:
    if not messages or messages[-1].role not in ("user", "tool"):
        last = f"the last is of the {messages[-1].role}" if messages else "there is none"
        raise ValueError(f"{_PARAMS}.input: expected messages, the last one of the user; {last}")
    if any(message.images for message in messages):
        raise ValueError(f"{_PARAMS}.input: a message has an image, which this environment does not show")
    if row.messages and row.messages[0].role == "system" and messages[0].role != "system":
        raise ValueError(
            f"its messages begin with a system message that {_PARAMS}.input does not have, from data.system_prompt or the column system; "
            "write system_prompt of [environment.define.NAME] instead"
        )
    return messages


def _check(tool: Mapping[str, Any], where: str) -> None:
    name = tool["name"]
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where}.name: expected 1 to 64 letters, digits, _ and -, got {name[:100]!a}")
    if name in _RESERVED:
        raise ValueError(f"{where}.name: {name} is a path that the server has for itself; no policy calls it")
    schema = tool.get("parameters")
    if schema is None:
        return
    if schema.get("type") != "object" or not isinstance(schema.get("properties", {}), dict):
        raise ValueError(
            f"{where}.parameters: expected a JSON schema of an object with properties, got {str(schema)[:200]}"
        )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise ValueError(f"{where}.parameters.required: expected a list of names, got {str(required)[:200]}")
