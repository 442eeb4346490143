"""`nemo_gym`: the policy calls the tools of a NeMo-Gym resources server, which verifies the episode; the package itself is not needed here.

Each episode is a session of its own. The row says what the policy is shown and which tools it has, as NeMo-Gym's own agents read it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any, Self

from penstock.agents.environments.adapters.nemo_gym.gym_row import GymRow
from penstock.agents.environments.adapters.nemo_gym.session import (
    ALIVE_WITHIN_S,
    GymSession,
    NemoGymOptions,
    Sessions,
    Verified,
)
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.environments.tools.tool import shortened
from penstock.agents.environments.turn_environment import ServerEnvironment, check_reply_deadline
from penstock.agents.proxy.messages import Message, ToolCall
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.serving import strict_json


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
        self._note(answer)
        messages: list[Message] = []
        errors, is_done = 0, not answer.tool_calls
        for number, call in enumerate(answer.tool_calls):
            whole, is_error = await self._result(call, number)
            errors += is_error
            is_done = is_done or (self._options.use_done_flag and not is_error and _says_done(whole))
            text = shortened(whole, self._options.max_output_chars, self._options.output_cut)
            self._output.append({"type": "function_call_output", "call_id": call.id, "output": text})
            messages.append(Message("tool", text, tool_call_id=call.id, name=call.name))
        parts = {"tool_calls": float(len(messages)), "tool_errors": float(errors)} if messages else {}
        if not is_done:
            return Reply(tuple(messages), parts=parts)
        verified = await self._verify()
        return Reply(reward=verified.reward, is_done=True, parts={**verified.parts, **parts})

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
            arguments = strict_json.loads((call.arguments or "{}").encode("utf-8", "surrogatepass"))
        except strict_json.AmbiguousJson as err:
            return f"error: the arguments are no JSON: {err}", True
        if not isinstance(arguments, dict):
            return "error: the arguments are no JSON object", True
        assert self._session is not None
        return await self._session.call(call.name, arguments)

    def _note(self, answer: Message) -> None:
        number = len(self._output)
        if answer.reasoning:
            content = [{"type": "reasoning_text", "text": answer.reasoning}]
            self._output.append(
                {"id": f"rs_{self._id}_{number}", "type": "reasoning", "summary": [], "content": content}
            )
        if answer.content or not answer.tool_calls:
            self._output.append(
                {
                    "id": f"msg_{self._id}_{number}",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": answer.content, "annotations": []}],
                }
            )
        self._output += [
            {
                "id": f"fc_{call.id}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
            for call in answer.tool_calls
        ]


def _says_done(text: str) -> bool:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("done") is True


class NemoGym(ServerEnvironment):
    name = "nemo_gym"
    options = NemoGymOptions

    def defined(self, name: str, definition: EnvironmentDefinition) -> Self:
        other = super().defined(name, definition)
        check_reply_deadline(name, definition, other.chosen.call_deadline_s, ALIVE_WITHIN_S)
        return other

    def new_sessions(self, options: NemoGymOptions) -> Sessions:
        return Sessions(options, self.own_servers)

    def play(self, seed: int, row: Row, options: NemoGymOptions) -> NemoGymPlay:
        if self.sessions is None:
            raise ValueError(
                'nemo_gym needs a server: write [environment.define.NAME] with type = "nemo_gym" and options.url, and name that'
            )
        return NemoGymPlay(seed, row, options, self.sessions)


NEMO_GYM = NemoGym()
