"""A registered endpoint: where it is, how it wants to be asked, and what may be asked of it."""

from __future__ import annotations

from functools import cached_property

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from protocol.facts import Finite
from reward_service.dialects.dialect import Dialect
from reward_service.dialects.spoken import DialectName, speak

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"


class Endpoint(BaseModel):
    """A reward by HTTP: where it is, and how it wants to be called."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=NAME_PATTERN, description="The reward name that tasks ask for.")
    url: str = Field(max_length=2000, description="Where groups are posted to; http or https.")
    dialect: DialectName = Field(DialectName.PENSTOCK, description="How it wants to be asked.")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="What its dialect may be told.")
    timeout_s: float = Field(30.0, gt=0, le=3600, description="Longest one call may take, in seconds.")
    concurrency: int = Field(8, ge=1, le=1024, description="Calls of one replica under way at the same time.")
    batch_size: int = Field(16, ge=1, le=1024, description="Groups in one call.")
    version: str = Field("1", max_length=100, description="What the scored groups say about who scored them.")
    min_score: Finite = Field(-1e6, description="A score below is nonsense, and an error.")
    max_score: Finite = Field(1e6, description="A score above is nonsense, and an error.")

    @model_validator(mode="after")
    def _range(self) -> Endpoint:
        if self.min_score > self.max_score:
            raise ValueError(f"min_score {self.min_score} is above max_score {self.max_score}")
        try:
            speak(self.dialect, self.options)
        except ValidationError as err:
            first = err.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"options of dialect {self.dialect}: {where}: {first['msg']}") from None
        return self

    def __hash__(self) -> int:
        return hash((self.name, self.version, self.url))

    @cached_property
    def speaker(self) -> Dialect:
        """Its dialect, with its options."""
        return speak(self.dialect, self.options)

    @property
    def scorer(self) -> str:
        """How scored groups name this endpoint."""
        return f"{self.name}@{self.version}"
