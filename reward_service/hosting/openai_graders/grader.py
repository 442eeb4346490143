"""Graders in OpenAI's JSON form; a grader that cannot be evaluated here is refused, with the reason, when it is read.

Source of the models:  the graders guide and API reference at developers.openai.com, and the types of its SDKs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from penstock.protocol.errors import ConfigError
from penstock.reward_service.hosting.openai_graders import formula, variables

_REFUSED = {
    "python": "python graders run code, which Penstock does only in its sandbox, for the reward 'code'; "
    "serve the function yourself: penstock reward serve FILE.py",
    "label_model": "label_model graders are not evaluated here; ask score_model for 1 or 0",
    "endpoint": "register that URL as an endpoint of its own",
}


class _Grader(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    pass_threshold: float | None = None  # used by OpenAI's evals; the reward is the score itself


class _Compares(_Grader):
    input: str
    reference: str

    @model_validator(mode="after")
    def _known_variables(self) -> _Compares:
        for text in (self.input, self.reference):
            variables.check(text)
        return self


class StringCheck(_Compares):
    """1 or 0: equal, not equal, contains, contains without regard to case."""

    type: Literal["string_check"]
    operation: Literal["eq", "ne", "like", "ilike"]


class TextSimilarity(_Compares):
    """The similarity of two texts, 0 to 1."""

    type: Literal["text_similarity"]
    evaluation_metric: Literal["fuzzy_match", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"]


class Message(BaseModel):
    """One message to the grading model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    type: Literal["message"] = "message"

    @model_validator(mode="after")
    def _known_variables(self) -> Message:
        variables.check(self.content)
        return self


class Sampling(BaseModel):
    """Sampling parameters of the grading model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    max_completions_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning_effort: str | None = None


class ScoreModel(_Grader):
    """A score given by a language model."""

    type: Literal["score_model"]
    model: str = Field(min_length=1)
    input: list[Message] = Field(min_length=1)
    range: tuple[float, float] = (0.0, 1.0)
    sampling_params: Sampling = Sampling()

    @model_validator(mode="after")
    def _ordered(self) -> ScoreModel:
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range: {self.range[0]:g} must be below {self.range[1]:g}")
        return self


Single = Annotated[StringCheck | TextSimilarity | ScoreModel, Field(discriminator="type")]


class Multi(_Grader):
    """Several named graders and a formula over their scores."""

    type: Literal["multi"]
    graders: dict[str, Single] = Field(min_length=1, max_length=32)
    calculate_output: str = Field(max_length=2000)

    @model_validator(mode="after")
    def _computable(self) -> Multi:
        formula.check(self.calculate_output, self.graders)
        return self


Grader = StringCheck | TextSimilarity | ScoreModel | Multi
_GRADER: TypeAdapter[Grader] = TypeAdapter(Annotated[Grader, Field(discriminator="type")])


def load(file: Path) -> Grader:
    """Read a grader's JSON file; raises ConfigError naming the file and the field."""
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"{file}: not readable ({err.strerror})") from None
    except ValueError as err:
        raise ConfigError(f"{file}: not JSON: {err}") from None
    try:
        return read(given)
    except ValueError as err:
        raise ConfigError(f"{file}: {err}") from None


def read(given: Any) -> Grader:
    """Return a grader; raises ValueError naming the invalid field."""
    for where, kind in _kinds(given):
        if kind in _REFUSED:
            raise ValueError(f"{where}: {_REFUSED[kind]}")
    try:
        return _GRADER.validate_python(given)
    except ValidationError as err:
        wrong = [f"{'.'.join(map(str, one['loc'])) or 'the grader'}: {one['msg']}" for one in err.errors()]
        raise ValueError("; ".join(wrong[:5])) from None


def _kinds(given: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(given, dict):
        return
    yield "the grader", str(given.get("type"))
    inner = given.get("graders")
    for name, grader in inner.items() if isinstance(inner, dict) else ():
        if isinstance(grader, dict):
            yield f"graders.{name}", str(grader.get("type"))
