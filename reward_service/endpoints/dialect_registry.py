"""The dialects by name.

Only the files of `dialects` are searched: a registration arrives over HTTP and must not name code to import.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from penstock.protocol.extensions import Registry
from penstock.reward_service.endpoints.dialects.dialect import Dialect, DialectKind

DIALECTS = Registry(
    "dialect", DialectKind, package="penstock.reward_service.endpoints.dialects", group="penstock.dialects"
)


def known_dialect(name: str) -> str:
    """Return the name; raises ValueError when no dialect has it."""
    if name not in DIALECTS.built_in:
        raise ValueError(f"unknown dialect {name!r}; known are {', '.join(DIALECTS.built_in)}")
    return name


def create_dialect(name: str, options: Mapping[str, JsonValue]) -> Dialect:
    """Return a dialect with its options; raises pydantic's ValidationError for options it does not know."""
    return DIALECTS.built_in[name].options.model_validate(dict(options))
