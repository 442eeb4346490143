"""One setting in words, as help texts and the documentation show it; pure, imports no pydantic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

REQUIRED = "required"
MADE_AT_START = "made when the service starts"
ANY_NAME = "NAME"  # stands for a key that the user chooses, as in reward.define.NAME


@dataclass(frozen=True, slots=True)
class SettingDescription:
    """One setting; every text but `key` and `description` may be empty."""

    key: str
    type: str
    default: str  # as TOML, what the default preset sets included, or REQUIRED, or MADE_AT_START
    allowed: str
    values: tuple[str, ...]  # all values, or the names of the built-in ones
    unit: str
    description: str
    services: tuple[str, ...]  # that read it
    presets: Mapping[str, str]  # its value, as TOML, in every preset that sets it
    secret: bool  # refused on the command line

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    def to_document(self) -> dict[str, Any]:
        return {**asdict(self), "values": list(self.values), "services": list(self.services)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> SettingDescription:
        tuples = {name: tuple(document[name]) for name in ("values", "services")}
        return cls(**{**document, **tuples})
