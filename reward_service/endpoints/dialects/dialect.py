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

from penstock.reward_service.endpoints.wire import GroupScore, GroupToScore, Score, ScoreResponse
from penstock.serving import strict_json

M = TypeVar("M", bound=BaseModel)
_FIELDS = frozenset({*ScoreResponse.model_fields, *GroupScore.model_fields, *Score.model_fields})


@dataclass(frozen=True, slots=True)
class Call:
    """The content of one HTTP request: the reward's name, an id shared by all its attempts, and the groups."""

    reward: str
    request_id: str
    groups: Sequence[GroupToScore]


@dataclass(frozen=True, slots=True)
class Payload:
    body: bytes
    content_type: str = "application/json"


class BadAnswer(ValueError):
    """The response does not fit the dialect; the text names the place, for the endpoint's author, and quotes nothing.

    Any server that this service reaches can be registered, and the text is shown to whoever may test it.
    """


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
    name: str
    options: type[Dialect]  # validates a registration's options


def read_json(model: type[M], answer: bytes) -> M:
    """Validate an answer as JSON; raises BadAnswer naming the first field that does not fit, never its content."""
    try:
        strict_json.loads(answer, strict_json.MAX_DEPTH)
        return model.model_validate_json(answer)
    except strict_json.AmbiguousJson as err:
        raise BadAnswer(f"does not answer as agreed: {err}") from None
    except ValidationError as err:
        first = err.errors(include_input=False, include_context=False)[0]
        place = ".".join(str(step) if isinstance(step, int) or step in _FIELDS else "*" for step in first["loc"])
        raise BadAnswer(f"does not answer as agreed: {place or 'body'}: {first['msg']}") from None
