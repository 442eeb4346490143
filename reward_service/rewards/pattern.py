"""1 when a regular expression matches somewhere in the answer, or matches all of it.

The expression is in the run file (``pattern``) or is the row's ground truth. Python's expressions may take
exponential time on a text that a policy chose, so they run in grader processes with a CPU limit (`pattern_grader`):
a completion that exhausts it twice counts as no match (part ``timeout``), because it alone is the cause. Answers
longer than `MAX_CHARS` do not match either (part ``too_long``).

`json_schema`: 1 when the answer is JSON and fits a JSON schema, which is in the run file (``schema_file`` or ``schema_text``) or is
the row's ground truth. The answer is the last fenced block, the last ``<answer>`` tags, or the whole completion
(``where = "auto"``). It is validated in grader processes too: patterns inside a schema may take exponential time, references may be
cyclic, and neither may block the service. References to other documents are not fetched.

Part ``parses`` is 1 if the answer is JSON: NaN, Infinity and nesting deeper than Python's parser reads are not.
``timeout`` and ``too_long`` are as above.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from pydantic import Field, field_validator, model_validator

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.math_answer import Grade, Graded
from penstock.reward_service.rewards.parsing import final_answer
from penstock.reward_service.rewards.parsing.final_answer import Where
from penstock.reward_service.rewards.reward import GradedReward, Verdict, truth_text

NAME = "regex"
MAX_CHARS = 200_000
MAX_PATTERN_CHARS = 10_000


class Parameters(Section):
    pattern: str = Field(
        default="",
        max_length=MAX_PATTERN_CHARS,
        description="Regular expression of Python's re; none: the row's ground truth.",
    )
    match: Literal["search", "whole"] = Field(
        default="search", description="Match anywhere in the answer (search), or all of it (whole)."
    )
    where: Where = Field(default="whole", description="Place of the answer; whole: the completion.")
    ignore_case: bool = Field(default=False, description="Ignore case.")
    multiline: bool = Field(default=False, description="^ and $ match at every line.")
    dot_all: bool = Field(default=False, description="The dot matches newlines too.")

    @field_validator("pattern")
    @classmethod
    def _is_expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as err:
            raise ValueError(f"not a regular expression of Python's re: {err}") from None
        return value


def rule(parameters: Parameters, truth: Any) -> str:
    text = parameters.pattern or truth_text(truth, NAME)
    if not text or len(text) > MAX_PATTERN_CHARS:
        raise BadGroundTruth(
            f"{NAME} needs an expression of 1 to {MAX_PATTERN_CHARS} characters: set the parameter pattern, or put it "
            f"into the row's ground_truth, which is {text[:80]!r}"
        )
    flags = {"i": parameters.ignore_case, "m": parameters.multiline, "s": parameters.dot_all}
    letters = "".join(letter for letter, is_on in flags.items() if is_on)
    return json.dumps({"regex": text, "flags": letters, "whole": parameters.match == "whole"})


async def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any, grade: Grade) -> list[Verdict]:
    wanted = rule(parameters, truth)
    unreadable = f"{NAME}: not a regular expression of Python's re: {json.loads(wanted)['regex'][:80]!r}"
    return [
        await verdict_on(final_answer.find(text, parameters.where), wanted, grade, unreadable) for text in completions
    ]


async def verdict_on(answer: str | None, wanted: str, grade: Grade, unreadable: str) -> Verdict:
    """Return the verdict of a grader process; raises BadGroundTruth with a text for what it cannot read as a rule."""
    if answer is None or len(answer) > MAX_CHARS:
        return Verdict(0.0, {"timeout": 0.0, "too_long": float(answer is not None)})
    graded = await grade(wanted, answer)
    if graded is Graded.GOLD_UNREADABLE:
        raise BadGroundTruth(unreadable)
    return Verdict(float(graded is Graded.RIGHT), {"timeout": float(graded is Graded.EXHAUSTED), "too_long": 0.0})


REWARD = GradedReward(
    name=NAME,
    description="1 when a regular expression of Python's `re` matches",
    judge=judge,
    parameters=Parameters,
    grader="pattern",
    parts=("timeout", "too_long"),
    notes=f"without `pattern` the ground truth is the expression; an answer longer than {MAX_CHARS} characters is wrong",
    success=1.0,
)


SCHEMA = "json_schema"
_FENCE = "```"


class SchemaParameters(Section):
    schema_file: Path | None = Field(default=None, description="File with the schema, read once at the start.")
    schema_text: str = Field(default="", description="The schema as JSON; without either: the row's ground truth.")
    where: Literal["auto", "fenced", "tags", "whole"] = Field(
        default="auto",
        description="Place of the JSON; auto: the last fenced block, else tags, else the whole completion.",
    )

    @model_validator(mode="after")
    def _readable(self) -> SchemaParameters:
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


def schema_rule(schema_text: str, truth: Any) -> str:
    """Return the schema for a grader process; raises BadGroundTruth when neither run file nor row has a schema."""
    try:
        schema = _loads(schema_text) if schema_text else _loads(truth) if isinstance(truth, str) else truth
    except ValueError as err:
        raise BadGroundTruth(f"{SCHEMA}: the row's ground_truth is not JSON ({err})") from None
    if not isinstance(schema, dict):
        raise BadGroundTruth(f"{SCHEMA} needs a schema: set schema_file, or put it into the row's ground_truth")
    return json.dumps({"json_schema": schema}, sort_keys=True)


async def judge_schema(
    parameters: SchemaParameters, completions: tuple[str, ...], truth: Any, grade: Grade
) -> list[Verdict]:
    wanted = schema_rule(parameters.text, truth)
    return [await _schema_verdict(find(text, parameters.where), wanted, grade) for text in completions]


def find(text: str, where: str) -> str | None:
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


async def _schema_verdict(answer: str | None, wanted: str, grade: Grade) -> Verdict:
    is_json = answer is not None and (len(answer) > MAX_CHARS or parses(answer))
    unreadable = f"{SCHEMA}: not a valid JSON schema, or it has a reference that cannot be resolved: {wanted[:120]}"
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


SCHEMA_REWARD = GradedReward(
    name=SCHEMA,
    description="1 when the answer is strict JSON that fits a schema",
    judge=judge_schema,
    parameters=SchemaParameters,
    grader="pattern",
    parts=("parses", "timeout", "too_long"),
    notes="without a schema in the run file, the ground truth is the schema; references to other documents are not fetched; "
    "JSON that is nested too deeply for Python does not parse",
    success=1.0,
)
