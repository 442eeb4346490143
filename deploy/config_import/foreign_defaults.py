"""Which keys of a file only repeat the defaults of its system, as a whole configuration that was written out has them.

``trl_defaults.json`` has what TRL 1.16's ``GRPOConfig(...).to_dict()`` holds for arguments that nobody gave.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_FILES = {"trl": "trl_defaults.json"}
_WHOLE = 60  # so many keys at their defaults are a configuration that was written out; fewer were typed by a person


def at_default(system: str, values: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys at their defaults, or without a value, in a file with all of them; none for a file of chosen keys."""
    known = _defaults(system)
    found = frozenset(k for k, value in values.items() if value is None or (k in known and _same(value, known[k])))
    return found if len(found) >= _WHOLE else frozenset()


@cache
def _defaults(system: str) -> Mapping[str, Any]:
    if system not in _FILES:
        return {}
    return json.loads((Path(__file__).parent / _FILES[system]).read_text(encoding="utf-8"))


def _same(value: Any, default: Any) -> bool:
    return value == default and isinstance(value, bool) == isinstance(default, bool)
