"""A registered endpoint: its address, its dialect and its limits.

Of dialects only the files of `dialects` are searched: a registration arrives over HTTP and must not name code to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from penstock.protocol.extensions import Registry
from penstock.protocol.facts import Finite
from penstock.reward_service.endpoints.dialects.dialect import Dialect, DialectKind
from penstock.serving.lease import lease_key, server_id

DIALECTS = Registry(
    "dialect", DialectKind, package="penstock.reward_service.endpoints.dialects", group="penstock.dialects"
)


def known_dialect(name: str) -> str:
    if name not in DIALECTS.built_in:
        raise ValueError(f"unknown dialect {name!r}; known are {', '.join(DIALECTS.built_in)}")
    return name


def create_dialect(name: str, options: Mapping[str, JsonValue]) -> Dialect:
    return DIALECTS.built_in[name].options.model_validate(dict(options))


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"


class EndpointSpec(BaseModel):
    """A reward behind HTTP: its address, dialect and limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=NAME_PATTERN, description="Reward name that rows request.")
    version: str = Field("1", max_length=100, description="Recorded with the name in every scored group.")
    url: str = Field(max_length=2000, description="Where groups are posted to; http or https.")
    dialect: Annotated[str, AfterValidator(known_dialect)] = Field(
        "penstock",
        description="Format of its requests and answers.",
        json_schema_extra=lambda schema: schema.update(enum=list(DIALECTS.built_in)),
    )
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Options of the dialect.")
    timeout_s: float = Field(30.0, gt=0, le=3600, description="Deadline of one call, its tries included, in s.")
    retries: int = Field(3, ge=0, le=20, description="Further tries of a call after a connection failure, 429 or 5xx.")
    concurrency: int = Field(8, ge=1, le=1024, description="Concurrent calls of each replica.")
    batch_size: int = Field(16, ge=1, le=1024, description="Most groups in one call.")
    rate_per_s: float | None = Field(
        None, gt=0, le=1e6, description="Calls per second, for each replica; null: no limit."
    )
    hedge_after_s: float | None = Field(
        None,
        gt=0,
        le=3600,
        description="Send a second request after this long without an answer, and take the first answer.",
    )
    min_score: Finite = Field(-1e6, description="A lower score is an error.")
    max_score: Finite = Field(1e6, description="A higher score is an error.")
    data_sources: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(
        (), max_length=100, description="Data sets whose rows it scores when their reward is `auto`."
    )
    needs_ground_truth: bool = Field(False, description="A row without a ground truth is refused without a call.")
    returns_parts: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(
        (), max_length=32, description="Parts that every score must have; an answer without one of them is an error."
    )
    health_url: str | None = Field(
        None,
        max_length=2000,
        description="Requested with GET every few seconds; the endpoint is not called while this fails.",
    )
    lease_s: float | None = Field(
        None, ge=1, le=3600, description="Out of service when not renewed for this long; null: no lease."
    )
    owner: str = Field("", max_length=100, description="Name of the token that registered it.")

    @model_validator(mode="after")
    def _consistent(self) -> EndpointSpec:
        if self.min_score > self.max_score:
            raise ValueError(f"min_score {self.min_score} is above max_score {self.max_score}")
        try:
            create_dialect(self.dialect, self.options)
        except ValidationError as err:
            first = err.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"options of dialect {self.dialect}: {where}: {first['msg']}") from None
        return self


class Endpoint(EndpointSpec):
    secret_id: str = Field("", max_length=64, description="Changes with its secrets; empty when it has none.")

    @cached_property
    def speaker(self) -> Dialect:
        return create_dialect(self.dialect, self.options)

    @property
    def scorer(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def has_secrets(self) -> bool:
        """True when its requests are signed or carry an API key."""
        return bool(self.secret_id)

    @property
    def address_id(self) -> str:
        return server_id(self.version, self.url)

    @property
    def lease_key(self) -> str:
        """The key of its lease in the registry's bucket; another version or URL has another one."""
        return lease_key(self.name, self.address_id)

    def __hash__(self) -> int:
        return hash((self.name, self.version, self.url))
