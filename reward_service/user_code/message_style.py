"""Whether a TRL-style function wants texts or messages; pure.

TRL passes ``completions`` as texts for plain prompts and as lists of messages for chat rows, and functions are written for one
of them. Penstock's rows are both, so the function decides: by its attribute ``conversational``, or by its code, in which a
function for messages has the key ``"content"``.
"""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType
from typing import Any

_KEY = "content"  # of a message's text: completion[0]["content"]


def takes_messages(function: Any) -> bool:
    """Return True for a function that sets ``conversational = True``, or whose code reads the key of a message's text.

    Functions of the same module that it calls are read too. A function written in C, or wrapped by one, takes texts.
    """
    given = getattr(function, "conversational", None)
    return given if isinstance(given, bool) else _reads_content(_python(function), set())


def _reads_content(function: FunctionType | None, seen: set[CodeType]) -> bool:
    if function is None or function.__code__ in seen:
        return False
    seen.add(function.__code__)
    codes = [function.__code__]
    for code in codes:
        if _KEY in code.co_consts:
            return True
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]  # comprehensions, inner functions
    named = {name for code in codes for name in code.co_names}
    called = [function.__globals__.get(name) for name in sorted(named)]
    own = [_python(one) for one in called if getattr(one, "__module__", None) == function.__module__]
    return any(_reads_content(one, seen) for one in own)


def _python(value: Any) -> FunctionType | None:
    if inspect.isclass(value):
        return None
    found = inspect.unwrap(value) if inspect.isroutine(value) else inspect.getattr_static(type(value), "__call__", None)
    found = getattr(found, "__func__", found)
    return found if isinstance(found, FunctionType) else None
