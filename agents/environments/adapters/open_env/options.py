"""Options of the environment `openenv`."""

from __future__ import annotations

from pydantic import Field, JsonValue

from penstock.agents.environments.games.actions import ActionOptions
from penstock.agents.environments.server_urls import AllowedTargets, ServerUrls, urls_of
from penstock.serving.target_policy import PRIVATE_TARGETS


class OpenEnvOptions(ActionOptions):
    """Options of ``openenv``."""

    url: ServerUrls = Field(
        min_length=1, description="URL of the server, without /ws, or a list of URLs that play the same environment."
    )
    reset: dict[str, JsonValue] = Field(
        default_factory=dict, description="Arguments of reset besides seed and episode_id."
    )
    row_reset: list[str] = Field(
        default_factory=list, description="Arguments of reset that are taken from the row's extra_info."
    )
    rules: str = Field(
        "", description='What stands before the first observation; instructions = "row" takes the row\'s prompt.'
    )
    observation: str = Field(
        "",
        description="The field of the observation that the policy reads, such as `prompt` or `messages.-1.content`; empty: all of it as JSON.",
    )
    action: dict[str, JsonValue] = Field(default_factory=dict, description="Fields of every action.")
    action_field: str = Field(
        "message",
        description="The field of the action that gets the policy's action; empty: the policy writes all fields, as a JSON object.",
    )
    tools: bool = Field(
        False,
        description="The environment has tools: the policy calls them, and an answer without a call ends the episode.",
    )
    place_deadline_s: float = Field(
        50.0,
        gt=0,
        le=86_400,
        description="Seconds that an episode waits for a free session; less than reply_deadline_s.",
    )
    max_message_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, le=64 * 1024 * 1024, description="Longest message of the server that is read."
    )
    allowed_targets: AllowedTargets = Field(
        PRIVATE_TARGETS,
        description="Networks (CIDR) and host names that may be called; loopback and private ranges unless given.",
    )

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs, without a slash at the end."""
        return urls_of(self.url)
