"""JSON with one reading: UTF-8, no key twice, no NaN or Infinity, no number or text that others cannot hold. Pure.

The parsers of two programs disagree about the rest: of two equal keys one takes the first, another the last, so that a
proxy or a log may see another request, or another score, than the service.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

from penstock.protocol.files import refuse_halves

MAX_DEPTH = 64  # of what a server of somebody else sends
_MAX_KEY = 40  # characters of a key that an error shows


class AmbiguousJson(ValueError):
    """A text that is not JSON, or JSON that can be read in two ways; the text of the error shows no value."""


def loads(body: bytes, max_depth: int | None = None, *, is_finite: bool = False) -> Any:
    """Return a JSON text's value, at most ``max_depth`` deep, without 1e999 if ``is_finite``; raises AmbiguousJson."""
    try:
        text = body.decode("utf-8")
        number = _finite if is_finite else float
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=number)
        refuse_halves(text, value)
    except AmbiguousJson:
        raise
    except UnicodeEncodeError:
        raise AmbiguousJson("a text has half of a surrogate pair, which is no text") from None
    except UnicodeDecodeError as err:
        raise AmbiguousJson(f"it is not UTF-8 (byte {err.start}); send JSON as UTF-8") from None
    except json.JSONDecodeError as err:
        raise AmbiguousJson(f"it is not JSON: {err.msg} at character {err.pos}") from None
    except RecursionError:
        raise AmbiguousJson("it is nested too deeply") from None
    except ValueError:
        raise AmbiguousJson("it has a whole number with too many digits") from None
    if max_depth is not None and is_deeper(value, max_depth):
        raise AmbiguousJson(f"it is nested more than {max_depth} times")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise AmbiguousJson(f"an object has the key {twice[:_MAX_KEY]!a} twice; send it once")
    return members


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _no_constant(number[:_MAX_KEY])


def _no_constant(name: str) -> NoReturn:
    raise AmbiguousJson(f"{name} is not a JSON number")


def is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        nodes = [node for node in level if isinstance(node, (dict, list))]
        level = [inner for node in nodes for inner in (node.values() if isinstance(node, dict) else node)]
        if not level:
            return False
    return any(isinstance(node, (dict, list)) and node for node in level)
