"""`openenv`: an environment that an OpenEnv server plays; the package itself is not needed here.

Each episode is a session of its own. A server has few of them; one that is full is asked again.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.agents.environments.adapters.open_env.options import OpenEnvOptions
from penstock.agents.environments.adapters.open_env.session import (
    ActionRefused,
    OpenEnvFailed,
    OpenEnvSession,
    Sessions,
)
from penstock.agents.environments.adapters.text_steps import text_of
from penstock.agents.environments.games.actions import find_action, malformed, opening
from penstock.agents.environments.play import Play, Reply, Row
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import Message, ToolCall
from penstock.serving.target_policy import OwnServer


class OpenEnvPlay(Play):
    """One episode."""

    def __init__(self, seed: int, row: Row, options: OpenEnvOptions, sessions: Sessions) -> None:
        """Note the row; raises ValueError for one that lacks what `row_reset` names."""
        missing = [name for name in options.row_reset if name not in row.extra_info]
        if missing:
            raise ValueError(f"options.row_reset: its extra_info has no {', '.join(missing)}")
        self._seed, self._row, self._options, self._sessions = seed, row, options, sessions
        self._session: OpenEnvSession | None = None
        self._shown = ""

    async def start(self) -> tuple[Message, ...]:
        """Begin a session, and return its first observation behind the rules; raises OpenEnvFailed."""
        own = {name: self._row.extra_info[name] for name in self._options.row_reset}
        episode = secrets.token_hex(8)
        reset = {**self._options.reset, **own, "seed": self._seed % 2**32, "episode_id": episode}
        self._session, first = await self._sessions.open(reset)
        if first.get("done"):
            raise OpenEnvFailed("the episode is over after its reset")
        if self._options.tools:
            self.tools = await self._listed()
        self._shown = self._text(first)
        return opening(self._row, self._options, self._options.rules, self._shown)

    async def step(self, answer: Message) -> Reply:
        """Send the policy's action, or its calls of tools; raises OpenEnvFailed."""
        return await (self._called(answer) if self._options.tools else self._acted(answer))

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    async def _acted(self, answer: Message) -> Reply:
        action = find_action(answer.content, self._options)
        fields: Any = {self._options.action_field: action} if self._options.action_field else _object(action)
        if not action or fields is None:
            return malformed(self._options, f"The answer holds no action.\n{self._shown}", self._shown, {})
        try:
            result = await self._ask("step", {**self._options.action, **fields})
        except ActionRefused as err:
            return malformed(self._options, f"The answer is no action: {err}\n{self._shown}", self._shown, {})
        self._shown = self._text(result)
        reward = _reward(result)
        return (
            Reply(reward=reward, is_done=True) if result.get("done") else Reply((Message("user", self._shown),), reward)
        )

    async def _called(self, answer: Message) -> Reply:
        messages: list[Message] = []
        reward, errors = 0.0, 0
        for call in answer.tool_calls:
            text, result = await self._result(call)
            reward += _reward(result)
            errors += text.startswith("error: ")
            messages.append(Message("tool", text, tool_call_id=call.id, name=call.name))
            if result.get("done"):
                return Reply(
                    reward=reward,
                    is_done=True,
                    parts={"tool_calls": float(len(messages)), "tool_errors": float(errors)},
                )
        parts = {"tool_calls": float(len(messages)), "tool_errors": float(errors)}
        return Reply(tuple(messages), reward, is_done=not messages, parts=parts)

    async def _result(self, call: ToolCall) -> tuple[str, dict[str, Any]]:
        """Return the text of a call's result, and the server's answer."""
        arguments = _object(call.arguments or "{}")
        if arguments is None:
            return "error: the arguments are no JSON object", {}
        try:
            result = await self._ask("step", {"type": "call_tool", "tool_name": call.name, "arguments": arguments})
        except ActionRefused as err:
            return f"error: {err}", {}
        observation = result.get("observation")
        if not isinstance(observation, dict):
            raise OpenEnvFailed(f"a call is answered with {str(result)[:200]!r}")
        error = observation.get("error")
        if error:
            return f"error: {error.get('message', error) if isinstance(error, dict) else error}", result
        return _tool_text(observation.get("result")), result

    async def _listed(self) -> tuple[dict[str, Any], ...]:
        answer = await self._ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        tools = (answer.get("result") or {}).get("tools")
        if not isinstance(tools, list) or not tools:
            raise OpenEnvFailed(f"options.tools is true, and the environment lists no tools: {str(answer)[:300]}")
        return tuple(
            {
                "type": "function",
                "function": {
                    "name": one["name"],
                    "description": one.get("description") or "",
                    "parameters": one.get("inputSchema")
                    or one.get("input_schema")
                    or {"type": "object", "properties": {}},
                },
            }
            for one in tools
        )

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._session is not None
        return await self._session.ask(kind, data)

    def _text(self, result: Mapping[str, Any]) -> str:
        """Return the part of an observation that the policy reads; raises OpenEnvFailed if it is not there."""
        observation = result.get("observation")
        try:
            return text_of(_at(observation, self._options.observation))
        except (KeyError, IndexError, TypeError, ValueError):
            field = self._options.observation
            raise OpenEnvFailed(f"options.observation = {field!r} is not in {str(observation)[:300]}") from None


def _at(observation: Any, path: str) -> Any:
    """Return a field of an observation; for an empty path all of it but its metadata."""
    if not path and isinstance(observation, dict):
        return {name: one for name, one in observation.items() if name != "metadata"}
    for step in filter(None, path.split(".")):
        observation = observation[int(step)] if isinstance(observation, list) else observation[step]
    return observation


def _object(text: str) -> dict[str, Any] | None:
    """Return a JSON object; None for other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _reward(result: Mapping[str, Any]) -> float:
    """Return the reward of an answer, 0 where it has none; raises OpenEnvFailed for what is no number."""
    value = result.get("reward")
    if value is None:
        return 0.0
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise OpenEnvFailed(f"the reward is {str(value)[:100]!r}, expected a number")
    return float(value)


def _tool_text(result: Any) -> str:
    """Return the result of a tool as text: the text of its blocks, or the value as JSON."""
    blocks = result.get("content") if isinstance(result, dict) else None
    if isinstance(blocks, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in blocks):
        return "\n".join(one["text"] for one in blocks)
    return text_of(result)


class OpenEnv(TurnEnvironment):
    """The environment ``openenv``."""

    name = "openenv"
    options = OpenEnvOptions

    def __init__(self) -> None:
        """Start without servers."""
        super().__init__()
        self._own: tuple[OwnServer, ...] = ()
        self._sessions: Sessions | None = None

    def never_call(self, servers: Sequence[OwnServer]) -> None:
        """Note the run's own servers, which no URL may lead to."""
        self._own = tuple(servers)

    def use_model(self, folder: Path, context_tokens: int | None) -> None:
        """Note where the model is, and prepare the connections."""
        super().use_model(folder, context_tokens)
        if self.chosen is not None:
            self._sessions = Sessions(self.chosen, self._own)

    def play(self, seed: int, row: Row, options: OpenEnvOptions) -> OpenEnvPlay:
        """Return the play of one episode."""
        if self._sessions is None:
            raise ValueError(
                'openenv needs a server: write [environment.define.NAME] with type = "openenv" and options.url, and name that'
            )
        return OpenEnvPlay(seed, row, options, self._sessions)

    async def close(self) -> None:
        """Close the connections."""
        if self._sessions is not None:
            await self._sessions.close()


OPENENV = OpenEnv()
