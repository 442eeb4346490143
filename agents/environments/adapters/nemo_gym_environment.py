"""`nemo_gym`: the policy calls the tools of a NeMo-Gym resources server, which verifies the episode; the package itself is not needed here.

Each episode is a separate session. The row says what the policy is shown and which tools it has, as NeMo-Gym's agents read it.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from penstock.agents.environments.adapters.nemo_gym_session import (
    ALIVE_WITHIN_S,
    GymSession,
    NemoGymOptions,
    Sessions,
    Verified,
)
from penstock.agents.environments.play import Play, Reply, Row, called, read_arguments
from penstock.agents.environments.turn_environment import ServerEnvironment, check_reply_deadline
from penstock.agents.proxy.api.responses import output_items, read_request
from penstock.agents.proxy.messages import Message, RequestRefused, ToolCall
from penstock.protocol.config.environment_settings import EnvironmentDefinition

_PARAMS = "responses_create_params"
# A tool's name is a path of its server, which has these for itself (`RESERVED_MCP_TOOL_NAMES` of NeMo-Gym).
_RESERVED = frozenset({"verify", "seed_session", "close_session", "sandbox_access", "aggregate_metrics", "mcp"})
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# What is read of the parameters, or refused; sampling is the run's.
_READ = ("input", "instructions", "tools", "text", "previous_response_id", "conversation", "background", "prompt")


@dataclass(frozen=True, slots=True)
class GymRow:
    fields: Mapping[str, Any]  # all of the row, unchanged
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
            "id": response_id, "object": "response", "created_at": created_s, "model": "policy",
            "status": "completed", "output": output, "parallel_tool_calls": not self.makes_one_call,
            "tool_choice": "auto", "tools": tools,
        }  # fmt: skip
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
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise ValueError(f"{where}.parameters.required: expected a list of names, got {str(required)[:200]}")


class NemoGymPlay(Play):
    def __init__(self, seed: int, row: Row, options: NemoGymOptions, sessions: Sessions) -> None:
        self._row = GymRow.of(row)
        self.tools = self._row.tools
        self._names = frozenset(tool["function"]["name"] for tool in self.tools)
        self._seed, self._options, self._sessions = seed, options, sessions
        self._session: GymSession | None = None
        self._id = secrets.token_hex(8)
        self._output: list[dict[str, Any]] = []  # the episode as items of the Responses API

    async def start(self) -> Sequence[Message]:
        self._session = await self._sessions.open(self._row.fields, self._seed)
        return self._row.messages

    async def step(self, answer: Message) -> Reply:
        """Make the calls of an answer in turn; one without a call, and a tool that says so, end the episode. Raises GymFailed."""
        self._output += output_items(answer, f"{self._id}_{len(self._output)}")
        results: list[tuple[str, bool]] = []
        is_done = not answer.tool_calls
        for number, call in enumerate(answer.tool_calls):
            whole, is_error = await self._result(call, number)
            is_done = is_done or (self._options.use_done_flag and not is_error and _says_done(whole))
            results.append((self._options.shortened(whole), is_error))
            self._output.append({"type": "function_call_output", "call_id": call.id, "output": results[-1][0]})
        reply = called(answer.tool_calls, results)
        if not is_done:
            return reply
        verified = await self._verify()
        parts = {**verified.parts, **(reply.parts if results else {})}
        return Reply(reward=verified.reward, is_done=True, parts=parts)

    async def score(self) -> float:
        return (await self._verify()).reward

    async def close(self) -> None:
        if self._session is not None:
            self._session.end()

    async def _verify(self) -> Verified:
        assert self._session is not None
        return await self._session.verify(self._row.verify(self._output, f"resp_{self._id}", time.time()))

    async def _result(self, call: ToolCall, number: int) -> tuple[str, bool]:
        most = 1 if self._row.makes_one_call else self._options.max_calls
        if number >= most:
            return f"error: only the first {most} calls of an answer are made", True
        if call.name not in self._names:  # every name is a path of the server, /verify too
            named = ", ".join(sorted(self._names)) or "none"
            return f"error: there is no tool {call.name[:100]!r}; there are {named}", True
        try:
            arguments = read_arguments(call)
        except ValueError as err:
            return f"error: {err}", True
        assert self._session is not None
        return await self._session.call(call.name, arguments)


def _says_done(text: str) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("done") is True


class NemoGym(ServerEnvironment):
    name = "nemo_gym"
    options = NemoGymOptions
    sessions_class = Sessions
    play_class = NemoGymPlay

    def defined(self, name: str, definition: EnvironmentDefinition) -> Self:
        other = super().defined(name, definition)
        check_reply_deadline(name, definition, other.chosen.call_deadline_s, ALIVE_WITHIN_S)
        return other


NEMO_GYM = NemoGym()
