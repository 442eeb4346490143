"""Options of the environment `mcp`, and those of MCP servers that `tools` has too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from penstock.agents.environments.adapters.mcp_servers.connection import Mode
from penstock.agents.environments.episode_environment import PlayOptions
from penstock.agents.environments.server_urls import AllowedTargets, called_url
from penstock.agents.environments.tools.output_limit import Cut
from penstock.protocol.config.connection import Section
from penstock.serving.target_policy import PRIVATE_TARGETS


class McpServer(Section):
    """One MCP server: a command or a URL."""

    command: list[str] = Field(
        default_factory=list,
        description="Program and arguments of a server that talks over standard input and output; run for each episode.",
    )
    folder: str = Field(".", description="Where it starts, relative to the worker's working folder.")
    variables: dict[str, str] = Field(default_factory=dict, description="Its environment variables.")
    pass_variables: list[str] = Field(default_factory=list, description="Variables of the worker that it gets too.")
    url: str = Field("", description="URL of a server that talks streamable HTTP; one session for each episode.")
    token_file: Path | None = Field(
        None, description="File with a token that is sent to the URL as `Authorization: Bearer`."
    )
    protocol: Mode = Field(
        "session",
        description="session: one that begins with initialize, and keeps state. auto: the newest that the server knows, which may keep none.",
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if bool(self.command) == bool(self.url):
            raise ValueError("write either command or url")
        if self.url:
            called_url(self.url)
        elif self.token_file is not None:
            raise ValueError("token_file is for a url; give a command its token with variables or pass_variables")
        return self


def _named(name: str) -> str:
    """Return a server's name; raises ValueError for one of which SERVER__TOOL would not be a name."""
    if not name.isidentifier() or "__" in name:
        raise ValueError(f"{name!r}: a server's name is made of letters, digits and single underscores")
    return name


ServerName = Annotated[str, AfterValidator(_named)]


class ServerLimits(PlayOptions):
    """What an environment with MCP servers reads of them, and where it may call them."""

    max_message_bytes: int = Field(
        16 * 1024 * 1024,
        ge=65_536,
        description="Longest message of an MCP server that is read; one that sends a longer one has failed.",
    )
    allowed_targets: AllowedTargets = Field(
        PRIVATE_TARGETS,
        description="Networks (CIDR) and host names of URLs that may be called; loopback and private ranges unless given.",
    )


class McpOptions(ServerLimits):
    """Servers, and what the policy may do with them."""

    servers: dict[ServerName, McpServer] = Field(
        min_length=1,
        max_length=16,
        description="Servers by name: command, folder, variables and pass_variables, or url, token_file and protocol. With more than one, a tool's name is SERVER__TOOL.",
    )
    tools: list[str] = Field(
        default_factory=list, description="The tools that the policy may call; empty: all but reward_tool."
    )
    reward_tool: str = Field(
        "",
        description='A tool that the policy cannot call: called at the end with what its schema has of answer and ground_truth; it returns a number, or {"reward": NUMBER}.',
    )
    call_deadline_s: float = Field(
        30.0, gt=0, description="Seconds of one call; then the policy reads that it had no answer."
    )
    max_parallel_calls: int = Field(
        8,
        ge=1,
        le=256,
        description="Calls of one answer that are made, all at once; to the others an error is the answer.",
    )
    max_output_chars: int = Field(
        8192, ge=1, le=1_000_000, description="Characters of an answer of a tool that the policy reads."
    )
    output_cut: Cut = Field("end", description="Where a longer answer is shortened: end, middle, start.")

    @model_validator(mode="after")
    def _hides_the_reward(self) -> Self:
        if self.reward_tool and self.reward_tool in self.tools:
            raise ValueError(
                f"reward_tool {self.reward_tool!r} is one of tools, which the policy calls; leave it out there"
            )
        return self
