"""A grader process of the rewards `regex` and `json_schema` (`grader_process`): ``python -m penstock.reward_service.graders.pattern_grader``.

What is compared with is a JSON text: ``{"regex": ..., "flags": "ims", "whole": false}`` or ``{"json_schema": {...}}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from penstock.reward_service.graders import grader_process

_KNOWN = 256
_FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL}

Fits = Callable[[str], bool]


@lru_cache(_KNOWN)
def read_gold(text: str) -> Fits | None:
    """Return the predicate of answers; None when the expression or the schema is wrong."""
    wanted = json.loads(text)
    if "regex" in wanted:
        return _expression(wanted["regex"], wanted["flags"], whole=wanted["whole"])
    return _schema(wanted["json_schema"])


def is_equal(gold: Fits, answer: str) -> bool:
    return gold(answer)


def _expression(pattern: str, flags: str, *, whole: bool) -> Fits | None:
    try:
        compiled = re.compile(pattern, sum(_FLAGS[letter] for letter in flags))
    except (re.error, RecursionError, OverflowError):
        return None
    look = compiled.fullmatch if whole else compiled.search
    look("")
    return lambda answer: look(answer) is not None


def _schema(schema: dict[str, Any]) -> Fits | None:
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
        validator = kind(schema, registry=Registry())  # an empty one: nothing is fetched
        for example in ({}, [], "", 0, None):
            validator.is_valid(example)
    except (SchemaError, Unresolvable, RecursionError, re.error):
        return None

    def fits(answer: str) -> bool:
        try:
            return validator.is_valid(json.loads(answer))
        except RecursionError:
            return False  # nested deeper than the schema, which examples passed, can be followed

    return fits


if __name__ == "__main__":
    grader_process.serve(read_gold, is_equal)
