"""1 when a completion follows every instruction of its row, by the rules of IFEval (arXiv 2311.07911) and RLVR-IFeval (arXiv 2411.15124).

What each instruction counts is in `ifeval.toml`. A row names its instructions in the columns ``instruction_id_list`` and ``kwargs``
(google/IFEval), or in its ground truth: an object with these, or with ``func_name``. Differs from the public programs: an argument that is
missing is an error instead of drawn at random, arguments are texts instead of patterns, and sentences are split by a rule of this file.
A chain in ``<think>`` is not read. The languages of texts are those of the package langdetect.
"""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.parsing import final_answer
from penstock.reward_service.rewards.reward import PureReward, Verdict

NAME = "ifeval"
_RULES: Mapping[str, Mapping[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_RELATIONS: Mapping[str, Callable[[int], bool]] = {  # of what a count is above the number
    "at least": lambda more: more >= 0, "less than": lambda more: more < 0, "at most": lambda more: more <= 0, "exactly": lambda more: not more,
    "around": lambda more: not more,
}  # fmt: skip
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "text": lambda value: isinstance(value, str) and bool(value.strip()),
    "letter": lambda value: isinstance(value, str) and len(value) == 1,
    "texts": lambda value: isinstance(value, list) and bool(value) and all(map(_TYPES["text"], value)),
    "number": lambda value: type(value) is int and value >= 0,
    "relation": lambda value: value in [*_RELATIONS],
}
_OF_LANGUAGE = ("is_in", "is_english_capital", "is_english_lowercase")
_Check = Callable[[str], bool]


class Parameters(Section):
    loose: bool = Field(
        default=False,
        description="An instruction may also be followed without the first line, the last one, and asterisks (IFEval's loose accuracy).",
    )
    partial: bool = Field(default=False, description="Return the share of the instructions that are followed.")


def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any, extra: Any = None) -> list[Verdict]:
    """Return the verdicts; raises BadGroundTruth for an unknown instruction, and an argument that is missing, unknown or of another type."""
    checks = [_check(name, given) for name, given in _instructions(truth, extra)]
    shares: list[float] = []
    for text in map(final_answer.spoken, completions):
        lines = text.split("\n")
        readings = [text, *("\n".join(some).strip() for some in (lines[1:], lines[:-1], lines[1:-1]))]
        tried = [*readings, *(one.replace("*", "") for one in readings)] if parameters.loose else [text]
        shares.append(sum(any(one.strip() and check(one) for one in tried) for check in checks) / len(checks))
    return [Verdict(share if parameters.partial else float(share == 1.0), {"followed": share}) for share in shares]


def _instructions(truth: Any, extra: Any) -> list[tuple[Any, Any]]:
    try:
        row = json.loads(truth) if isinstance(truth, str) else truth
    except ValueError as err:
        raise BadGroundTruth(f"{NAME}: the row's ground_truth is not JSON ({err})") from None
    row = row[0] if isinstance(row, list) and len(row) == 1 else row or extra
    fields: Mapping[str, Any] = row if isinstance(row, Mapping) else {}
    if "func_name" in fields:
        return [(fields["func_name"], {key: value for key, value in fields.items() if key != "func_name"})]
    names, given = fields.get("instruction_id_list", fields.get("instruction_id")), fields.get("kwargs")
    if not isinstance(names, list) or not isinstance(given, list) or not names or len(names) != len(given):
        raise BadGroundTruth(
            f"{NAME}: expected instruction_id_list and kwargs of the same length, or func_name, as the row's columns or ground_truth; "
            f"got {str(row)[:120]}"
        )
    return list(zip(names, given, strict=True))


