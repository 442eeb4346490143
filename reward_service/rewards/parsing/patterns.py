"""Regular expressions that are too long for a line of code, in a TOML file beside the code that uses them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

_PART = re.compile(r"<<(\w+)(?::(\w+))?>>")


def read_patterns(file: str) -> dict[str, re.Pattern[str]]:
    """Return the table ``pattern`` of the TOML file beside a Python file, compiled.

    ``<<name>>`` stands for the text of that name in the table ``part``, ``<<name:group>>`` for the same with GROUP as ``group``.
    """
    tables = tomllib.loads(Path(file).with_suffix(".toml").read_text(encoding="utf-8"))

    def part(named: re.Match[str]) -> str:
        return tables["part"][named[1]].replace("GROUP", named[2] or "GROUP")

    return {name: re.compile(_PART.sub(part, text)) for name, text in tables["pattern"].items()}
