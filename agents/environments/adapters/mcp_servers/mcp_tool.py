"""A tool of an MCP server among the others of the environment `tools`, for one episode."""

from __future__ import annotations

import sys
from typing import Any

from pydantic import ConfigDict

from penstock.agents.environments.adapters.mcp_servers.connection import ServerFailed
from penstock.agents.environments.adapters.mcp_servers.sessions import ServerTool
from penstock.agents.environments.tools.tool import Tool, ToolArguments, ToolEpisode, ToolError, ToolUnavailable


class AnyArguments(ToolArguments):
    model_config = ConfigDict(extra="allow")


class McpTool(Tool):
    arguments = AnyArguments
    ends_calls = True  # whether the server still answers is found out then
    max_running = sys.maxsize  # each episode has a session of its own

    def __init__(self, of: ServerTool) -> None:
        super().__init__()
        self.name = f"{of.server}__{of.name}"
        self.description = of.described.description or ""
        self._of = of

    def schema(self) -> dict[str, Any]:
        return self._of.as_function(self.name)

    async def call(self, arguments: AnyArguments, episode: ToolEpisode) -> str:
        """Return what the server answers; raises ToolError, TimeoutError, and ToolUnavailable when the server has failed."""
        del episode  # the session is the episode's
        try:
            result = await self._of.connection.call(self._of.name, arguments.model_extra or {})
        except ServerFailed as err:
            raise ToolUnavailable(str(err)) from err
        if result.is_late:
            raise TimeoutError(result.text)
        if result.is_error:
            raise ToolError(result.text.removeprefix("error: "))
        return result.text
