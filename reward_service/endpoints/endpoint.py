"""A registered endpoint (its address, its dialect, its limits), and who may change it: tokens, roles, owners.

Of dialects only the files of `dialects` are searched: a registration arrives over HTTP and must not name code to import.

| role | may |
|---|---|
| `read` | read endpoints, rewards and metrics |
| `register` | also score and test, and register, renew, drain and remove its own endpoints |
| `admin` | also change the endpoints of all owners |

A token is configured as it is, or as ``sha256:`` and the 64 hexadecimal digits of its SHA-256, so that the service's file lets
nobody in. A token has a name; endpoints belong to the name that registered them. Without any token (loopback only) every
process on this machine is admin, and secrets are refused: a process that takes over the name of an endpoint could
have its signed requests sent elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from penstock.protocol.extensions import Registry
from penstock.protocol.groups import Finite, first_problem
from penstock.reward_service.endpoints.dialects.dialect import Dialect, DialectKind
from penstock.reward_service.errors import NotAllowed
from penstock.serving.hosting import lease_key, server_id

DIALECTS = Registry(
    "dialect", DialectKind, package="penstock.reward_service.endpoints.dialects", group="penstock.dialects"
)
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
_MIN_CHARS = 16  # a shorter token can be guessed
_HASHED = "sha256:"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def known_dialect(name: str) -> str:
    if name not in DIALECTS.built_in:
        raise ValueError(f"unknown dialect {name!r}; known are {', '.join(DIALECTS.built_in)}")
    return name


def create_dialect(name: str, options: Mapping[str, JsonValue]) -> Dialect:
    return DIALECTS.built_in[name].options.model_validate(dict(options))


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
        None, gt=0, le=3600,
        description="Send a second request after this long without an answer, and take the first answer.",
    )  # fmt: skip
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
            raise ValueError(f"options of dialect {self.dialect}: {first_problem(err, '')}") from None
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
        return lease_key(self.name, self.address_id)

    def __hash__(self) -> int:
        return hash((self.name, self.version, self.url))


class Role(IntEnum):
    """What a caller may do; each role includes the lower ones."""

    READ = 1
    REGISTER = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Caller:
    name: str
    role: Role
    has_token: bool = True

    def check_owns(self, endpoint: Endpoint) -> None:
        if self.role is not Role.ADMIN and endpoint.owner != self.name:
            raise NotAllowed(
                f"endpoint {endpoint.name!r} belongs to {endpoint.owner!r}, your token is {self.name!r}; use its owner's token"
            )


ANONYMOUS = Caller("", Role.ADMIN, has_token=False)


class Access:
    def __init__(self, tokens: Sequence[tuple[str, Role, str]]) -> None:
        """``tokens``: name, role and token of each caller, or its hash; none: every caller is admin."""
        self._callers = [(_digest_of(token), Caller(name, role)) for name, role, token in tokens]

    @property
    def is_open(self) -> bool:
        return not self._callers

    def caller(self, token: str | None) -> Caller | None:
        """Return the caller with this token, compared in constant time; None for an unknown token."""
        if self.is_open:
            return ANONYMOUS
        digest, matched = _digest(token or ""), None
        for known_digest, caller in self._callers:
            if hmac.compare_digest(known_digest, digest):
                matched = caller
        return matched


def read_tokens(text: str) -> list[tuple[str, Role, str]]:
    """Read lines ``NAME ROLE TOKEN``; empty lines and those that begin with # are skipped.

    Raises ValueError with the number of the line, never its text.
    """
    tokens: list[tuple[str, Role, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3 or words[1].upper() not in Role.__members__ or not _NAME.fullmatch(words[0]):
            raise ValueError(f"line {number} is not NAME ROLE TOKEN, with a role of read, register or admin")
        if len(words[2]) < _MIN_CHARS:
            raise ValueError(f"line {number}: the token has fewer than {_MIN_CHARS} characters")
        if words[2].startswith(_HASHED) and not _DIGEST.fullmatch(words[2].removeprefix(_HASHED)):
            raise ValueError(f"line {number}: after {_HASHED} come 64 hexadecimal digits, as sha256sum prints them")
        if any(words[0] == name for name, _, _ in tokens):
            raise ValueError(f"line {number}: {words[0]} has a token already")
        tokens.append((words[0], Role[words[1].upper()], words[2]))
    return tokens


def hashed(token: str) -> str:
    return _HASHED + _digest(token).hex()


def _digest_of(token: str) -> bytes:
    """Return the digest of a token that was configured, as it is or hashed; what a caller sends is never taken for a hash."""
    digest = token.removeprefix(_HASHED)
    return bytes.fromhex(digest) if digest != token and _DIGEST.fullmatch(digest) else _digest(token)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