def _check(name: Any, given: Any) -> _Check:
    rule = _RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        near = ", ".join(get_close_matches(str(name), _RULES)) or "none"
        raise BadGroundTruth(f"{NAME}: {str(name)[:80]} is no instruction that is known; near: {near}")
    kinds: Mapping[str, str] = rule.get("arguments", {})
    values = {key: value for key, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    if unknown := [key for key in values if key not in kinds]:
        raise BadGroundTruth(f"{NAME}: {name} has no argument {unknown[0]}; it has {', '.join(kinds) or 'none'}")
    for key, kind in kinds.items():
        if not _TYPES[kind](values.get(key)):
            wanted = " or ".join(_RELATIONS) if kind == "relation" else f"a {kind}"
            raise BadGroundTruth(f"{NAME}: {name}: {key} must be {wanted}, got {values.get(key)!r:.80}")
    if "check" not in rule:
        return partial(_holds, rule, values)
    if rule["check"] in _OF_LANGUAGE:
        _langdetect(name)
    arguments = [*([rule["pattern"]] if "pattern" in rule else []), *(values[key] for key in kinds)]
    return lambda text: _CHECKS[rule["check"]](text, *arguments)


def _holds(rule: Mapping[str, Any], values: Mapping[str, Any], text: str) -> bool:
    flags = re.MULTILINE | (0 if rule.get("case") else re.IGNORECASE)
    relation = values.get(rule.get("relation", ""), rule.get("relation", "at least"))
    number: int = values[rule["number"]] if isinstance(rule["number"], str) else rule["number"]
    share, least = rule.get("tolerance", (0, 0))
    patterns = rule["pattern"] if isinstance(rule["pattern"], list) else [rule["pattern"]]
    for one in next((value for value in values.values() if isinstance(value, list)), [None]):
        count = 0
        for pattern in patterns:
            for key, value in values.items():
                literal = str(one if isinstance(value, list) else value)
                pattern = pattern.replace(f"{{{key}}}", re.escape(literal.strip() or literal))
            found = re.finditer(pattern, text, flags)
            count += sum(not match.re.groups or bool(match[1].strip()) for match in found)
        more = count - number
        if relation == "around" and abs(more) <= max(round(number * share), least):
            more = 0
        if not _RELATIONS[relation](more):
            return False
    return True


def _parts(text: str, divider: str, number: int) -> list[str]:
    """Return the parts of a text, without blank ones at its ends; none unless there are so many, none of them blank."""
    parts = [part.strip() for part in re.split(divider, text)]
    parts = parts[not parts[0] : len(parts) - (len(parts) > 1 and not parts[-1])]
    return parts if all(parts) and len(parts) == number else []


def _begins_paragraph(text: str, number: int, nth: int, word: str) -> bool:
    parts = text.split("\n\n")
    if sum(bool(part.strip()) for part in parts) != number or not 0 < nth <= number or not parts[nth - 1].strip():
        return False
    first = re.split(r"[.,?!'\"]", parts[nth - 1].split()[0].lstrip("'\""))[0]
    return first.lower() == word.lower()


def _is_json(text: str) -> bool:
    try:
        json.loads(re.sub(r"\A\s*```(?:json)?|```\s*\Z", "", text, flags=re.IGNORECASE))
    except (ValueError, RecursionError):
        return False
    return True


def _langdetect(name: str = NAME) -> Any:
    try:
        module = importlib.import_module("langdetect")
    except ImportError:
        raise BadGroundTruth(
            f"{NAME}: {name} needs the package langdetect where rewards are scored: install penstock[ifeval]"
        ) from None
    module.DetectorFactory.seed = 0  # it draws at random otherwise
    return module


def _is_in(text: str, language: str) -> bool:
    """Return True if a text is in a language; also, as in IFEval, for one in which none is found."""
    module = _langdetect()
    try:
        return module.detect(text) == language
    except module.LangDetectException:
        return True


_CHECKS: Mapping[str, Callable[..., bool]] = {
    "is_in": _is_in,
    "has_paragraphs": lambda text, divider, number: bool(_parts(text, divider, number)),
    "begins_paragraph": _begins_paragraph,
    "are_paragraphs": lambda text, divider, number: len(parts := re.split(divider, text)) == number and all(map(str.strip, parts)),
    "are_two": lambda text, divider: len(parts := [*map(str.strip, re.split(divider, text))]) == 2 and all(parts) and parts[0] != parts[1],
    "starts_paragraph": lambda text, n, nth, word: len(parts := text.split("\n\n")) == n >= nth > 0 and parts[nth - 1].strip().startswith(word),
    "has_postscript": lambda text, marker: bool(re.search(re.escape(marker.strip()).replace(r"\.", r"\.\s?"), text, re.IGNORECASE)),
    "is_json": _is_json,
    "is_bare_json": lambda text: _is_json(text) and "```" not in (text.strip()[:3], text.strip()[-3:]),
    "has_capitals": lambda text, number, relation: _RELATIONS[relation](sum(map(str.isupper, re.findall(r"\w(?:[\w-]|\.(?=\w))*", text))) - number),
    "has_two": lambda text, divider: len(set(_parts(text, divider, 2))) == 2,
    "is_one_of": lambda text, options: text.strip() in options,
    "is_capital": lambda text: text == text.upper(),
    "is_lowercase": lambda text: text == text.lower(),
    "is_english_capital": lambda text: text.isupper() and _is_in(text, "en"),
    "is_english_lowercase": lambda text: text.islower() and _is_in(text, "en"),
}  # fmt: skip

REWARD = PureReward(
    name=NAME,
    description="1 when the completion follows all instructions of the row; `partial`: their share",
    judge=judge,
    parameters=Parameters,
    reads="answer and columns",
    data_sources=("ifeval", "if_eval", "google/IFEval", "allenai/RLVR-IFeval"),
    parts=("followed",),
    notes="instructions on the language need langdetect; an unknown one is an error of the row",
    success=1.0,
)
