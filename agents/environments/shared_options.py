"""What several environments share: options of servers, addresses, programs and calls; libraries that few need."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from penstock.agents.environments.episode_environment import PlayOptions
from penstock.protocol.config.connection import Section
from penstock.protocol.errors import ConfigError, TargetRefused
from penstock.serving.target_policy import PRIVATE_TARGETS, OwnServer, TargetPolicy

_MAX_URLS = 256
Cut = Literal["end", "middle", "start"]


def shortened(text: str, limit: int, cut: Cut) -> str:
    """Return a text of at most ``limit`` characters and one mark, which says how many were left out at its ``cut``."""
    over = len(text) - limit
    if over <= 0:
        return text
    mark = f"[{over} characters left out]"
    if cut == "end":
        return f"{text[:limit]}\n{mark}"
    if cut == "start":
        return f"{mark}\n{text[over:]}"
    head = (limit + 1) // 2
    return f"{text[:head]}\n{mark}\n{text[len(text) - (limit - head) :]}"


def called_url(url: str) -> str:
    try:
        TargetPolicy(()).check_url(url)
    except TargetRefused as err:
        raise ValueError(str(err)) from None
    return url


def checked_url(url: str) -> str:
    """Return the URL of a server without a slash at its end; raises ValueError for one not called, or with a query."""
    if "?" in called_url(url):
        raise ValueError(f"{url!a}: a server's URL has no ?query")
    return url.rstrip("/")


def urls_of(url: str | list[str]) -> tuple[str, ...]:
    return tuple(checked_url(server_url) for server_url in ([url] if isinstance(url, str) else url))


def _are_different(url: str | list[str]) -> str | list[str]:
    urls = urls_of(url)
    if len(urls) > _MAX_URLS or len(set(urls)) != len(urls):
        raise ValueError(f"expected 1 to {_MAX_URLS} different URLs, got {len(urls)}")
    return url


def _are_targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    TargetPolicy(targets)
    return targets


# an environment that has no other way to its servers refuses an empty list
ServerUrls = Annotated[str | list[str], AfterValidator(_are_different)]
AllowedTargets = Annotated[tuple[str, ...], AfterValidator(_are_targets)]


class TargetOptions(PlayOptions):
    """Which addresses an environment may call."""

    allowed_targets: AllowedTargets = Field(
        PRIVATE_TARGETS,
        description="Networks (CIDR) and host names of servers that may be called; loopback and private ranges unless "
        "given. Link-local and metadata addresses are always refused.",
    )

    def policy(self, own_servers: Sequence[OwnServer]) -> TargetPolicy:
        return TargetPolicy(self.allowed_targets, own_servers, key="options.allowed_targets")


class SessionOptions(TargetOptions):
    """Servers of which each plays an episode in a session of its own."""

    url: ServerUrls = Field(
        min_length=1,
        description="URL of the server, without a path of its protocol, or a list of URLs that play the same "
        "environment.",
    )
    place_deadline_s: float = Field(
        50.0, gt=0, le=86_400,
        description="Seconds that an episode waits for a server that takes it; less than reply_deadline_s.",
    )  # fmt: skip


class CallOptions(PlayOptions):
    """What a call of a server's tool may take, and how much of its answer the policy reads."""

    call_deadline_s: float = Field(
        30.0, gt=0, description="Seconds of one call; then the policy reads that it had no answer."
    )
    max_output_chars: int = Field(
        8192, ge=1, le=1_000_000, description="Characters of an answer of a tool that the policy reads."
    )
    output_cut: Cut = Field("end", description="Where a longer answer is shortened: end, middle, start.")

    def shortened(self, text: str) -> str:
        return shortened(text, self.max_output_chars, self.output_cut)


class ProcessOptions(Section):
    """A process that an environment starts."""

    folder: str = Field(".", description="Where it starts, relative to the worker's working folder.")
    variables: dict[str, str] = Field(default_factory=dict, description="Its environment variables.")
    pass_variables: list[str] = Field(
        default_factory=list, description="Variables of the worker that it gets too; without them PATH, HOME and LANG."
    )


def optional_library(name: str, install: str) -> Any:
    """Return a module that only some workers need; raises ConfigError, which says what pip has to ``install``."""
    try:
        return importlib.import_module(name)
    except ImportError as err:
        raise ConfigError(f"{name} is not installed ({err}); run: pip install {install}") from None


def read_token(file: Path, key: str) -> str:
    """Return the token of a file; raises ConfigError that names the setting ``key``, and never shows the token."""
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{key} {file}: not readable as ASCII ({type(err).__name__})") from None
    if not token or not token.isprintable() or " " in token:
        raise ConfigError(f"{key} {file}: expected one token without spaces")
    return token
