"""`tools`: the policy calls tools, reads what they answer, and ends with an answer that calls none.

The row's messages are the prompt; its ground truth is compared with the last answer where `answer` says so. Calls are found in the
answers by `answer_format`, outside the path of the tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from penstock.agents.environments.adapters.mcp_connection import LISTS_WITHIN_S
from penstock.agents.environments.adapters.mcp_sessions import McpSessions, McpTool, Reached, ServerTool, sweep
from penstock.agents.environments.episode_environment import PlayOptions, Site
from penstock.agents.environments.games.actions import find_action
from penstock.agents.environments.play import Play, Reply, Row, state_of, with_system_prompt
from penstock.agents.environments.tools.tool import TOOLS, Tool, ToolEpisode
from penstock.agents.environments.tools.toolbox import BAD_CALLS, Toolbox, ToolsOptions, is_right
from penstock.agents.environments.turn_environment import TurnEnvironment, check_reply_deadline
from penstock.agents.proxy.messages import Message, ToolCall, canonical_arguments
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError


class ToolsPlay(Play):
    def __init__(
        self, toolbox: Toolbox, options: ToolsOptions, max_turns: int, episode: ToolEpisode,
        servers: McpSessions | None = None,
    ) -> None:  # fmt: skip
        """``max_turns``: answers of the episode. ``servers``: its sessions with MCP servers, whose tools it has besides."""
        self._toolbox, self._options, self._max_turns, self._episode = toolbox, options, max_turns, episode
        self._servers = servers
        self._own: dict[str, Tool] = {}
        self._turn = 0
        self._num_calls = 0
        self._made: Counter[tuple[str, str]] = Counter()

    async def start(self) -> Sequence[Message]:
        await asyncio.to_thread(self._toolbox.prepare)
        if self._servers is not None:
            self._own = self._chosen_of(await self._servers.open())
        self.tools = (*self._toolbox.schemas(), *(tool.schema() for tool in self._own.values()))
        schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in self.tools)
        return with_system_prompt(self._episode.row.messages, self._options.system.replace("{tools}", schemas))

    async def close(self) -> None:
        if self._servers is not None:
            await self._servers.close()

    def _chosen_of(self, listed: Sequence[ServerTool]) -> dict[str, Tool]:
        server_tools: dict[str, Tool] = {}
        for server, chosen in self._options.servers.items():
            tools = {tool.name: McpTool(tool) for tool in listed if tool.server == server}
            missing = set(chosen.tools) - set(tools)
            if missing:
                raise ConfigError(
                    f"MCP server {server} does not have the tools {sorted(missing)} of options.servers.{server}.tools; it has "
                    f"{', '.join(sorted(tools)) or 'none'}"
                )
            for tool in (tools[name] for name in chosen.tools or tools):
                if tool.name in self._toolbox.tools or server_tools.setdefault(tool.name, tool) is not tool:
                    raise ConfigError(f"two tools are named {tool.name!r}; rename the MCP server in options.servers")
        return server_tools

    async def step(self, answer: Message) -> Reply:
        self._turn += 1
        if answer.tool_calls:
            return await self._called(answer)
        if answer.unparsed_calls:
            text = "error: the call cannot be read; write it as one JSON object with a name and arguments"
            return self._going_on((Message("user", text),), self._options.format_penalty, {"unparsed_calls": 1.0})
        if self._turn < self._options.min_turns:
            text = "Call a tool before you answer."
            return self._going_on((Message("user", text),), self._options.format_penalty, {"early_answers": 1.0})
        options = self._options
        text = find_action(answer.content, options)
        if not text:
            return Reply(reward=options.format_penalty, is_done=True, parts={"success": 0.0, "malformed": 1.0})
        if options.answer == "none":
            return Reply(is_done=True)
        success = float(is_right(text, self._episode.row.ground_truth, options.answer))
        return Reply(reward=success, is_done=True, parts={"success": success})

    async def _called(self, answer: Message) -> Reply:
        options = self._options
        allowed = max(0, min(options.max_parallel_calls, options.max_calls - self._num_calls))
        self._num_calls += min(len(answer.tool_calls), allowed)
        answers = await self._toolbox.answer(answer.tool_calls, allowed, self._episode, self._own)
        parts = {name: float(count) for name, count in answers.counts.items()}
        messages = answers.messages
        if answer.unparsed_calls:
            parts["unparsed_calls"] = float(answer.unparsed_calls)
            text = f"{messages[-1].content}\nerror: {answer.unparsed_calls} more calls cannot be read"
            messages = (*messages[:-1], Message("tool", text, tool_call_id=messages[-1].tool_call_id))
        is_bad = answer.unparsed_calls or any(answers.counts[name] for name in BAD_CALLS)
        reward = options.call_reward * len(answer.tool_calls) + (options.format_penalty if is_bad else 0.0)
        if self._is_repeated(answer.tool_calls):
            return Reply(reward=reward, is_done=True, parts={**parts, "repeated": 1.0})
        return self._going_on(messages, reward, parts)

    def _is_repeated(self, calls: Sequence[ToolCall]) -> bool:
        keys = [(call.name, canonical_arguments(call.arguments)) for call in calls]
        self._made.update(keys)
        return bool(self._options.repeat_limit) and max(self._made[key] for key in keys) >= self._options.repeat_limit

    def _going_on(self, messages: tuple[Message, ...], reward: float, parts: dict[str, float]) -> Reply:
        state = state_of(messages)  # without the note, which counts the turns
        if self._options.note:
            left = str(max(self._max_turns - self._turn, 0))
            note = self._options.note.replace("{turns_left}", left).replace("{turn}", str(self._turn + 1))
            last = messages[-1]
            noted = Message(last.role, f"{last.content}\n{note}", tool_call_id=last.tool_call_id)
            messages = (*messages[:-1], noted)
        return Reply(messages, reward, parts=parts, state=state)


class Tools(TurnEnvironment):
    name = "tools"
    version = "1"
    options = ToolsOptions

    def __init__(self) -> None:
        super().__init__()
        self._toolbox: Toolbox | None = None
        self._reached: Reached | None = None

    def defined(self, name: str, definition: EnvironmentDefinition) -> Self:
        made = super().defined(name, definition)
        chosen: ToolsOptions = made.chosen
        place = f"environment.define.{name}"
        check_reply_deadline(name, definition, chosen.call_deadline_s, LISTS_WITHIN_S if chosen.servers else 0.0)
        tools: dict[str, Tool] = {}
        for reference, tool_options in chosen.tools.items():
            tool = TOOLS.find(reference).value.with_options(tool_options, f"{place}.options.tools.{reference}")
            if tools.setdefault(tool.name, tool) is not tool:
                raise ConfigError(
                    f"{place}.options.tools: two tools are named {tool.name!r}; rename the one of {reference}"
                )
        made._toolbox = Toolbox(tools, chosen)
        return made

    def use_model(self, folder: Path, context_tokens: int | None) -> None:
        super().use_model(folder, context_tokens)
        if self._toolbox is not None:
            self._toolbox.prepare()
            self._reach()

    def play(self, seed: int, row: Row, options: PlayOptions) -> ToolsPlay:
        if self._toolbox is None:
            raise ValueError(self.needs_definition("options.tools"))
        row.asked()
        chosen: ToolsOptions = self.chosen  # the run file's alone: they have commands, which are run
        if chosen.answer != "none":
            is_right("", row.ground_truth, chosen.answer)  # a row without a ground truth is refused before it is played
        reached = self._reach()
        servers = None if reached is None else McpSessions(seed, chosen, reached)
        return ToolsPlay(self._toolbox, chosen, self.settings.max_turns, ToolEpisode(seed, row), servers)

    def _reach(self) -> Reached | None:
        if self._reached is None and self.chosen.servers:
            self._reached = Reached.of(self.chosen, self.own_servers)
        return self._reached

    def _prepare(self) -> Site:
        if self.chosen is not None and any(server.command for server in self.chosen.servers.values()):
            sweep()
        return super()._prepare()

    async def close(self) -> None:
        if self._toolbox is not None:
            await self._toolbox.close()


TOOLS_ENVIRONMENT = Tools()
