"""1 when the answer is JSON and fits a JSON schema.

The schema is in the run file (``schema_file`` or ``schema_text``) or is the row's ground truth. The answer is the last
fenced block, the last ``<answer>`` tags, or the whole completion (``where = "auto"``), without ``<think>``. It is validated in grader
processes with a CPU limit (`pattern_grader`): patterns inside a schema may take exponential time, references may be
cyclic, and neither may block the service. References to other documents are not fetched.

Part ``parses`` is 1 if the answer is JSON: NaN, Infinity and nesting deeper than Python's parser reads are not.
``timeout`` and ``too_long`` are as in `pattern`.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.math_answer import Grade
from penstock.reward_service.rewards.parsing import final_answer
from penstock.reward_service.rewards.pattern import MAX_CHARS, verdict_on
from penstock.reward_service.rewards.reward import GradedReward, Verdict

NAME = "json_schema"
_FENCE = "```"


class Parameters(Section):
    schema_file: Path | None = Field(default=None, description="File with the schema, read once at the start.")
    schema_text: str = Field(default="", description="The schema as JSON; without either: the row's ground truth.")
    where: Literal["auto", "fenced", "tags", "whole"] = Field(
        default="auto",
        description="Place of the JSON; auto: the last fenced block, else tags, else the whole completion.",
    )

    @model_validator(mode="after")
    def _readable(self) -> Parameters:
        if self.schema_file is not None and self.schema_text:
            raise ValueError("json_schema: set schema_file or schema_text, not both")
        schema = _loads(self.text) if self.text else {}
        if not isinstance(schema, dict):
            raise ValueError("json_schema: a schema is a JSON object")  # noqa: TRY004 pydantic wants a ValueError
        try:
            validator_for(schema, default=Draft202012Validator).check_schema(schema)
        except SchemaError as err:
            raise ValueError(f"json_schema: not a valid schema: {err.message[:200]}") from None
        return self

    @cached_property
    def text(self) -> str:
        """The schema from the run file, "" if there is none; raises ValueError when it cannot be read."""
        if self.schema_file is None:
            return self.schema_text
        try:
            return self.schema_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as err:
            raise ValueError(f"json_schema: schema_file {self.schema_file} cannot be read ({err})") from None


def rule(schema_text: str, truth: Any) -> str:
    """Return the schema for a grader process; raises BadGroundTruth when neither run file nor row has a schema."""
    try:
        schema = _loads(schema_text) if schema_text else _loads(truth) if isinstance(truth, str) else truth
    except ValueError as err:
        raise BadGroundTruth(f"{NAME}: the row's ground_truth is not JSON ({err})") from None
    if not isinstance(schema, dict):
        raise BadGroundTruth(f"{NAME} needs a schema: set schema_file, or put it into the row's ground_truth")
    return json.dumps({"json_schema": schema}, sort_keys=True)


async def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any, grade: Grade) -> list[Verdict]:
    wanted = rule(parameters.text, truth)
    return [await _verdict(find(text, parameters.where), wanted, grade) for text in completions]


def find(completion: str, where: str) -> str | None:
    text = final_answer.spoken(completion)
    fenced = _last_fenced(text) if where in {"auto", "fenced"} else None
    if where == "fenced" or fenced is not None:
        return fenced
    tagged = final_answer.in_tags(text) if where in {"auto", "tags"} else None
    return tagged if where == "tags" or tagged is not None else text.strip()


def parses(text: str) -> bool:
    try:
        _loads(text)
    except ValueError:
        return False
    return True


async def _verdict(answer: str | None, wanted: str, grade: Grade) -> Verdict:
    is_json = answer is not None and (len(answer) > MAX_CHARS or parses(answer))
    unreadable = f"{NAME}: not a valid JSON schema, or it has a reference that cannot be resolved: {wanted[:120]}"
    verdict = await verdict_on(answer if is_json else None, wanted, grade, unreadable)
    return Verdict(verdict.reward, {"parses": float(is_json and not verdict.parts["too_long"]), **verdict.parts})


def _last_fenced(text: str) -> str | None:
    end = text.rfind(_FENCE)
    start = text.rfind(_FENCE, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    head, line_end, body = text[start + len(_FENCE) : end].partition("\n")
    return body.strip() if line_end and head.strip().isalnum() else (head + line_end + body).strip()


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


REWARD = GradedReward(
    name=NAME,
    description="1 when the answer is strict JSON that fits a schema",
    judge=judge,
    reads="answer",
    parameters=Parameters,
    grader="pattern",
    parts=("parses", "timeout", "too_long"),
    notes="without a schema in the run file, the ground truth is the schema; references to other documents are not fetched; "
    "JSON that is nested too deeply for Python does not parse",
    success=1.0,
)
