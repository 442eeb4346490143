"""The base classes of a dialect, which builds request bodies and reads scores from responses; and our own. Pure.

A dialect is a frozen model whose fields are the options that a registration may give it: an unknown one is
refused at registration. To add one: a subclass and a `DialectKind` at the top level of a file here. Deadlines, retries,
signatures, the size limit of a response, and, after `Dialect.read`, checks of the number of scores, their range and the
declared parts are the client's.

Libraries whose reward is a Python function let it return a number, a bool, or a dict with a number and details, which
`score_of` reads as JSON. Every error names the place in the response.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from penstock.reward_service.endpoints.wire import (
    MAX_PARTS,
    GroupScore,
    GroupToScore,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from penstock.serving import strict_json

_MAX_PART_NAME = 64
_FIELDS = frozenset({*ScoreResponse.model_fields, *GroupScore.model_fields, *Score.model_fields})
Row = tuple[GroupToScore, str]  # a completion with its group


@dataclass(frozen=True, slots=True)
class Call:
    """The content of one HTTP request: the reward's name, an id shared by all its attempts, and the groups."""

    reward: str
    request_id: str
    groups: Sequence[GroupToScore]


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
    def request(self, call: Call) -> bytes:
        """Return the request body, which is JSON, for the call's groups."""

    @abstractmethod
    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        """Return the scores of every group of the call, in order; a score without a number carries its error.

        Raises BadAnswer when the response does not fit the dialect. Never invent a number here: what is
        missing is a `Score` with an ``error``.
        """


class CompletionDialect(Dialect):
    """A format in which a request carries one completion, and the answer its score."""

    carries: ClassVar[Literal["groups", "group", "completion"]] = "completion"

    @abstractmethod
    def body(self, group: GroupToScore, text: str, request_id: str) -> dict[str, Any]: ...

    @abstractmethod
    def score(self, value: JsonValue) -> Score: ...

    def request(self, call: Call) -> bytes:
        (group,) = call.groups
        (text,) = group.completions
        return json.dumps(self.body(group, text, call.request_id)).encode()

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        return [[self.score(parse(answer))]]


class ColumnsDialect(Dialect):
    """A format of lists with an item for each completion of any number of groups, and answers with lists of scores."""

    @abstractmethod
    def columns(self, rows: Sequence[Row]) -> dict[str, list[Any]]: ...

    @abstractmethod
    def scores(self, value: JsonValue, size: int) -> list[Score]: ...

    def request(self, call: Call) -> bytes:
        return json.dumps(self.columns(rows_of(call.groups))).encode()

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        scores = iter(self.scores(parse(answer), len(rows_of(call.groups))))
        return [[next(scores) for _ in group.completions] for group in call.groups]


@dataclass(frozen=True, slots=True)
class DialectKind:
    name: str
    options: type[Dialect]  # validates a registration's options


def rows_of(groups: Sequence[GroupToScore]) -> list[Row]:
    return [(group, text) for group in groups for text in group.completions]


def parse(answer: bytes) -> JsonValue:
    try:
        return strict_json.loads(answer, strict_json.MAX_DEPTH)
    except strict_json.AmbiguousJson as err:
        raise BadAnswer(f"answers with a body that cannot be read: {err}") from None


def member(value: JsonValue, key: str) -> tuple[JsonValue, Mapping[str, JsonValue]]:
    """Return the value under a key of an object, and the object."""
    if not isinstance(value, dict) or key not in value:
        raise BadAnswer(f"answers no object with {key!r}")
    return value[key], value


def number(value: object, where: str) -> float:
    if not isinstance(value, int | float):
        raise BadAnswer(f"answers {_kind(value)} at {where}, expected a number")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if not math.isfinite(score):
        raise BadAnswer(f"answers a number at {where} that is not finite, or too large")
    return score


def score_of(value: object, where: str, *, key: str = "score") -> Score:
    """Return the score from a number, null, or an object with it under ``key`` whose other numbers are parts.

    Null means "not scored". Raises BadAnswer for anything else.
    """
    others, place = {}, where
    if isinstance(value, Mapping):
        if key not in value:
            raise BadAnswer(f"answers an object without {key!r} at {where}; it has {len(value)} other keys")
        others = {name: item for name, item in value.items() if name != key}
        value, place = value[key], f"{where}.{key}"
    if value is None:
        return Score(error=f"answers {place} = null: the endpoint did not score this completion")
    return Score(score=number(value, place), parts=parts_of(others, where))


def scores_of(value: object, size: int, where: str) -> list[Score]:
    return [score_of(item, f"{where}[{place}]") for place, item in enumerate(list_of(value, size, where))]


def with_parts(score: Score, parts: object, where: str) -> Score:
    """Return a score with the numbers of an object as its parts; unchanged without a number, or for anything else."""
    if score.score is None or not isinstance(parts, dict):
        return score
    return score.model_copy(update={"parts": parts_of(parts, where)})


def parts_of(value: Mapping[str, Any], where: str) -> dict[str, float]:
    """Return the numbers of an object as parts, at most the first `MAX_PARTS`; texts and lists are ignored.

    Raises BadAnswer for a number that is not finite.
    """
    named = [(name, item) for name, item in value.items() if name and isinstance(item, int | float)]
    return {name[:_MAX_PART_NAME]: number(item, f"{where}.{name}") for name, item in named[:MAX_PARTS]}


def list_of(value: object, size: int, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise BadAnswer(f"answers {_kind(value)} at {where}, expected a list")
    if len(value) != size:
        raise BadAnswer(f"answers {len(value)} values at {where} for {size} completions")
    return value


def _kind(value: object) -> str:
    """Name the JSON type of a value without its content."""
    names: dict[type, str] = {
        str: "a text", bool: "true or false", type(None): "null", dict: "an object", list: "a list",
    }  # fmt: skip
    return names.get(type(value), "a number")


class PenstockDialect(Dialect):
    """`ScoreRequest` and `ScoreResponse` of `reward_service/endpoints/wire.py`; it has no options."""

    def request(self, call: Call) -> bytes:
        request = ScoreRequest(request_id=call.request_id, reward=call.reward, groups=list(call.groups))
        return request.model_dump_json().encode()

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        response = _response(answer)
        results = {result.group_id: result.scores for result in response.results}
        sent = [group.group_id for group in call.groups]
        if len(results) != len(response.results) or set(results) != set(sent):
            missing = [group_id for group_id in sent if group_id not in results]
            others = len(response.results) - len(sent) + len(missing)
            raise BadAnswer(
                f"answers for {len(response.results)} groups, {len(sent)} were sent; results are missing for "
                f"{', '.join(missing[:3]) or 'none'}, and {others} are for other groups or come twice"
            )
        return [results[group_id] for group_id in sent]


def _response(answer: bytes) -> ScoreResponse:
    """Validate an answer; the error names the first field that does not fit, never its content."""
    try:
        strict_json.loads(answer, strict_json.MAX_DEPTH)
        return ScoreResponse.model_validate_json(answer)
    except strict_json.AmbiguousJson as err:
        raise BadAnswer(f"does not answer as agreed: {err}") from None
    except ValidationError as err:
        first = err.errors(include_input=False, include_context=False)[0]
        place = ".".join(str(step) if isinstance(step, int) or step in _FIELDS else "*" for step in first["loc"])
        raise BadAnswer(f"does not answer as agreed: {place or 'body'}: {first['msg']}") from None


PENSTOCK = DialectKind("penstock", PenstockDialect)
