"""The base class of a dialect: build a request body from groups, and read scores from the response. Pure.

A dialect is a frozen model whose fields are the options a registration may give it (``options``), so
that an unknown option is refused at registration. To add one: a file here with a subclass and a `DialectKind`
at its top level. Everything else is the client's: deadlines, retries, signatures, the size limit of a
response, and, after `Dialect.read`, checks of the number of scores, their range and the declared parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.reward_service.endpoints.wire import GroupToScore, Score

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Call:
    """The content of one HTTP request: the reward's name, an id shared by all its attempts, and the groups."""

    reward: str
    request_id: str
    groups: Sequence[GroupToScore]


@dataclass(frozen=True, slots=True)
class Payload:
    """The body of a POST and its content type."""

    body: bytes
    content_type: str = "application/json"


class BadAnswer(ValueError):
    """The response does not fit the dialect; the text names the place, for the endpoint's author."""


class Dialect(BaseModel, ABC):
    """One request and response format. Subclasses add their options as fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    carries: ClassVar[Literal["groups", "group", "completion"]] = "groups"
    """The unit of one request: any number of groups, one group, or one completion.

    The client splits accordingly: with ``completion`` every call has one group with one completion,
    and the scores are joined to their groups afterwards.
    """

    @abstractmethod
    def request(self, call: Call) -> Payload:
        """Return the request body for the call's groups."""

    @abstractmethod
    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        """Return the scores of every group of the call, in order; a score without a number carries its error.

        Raises BadAnswer when the response does not fit the dialect. Never invent a number here: what is
        missing is a `Score` with an ``error``.
        """


@dataclass(frozen=True, slots=True)
class DialectKind:
    """A dialect and the name that registrations use for it."""

    name: str
    options: type[Dialect]  # validates a registration's options


def read_json(model: type[M], answer: bytes) -> M:
    """Validate an answer as JSON; raises BadAnswer naming the first field that does not fit."""
    try:
        return model.model_validate_json(answer)
    except ValidationError as err:
        first = err.errors()[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise BadAnswer(f"does not answer as agreed: {where}: {first['msg']}") from None
