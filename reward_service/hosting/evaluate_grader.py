"""Evaluate a grader on a row and an answer: return a score with its parts, or an error.

If a grader reads ``sample.output_json`` and the answer is not JSON or lacks the key, the policy caused it: that grader
gives its lowest score, with the part ``sample_unfit`` = 1. Every other failure is an error.

Of the similarities of two texts, ``fuzzy_match`` is rapidfuzz's ratio (OpenAI names the library, not which of its functions). ``rouge_n`` and ``rouge_l`` are F1 over words
(Lin 2004, https://aclanthology.org/W04-1013); ``gleu`` is the smaller of precision and recall over n-grams of 1 to 4
words (Wu et al. 2016, https://arxiv.org/abs/1609.08144). Words are runs of letters and digits in lower case.
"""

from __future__ import annotations

import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rapidfuzz import fuzz
from rapidfuzz.distance import LCSseq

from penstock.reward_service.endpoints.wire import Score
from penstock.reward_service.hosting import openai_grader
from penstock.reward_service.hosting.chat_client import Chat, NoVerdict

_WORD = re.compile(r"[^\W_]+")
_LONGEST = 4
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
        sizes = range(1, _LONGEST + 1)
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


async def evaluate(grader: openai_grader.Grader, item: Mapping[str, Any], answer: str, chat: Chat | None) -> Score:
    try:
        if not isinstance(grader, openai_grader.Multi):
            value, unfit = await _single(grader, item, answer, chat)
            return Score(score=value, parts={_UNFIT: 1.0} if unfit else {})
        scores, any_unfit = {}, False
        for name, sub_grader in grader.graders.items():
            scores[name], unfit = await _single(sub_grader, item, answer, chat)
            any_unfit = any_unfit or unfit
        total = openai_grader.compute_formula(grader.calculate_output, scores)
        parts = {name[:64]: value for name, value in list(scores.items())[:31]}
        return Score(score=total, parts={**parts, **({_UNFIT: 1.0} if any_unfit else {})})
    except (openai_grader.NoSuchVariable, NoVerdict, ValueError) as err:
        return Score(error=str(err)[:1000])


async def _single(
    grader: openai_grader.Single, item: Mapping[str, Any], answer: str, chat: Chat | None
) -> tuple[float, bool]:
    try:
        if isinstance(grader, openai_grader.ScoreModel):
            return await _ask(grader, item, answer, chat), False
        text, reference = (
            openai_grader.fill_variables(part, item, answer) for part in (grader.input, grader.reference)
        )
    except openai_grader.SampleUnfit:
        return (grader.range[0] if isinstance(grader, openai_grader.ScoreModel) else 0.0), True
    if isinstance(grader, openai_grader.TextSimilarity):
        return similarity(grader.evaluation_metric, text, reference), False
    return float(_OPERATIONS[grader.operation](text, reference)), False


async def _ask(grader: openai_grader.ScoreModel, item: Mapping[str, Any], answer: str, chat: Chat | None) -> float:
    if chat is None:
        raise NoVerdict(f"score_model {grader.name or grader.model} needs a chat endpoint: --base-url")
    messages = [
        {"role": message.role, "content": openai_grader.fill_variables(message.content, item, answer)}
        for message in grader.input
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
