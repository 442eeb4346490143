"""The token of a server, from a file that the run file names."""

from __future__ import annotations

from pathlib import Path

from penstock.protocol.errors import ConfigError


def read_token(file: Path, key: str) -> str:
    """Return the token of a file; raises ConfigError that names the setting ``key``, and never shows the token."""
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{key} {file}: not readable as ASCII ({type(err).__name__})") from None
    if not token or not token.isprintable() or " " in token:
        raise ConfigError(f"{key} {file}: expected one token without spaces")
    return token
