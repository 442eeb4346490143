"""The dialects by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import JsonValue

from reward_service.dialects.dialect import Dialect
from reward_service.dialects.penstock import PenstockDialect


class DialectName(StrEnum):
    """How an endpoint wants to be asked."""

    PENSTOCK = "penstock"


_DIALECTS: dict[DialectName, type[Dialect]] = {
    DialectName.PENSTOCK: PenstockDialect,
}


def speak(name: DialectName, options: Mapping[str, JsonValue]) -> Dialect:
    """Return a dialect with its options; raises pydantic's ValidationError for options it does not know."""
    return _DIALECTS[name].model_validate(dict(options))
