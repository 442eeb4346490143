"""Options of the environment `nemo_gym`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from penstock.agents.environments.episode_environment import PlayOptions
from penstock.agents.environments.server_urls import AllowedTargets, ServerUrls, urls_of
from penstock.agents.environments.tools.output_limit import Cut
from penstock.serving.target_policy import PRIVATE_TARGETS


class NemoGymOptions(PlayOptions):
    """Options of ``nemo_gym``."""

    url: ServerUrls = Field(
        min_length=1,
        description="URL of the resources server, or a list of the URLs of servers that play the same environment.",
    )
    token_file: Path | None = Field(
        None, description="File with a token that is sent to the URLs as `Authorization: Bearer`."
    )
    call_deadline_s: float = Field(
        30.0, gt=0, description="Seconds of one call; then the policy reads that it had no answer."
    )
    max_calls: int = Field(
        8,
        ge=1,
        le=256,
        description="Calls of one answer that are made, one after another; to the others an error is the answer. 1 for a row with parallel_tool_calls = false.",
    )
    max_output_chars: int = Field(
        8192, ge=1, le=1_000_000, description="Characters of an answer of a tool that the policy reads."
    )
    output_cut: Cut = Field("end", description="Where a longer answer is shortened: end, middle, start.")
    use_done_flag: bool = Field(
        False, description="An answer of a tool that is a JSON object with a true `done` ends the episode."
    )
    place_deadline_s: float = Field(
        50.0,
        gt=0,
        le=86_400,
        description="Seconds that an episode waits for a server that takes it; less than reply_deadline_s.",
    )
    max_message_bytes: int = Field(
        16 * 1024 * 1024,
        ge=1024,
        le=64 * 1024 * 1024,
        description="Longest answer of the server that is read; that of /verify holds the whole conversation again.",
    )
    allowed_targets: AllowedTargets = Field(
        PRIVATE_TARGETS,
        description="Networks (CIDR) and host names that may be called; loopback and private ranges unless given.",
    )

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs, without a slash at the end."""
        return urls_of(self.url)
