"""Graders in OpenAI's JSON form; a grader that cannot be evaluated here is refused, with the reason, when it is read.

Source of the models: the graders guide and API reference at developers.openai.com, and the types of its SDKs.

Its texts have variables, ``{{ item.answer }}`` and ``{{ sample.output_text }}``. ``calculate_output`` is arithmetic over the scores of
named graders, and nothing else is evaluated.

If a grader reads ``sample.output_json`` and the answer is not JSON or lacks the key, the policy caused it: that grader
gives its lowest score, with the part ``sample_unfit`` = 1. Every other failure is an error.

Of the similarities of two texts, ``fuzzy_match`` is rapidfuzz's ratio (OpenAI names the library, not which of its functions).
``rouge_n`` and ``rouge_l`` are F1 over words (Lin 2004, https://aclanthology.org/W04-1013); ``gleu`` is the smaller of precision and
recall over n-grams of 1 to 4 words (Wu et al. 2016, https://arxiv.org/abs/1609.08144). Words are runs of lower-case letters and digits.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from rapidfuzz import fuzz
from rapidfuzz.distance import LCSseq

from penstock.protocol.errors import ConfigError
from penstock.reward_service.endpoints.wire import Score
from penstock.reward_service.hosting.chat_client import Chat, NoVerdict

_VARIABLE = re.compile(r"\{\{\s*([^{}]*?)\s*\}\}")
_PATH = re.compile(r"(item|sample)((?:\.[A-Za-z_][A-Za-z0-9_-]*|\[\d+\])+)")
_STEP = re.compile(r"\.([A-Za-z_][A-Za-z0-9_-]*)|\[(\d+)\]")
_SAMPLE = ("output_text", "output_json")
_NO_VALUE = object()
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: math.pow,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil, "exp": math.exp, "sqrt": math.sqrt,
    "log": math.log,
}  # fmt: skip
_ONE_ARGUMENT = frozenset(_FUNCTIONS) - {"min", "max"}
_REFUSED = {
    "python": "python graders run code, which Penstock does only in its sandbox, for the reward 'code'; "
    "serve the function yourself: penstock reward serve FILE.py",
    "label_model": "label_model graders are not evaluated here; ask score_model for 1 or 0",
    "endpoint": "register that URL as an endpoint of its own",
}


class NoSuchVariable(Exception):
    """The row lacks a column that the grader uses."""


class SampleUnfit(Exception):
    """The answer is not JSON, or lacks a key that the grader reads; caused by the policy."""


def check_variables(text: str) -> str:
    """Return a text whose variables can all be filled; raises ValueError for another."""
    for name in _VARIABLE.findall(text):
        path = _PATH.fullmatch(name)
        if path is None:
            raise ValueError(
                f"{{{{{name}}}}} is not a variable; write item.COLUMN, sample.output_text or sample.output_json.KEY"
            )
        first = _STEP.match(path.group(2))
        if path.group(1) == "sample" and (first is None or first.group(1) not in _SAMPLE):
            raise ValueError(f"{{{{{name}}}}}: a sample has {' and '.join(_SAMPLE)} here")
    return text


def fill_variables(text: str, item: Mapping[str, Any], answer: str) -> str:
    """Return a text with its variables replaced; values that are not texts are inserted as JSON.

    Raises NoSuchVariable and SampleUnfit.
    """
    return _VARIABLE.sub(lambda found: _text(_value(found.group(1), item, answer)), text)


def _value(name: str, item: Mapping[str, Any], answer: str) -> Any:
    space, _, _ = name.partition(".")
    steps = [key or int(index) for key, index in _STEP.findall(name.removeprefix(space))]
    if space == "item":
        value = _follow(item, steps)
        if value is _NO_VALUE:
            raise NoSuchVariable(f"the row has no {name}; its columns are {', '.join(item)[:200]}")
        return value
    if steps[0] == "output_text":
        return answer
    try:
        value = _follow(json.loads(answer), steps[1:])
    except (ValueError, RecursionError):
        raise SampleUnfit("the answer is not JSON") from None
    if value is _NO_VALUE:
        raise SampleUnfit(f"the answer has no {name}")
    return value


def _follow(value: Any, steps: list[str | int]) -> Any:
    for step in steps:
        if isinstance(step, int):
            if not isinstance(value, list) or step >= len(value):
                return _NO_VALUE
        elif not isinstance(value, Mapping) or step not in value:
            return _NO_VALUE
        value = value[step]  # type: ignore[index]
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Formula = Callable[[Mapping[str, float]], float]


def check_formula(text: str, names: Collection[str]) -> Formula:
    """Return what computes a formula from the scores of graders; raises ValueError for anything but arithmetic over ``names``.

    OpenAI's guide writes powers as ^, which has another precedence in Python.
    """
    try:
        return _compiled(ast.parse(text.strip().replace("^", "**"), mode="eval").body, names)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"calculate_output {text[:80]!r} is not an arithmetic expression") from None


def _compiled(node: ast.expr, names: Collection[str]) -> Formula:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return lambda _: float(value)
        case ast.Name(id=name):
            if name not in names:
                raise ValueError(f"calculate_output: there is no grader {name!r}; the graders are {', '.join(names)}")
            return lambda scores: scores[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign):
            operand, factor = _compiled(node.operand, names), -1.0 if isinstance(sign, ast.USub) else 1.0
            return lambda scores: factor * operand(scores)
        case ast.BinOp(op=operation) if type(operation) in _BINARY:
            left, right, compute = _compiled(node.left, names), _compiled(node.right, names), _BINARY[type(operation)]
            return lambda scores: compute(left(scores), right(scores))
        case ast.Call(func=ast.Name(id=name), args=[_, *more], keywords=[]) if name in _FUNCTIONS:
            if not (more and name in _ONE_ARGUMENT):
                arguments, function = [_compiled(argument, names) for argument in node.args], _FUNCTIONS[name]
                if name in _ONE_ARGUMENT:
                    return lambda scores: function(arguments[0](scores))
                return lambda scores: function([argument(scores) for argument in arguments])
    raise ValueError(
        f"calculate_output: {type(node).__name__} is not allowed; it takes graders, numbers, + - * / ^ and "
        f"{', '.join(_FUNCTIONS)}"
    )


def compute_formula(text: str, scores: Mapping[str, float]) -> float:
    """Return the value of a checked formula; raises ValueError when it is undefined (division by zero, overflow)."""
    try:
        value = float(check_formula(text, scores)(scores))
    except (ArithmeticError, ValueError, TypeError) as err:
        raise ValueError(f"calculate_output has no value: {err}") from None
    if not math.isfinite(value):
        raise ValueError(f"calculate_output is {value}, expected a finite number")
    return value


Text = Annotated[str, AfterValidator(check_variables)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Grader(_Part):
    name: str = ""
    pass_threshold: float | None = None  # used by OpenAI's evals; the reward is the score itself


class _Compares(_Grader):
    input: Text
    reference: Text


class StringCheck(_Compares):
    """1 or 0: equal, not equal, contains, contains without regard to case."""

    type: Literal["string_check"]
    operation: Literal["eq", "ne", "like", "ilike"]


class TextSimilarity(_Compares):
    """The similarity of two texts, 0 to 1."""

    type: Literal["text_similarity"]
    evaluation_metric: Literal["fuzzy_match", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"]


class Message(_Part):
    """One message to the grading model."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    type: Literal["message"] = "message"


