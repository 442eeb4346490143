"""The rewards that come with the service, by name: what each does, what may be set of it, how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from penstock.protocol.config.connection import Section
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.registry.scorers import CodeReward, GradedReward, Judge, LengthReward, PureReward
from penstock.reward_service.rewards import (
    answer_line,
    choice,
    classification,
    code,
    exact_match,
    format,
    gsm8k,
    json_schema,
    length,
    math_answer,
    numeric,
    pattern,
    question_answer,
    repetition,
    tags,
)
from penstock.reward_service.rewards.parsing import latex
from penstock.reward_service.scores import Scorer


@dataclass(frozen=True, slots=True)
class Graders:
    """What rewards are made with; ``programs`` is None where no sandbox holds."""

    math: GraderPool
    patterns: GraderPool
    programs: CodeReward | None


class NoParameters(Section):
    """Nothing may be set."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """One built-in reward. ``make`` returns None where this machine cannot give it."""

    description: str
    make: Callable[[Any, Graders], Scorer | None]
    parameters: type[Section] = NoParameters

    @property
    def default(self) -> Section | None:
        """The parameters when none are given; None for a reward that can only be asked for through a definition."""
        try:
            return self.parameters()
        except ValidationError:
            return None


def _plain(name: str, judge: Judge, description: str) -> BuiltIn:
    return BuiltIn(description, lambda _, __: PureReward(name, judge))


def _set(name: str, judge: Callable[..., Any], parameters: type[Section], description: str) -> BuiltIn:
    return BuiltIn(description, lambda given, _: PureReward(name, partial(judge, given)), parameters)


def _answering(name: str, judge: Callable[..., Any], description: str) -> BuiltIn:
    return BuiltIn(
        description,
        lambda given, _: PureReward(name, partial(judge, parameters=given)),
        question_answer.Parameters,
    )


def _measured(name: str, judge: Callable[..., Any], parameters: type[Section], description: str) -> BuiltIn:
    return BuiltIn(description, lambda given, _: LengthReward(name, given.unit, partial(judge, given)), parameters)


def _math(name: str, find: math_answer.Find, part: str, description: str) -> BuiltIn:
    return BuiltIn(
        description,
        lambda _, graders: GradedReward(
            name, partial(math_answer.judge, grade=graders.math.equal, find=find, part=part)
        ),
    )


def _regex(given: pattern.Parameters, graders: Graders) -> Scorer:
    return GradedReward(pattern.NAME, partial(pattern.judge, given, grade=graders.patterns.equal))


def _json_schema(given: json_schema.Parameters, graders: Graders) -> Scorer:
    judge = partial(json_schema.judge, given.where, given.text(), grade=graders.patterns.equal)
    return GradedReward(json_schema.NAME, judge)


BUILT_INS: dict[str, BuiltIn] = {
    code.NAME: BuiltIn(
        "the share of the row's tests that the completion's Python program passes, in a sandbox",
        lambda _, graders: graders.programs,
    ),
    exact_match.NAME: _plain(
        exact_match.NAME,
        exact_match.judge,
        "1 when the completion is the ground truth, white space around it aside",
    ),
    format.NAME: _plain(
        format.NAME,
        format.judge,
        "1 when the completion is <think>...</think> then <answer>...</answer> and nothing else",
    ),
    format.THINK: _plain(
        format.THINK, format.judge_think, "1 when the completion begins with its only <think> and closes it"
    ),
    tags.NAME: _set(
        tags.NAME, tags.judge, tags.Parameters, "1 when the completion is the given tags in order and nothing else"
    ),
    gsm8k.NAME: _plain(gsm8k.NAME, gsm8k.judge, "1 when the number after the last #### is the ground truth's number"),
    gsm8k.FLEXIBLE: _plain(
        gsm8k.FLEXIBLE,
        gsm8k.judge_flexible,
        "1 when the last number, wherever it stands, is the ground truth's number",
    ),
    numeric.NAME: _set(
        numeric.NAME,
        numeric.judge,
        numeric.Parameters,
        "1 when the answer is the ground truth's number, within a tolerance, its unit as asked",
    ),
    math_answer.NAME: _math(
        math_answer.NAME,
        latex.last_boxed,
        "boxed",
        "1 when the last \\boxed{} equals the ground truth, by value (math-verify in processes of its own)",
    ),
    math_answer.FLEXIBLE: _math(
        math_answer.FLEXIBLE,
        math_answer.anywhere,
        "has_answer",
        "the same of an answer that is boxed, in tags, after ####, after 'the answer is', or the last number",
    ),
    answer_line.NAME: _math(
        answer_line.NAME,
        answer_line.last_answer,
        "has_answer",
        "the same of the last 'Answer: ...' line; without one, of the last \\boxed{}",
    ),
    choice.NAME: _set(choice.NAME, choice.judge, choice.Parameters, "1 when the letter chosen is the ground truth's"),
    classification.NAME: _set(
        classification.NAME,
        classification.judge,
        classification.Parameters,
        "1 when the label is the ground truth's; several labels are none",
    ),
    question_answer.EXACT: _answering(
        question_answer.EXACT,
        question_answer.judge_exact,
        "1 when the answer in the last <answer> tags is an accepted one, word for word",
    ),
    question_answer.INSIDE: _answering(
        question_answer.INSIDE,
        question_answer.judge_inside,
        "1 when an accepted answer is inside the last <answer> tags",
    ),
    question_answer.F1: _answering(
        question_answer.F1,
        question_answer.judge_f1,
        "how many words the answer in the last <answer> tags shares with an accepted one (F1)",
    ),
    pattern.NAME: BuiltIn(
        "1 when a regular expression matches (in processes of its own)",
        _regex,
        pattern.Parameters,
    ),
    json_schema.NAME: BuiltIn(
        "1 when the answer is JSON that fits a schema (in processes of its own)",
        _json_schema,
        json_schema.Parameters,
    ),
    length.NAME: _measured(
        length.NAME, length.judge, length.Parameters, "1 when the completion's length is inside the bounds"
    ),
    length.OVERLONG: _measured(
        length.OVERLONG,
        length.judge_overlong,
        length.OverlongParameters,
        "DAPO's soft punishment of completions that come close to a length, in [-factor, 0]",
    ),
    repetition.NAME: _set(
        repetition.NAME,
        repetition.judge,
        repetition.Parameters,
        "a punishment for the share of n-grams that repeat, in (factor, 0]",
    ),
}


def scorers(graders: Graders) -> dict[str, Scorer]:
    """Return every built-in reward that needs no parameters and that this machine can give, by its name."""
    defaults = {name: one.default for name, one in BUILT_INS.items()}
    made = {name: BUILT_INS[name].make(given, graders) for name, given in defaults.items() if given is not None}
    return {name: scorer for name, scorer in made.items() if scorer is not None}
