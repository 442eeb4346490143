"""Options that several environments have: the URLs of their servers, the file of a token, and which addresses may be called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from penstock.protocol.errors import ConfigError, TargetRefused
from penstock.serving.target_policy import TargetPolicy

_MAX_URLS = 256


def called_url(url: str) -> str:
    try:
        TargetPolicy(()).check_url(url)
    except TargetRefused as err:
        raise ValueError(str(err)) from None
    return url


def checked_url(url: str) -> str:
    """Return the URL of a server without a slash at its end; raises ValueError for one that no worker calls, or with a query."""
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


def read_token(file: Path, key: str) -> str:
    """Return the token of a file; raises ConfigError that names the setting ``key``, and never shows the token."""
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{key} {file}: not readable as ASCII ({type(err).__name__})") from None
    if not token or not token.isprintable() or " " in token:
        raise ConfigError(f"{key} {file}: expected one token without spaces")
    return token