class Sampling(_Part):
    """Sampling parameters of the grading model."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: int | None = None
    max_completions_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning_effort: str | None = None


class ScoreModel(_Grader):
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
        check_formula(self.calculate_output, self.graders)
        return self


Grader = StringCheck | TextSimilarity | ScoreModel | Multi
_GRADER: TypeAdapter[Grader] = TypeAdapter(Annotated[Grader, Field(discriminator="type")])


def load(file: Path) -> Grader:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"{file}: not readable ({err.strerror})") from None
    except ValueError as err:
        raise ConfigError(f"{file}: not JSON: {err}") from None
    try:
        return read(document)
    except ValueError as err:
        raise ConfigError(f"{file}: {err}") from None


def read(document: Any) -> Grader:
    for where, kind in _kinds(document):
        if kind in _REFUSED:
            raise ValueError(f"{where}: {_REFUSED[kind]}")
    try:
        return _GRADER.validate_python(document)
    except ValidationError as err:
        wrong = [f"{'.'.join(map(str, error['loc'])) or 'the grader'}: {error['msg']}" for error in err.errors()]
        raise ValueError("; ".join(wrong[:5])) from None


def _kinds(document: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(document, dict):
        return
    yield "the grader", str(document.get("type"))
    inner = document.get("graders")
    for name, grader in inner.items() if isinstance(inner, dict) else ():
        if isinstance(grader, dict):
            yield f"graders.{name}", str(grader.get("type"))


_WORD = re.compile(r"[^\W_]+")
_LONGEST_GRAM = 4
_UNFIT = "sample_unfit"
_OPERATIONS: dict[str, Callable[[str, str], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "like": operator.contains,
    "ilike": lambda text, reference: reference.casefold() in text.casefold(),
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"description": {"type": "string"}, "conclusion": {"type": "string"}},
                "required": ["description", "conclusion"],
                "additionalProperties": False,
            },
        },
        "result": {"type": "number"},
    },
    "required": ["steps", "result"],
    "additionalProperties": False,
}


def similarity(metric: str, text: str, reference: str) -> float:
    """Return the similarity of two texts by a metric of `TextSimilarity`.

    Except for ``fuzzy_match``, a text without words gives 1 if the other has none either, else 0.
    """
    if metric == "fuzzy_match":
        return fuzz.ratio(text, reference) / 100.0
    words, wanted = _words(text), _words(reference)
    if not words or not wanted:
        return float(words == wanted)
    if metric == "rouge_l":
        return _f1(LCSseq.similarity(words, wanted), len(words), len(wanted))
    if metric == "gleu":
        sizes = range(1, _LONGEST_GRAM + 1)
        shared = sum((_grams(words, size) & _grams(wanted, size)).total() for size in sizes)
        most = max(sum(_grams(tokens, size).total() for size in sizes) for tokens in (words, wanted))
        return shared / most
    size = int(metric.removeprefix("rouge_"))
    actual, expected = _grams(words, size), _grams(wanted, size)
    return _f1((actual & expected).total(), actual.total(), expected.total())


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _grams(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[place : place + size]) for place in range(len(words) - size + 1))


def _f1(shared: int, actual: int, expected: int) -> float:
    return 2.0 * shared / (actual + expected) if shared else 0.0


async def evaluate(grader: Grader, item: Mapping[str, Any], answer: str, chat: Chat | None) -> Score:
    try:
        if not isinstance(grader, Multi):
            value, unfit = await _single(grader, item, answer, chat)
            return Score(score=value, parts={_UNFIT: 1.0} if unfit else {})
        scores, any_unfit = {}, False
        for name, sub_grader in grader.graders.items():
            scores[name], unfit = await _single(sub_grader, item, answer, chat)
            any_unfit = any_unfit or unfit
        total = compute_formula(grader.calculate_output, scores)
        parts = {name[:64]: value for name, value in list(scores.items())[:31]}
        return Score(score=total, parts={**parts, **({_UNFIT: 1.0} if any_unfit else {})})
    except (NoSuchVariable, NoVerdict, ValueError) as err:
        return Score(error=str(err)[:1000])


async def _single(grader: Single, item: Mapping[str, Any], answer: str, chat: Chat | None) -> tuple[float, bool]:
    try:
        if isinstance(grader, ScoreModel):
            return await _ask(grader, item, answer, chat), False
        text, reference = (fill_variables(part, item, answer) for part in (grader.input, grader.reference))
    except SampleUnfit:
        return (grader.range[0] if isinstance(grader, ScoreModel) else 0.0), True
    if isinstance(grader, TextSimilarity):
        return similarity(grader.evaluation_metric, text, reference), False
    return float(_OPERATIONS[grader.operation](text, reference)), False


async def _ask(grader: ScoreModel, item: Mapping[str, Any], answer: str, chat: Chat | None) -> float:
    if chat is None:
        raise NoVerdict(f"score_model {grader.name or grader.model} needs a chat endpoint: --base-url")
    messages = [
        {"role": message.role, "content": fill_variables(message.content, item, answer)} for message in grader.input
    ]
    sampling = grader.sampling_params
    more = sampling.model_dump(exclude_none=True, exclude={"max_completions_tokens"})
    if sampling.max_completions_tokens is not None:
        more["max_completion_tokens"] = sampling.max_completions_tokens
    schema = {"name": "grade", "strict": True, "schema": _SCHEMA}
    more["response_format"] = {"type": "json_schema", "json_schema": schema}
    said = await chat.converse({"model": grader.model, "messages": messages, "temperature": 0.0, **more})
    try:
        value = json.loads(said.text)["result"]
    except (ValueError, KeyError, TypeError):
        raise NoVerdict(f"score_model answered {said.text[:160]!r}, expected JSON with 'result'") from None
    lowest, highest = grader.range
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
        raise NoVerdict(f"score_model answered result = {str(value)[:40]}, outside [{lowest:g}, {highest:g}]")
    return float(value)
