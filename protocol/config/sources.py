"""Read settings from run files, environment variables and command-line overrides.

Each source yields `Given` values: a path, a value and its origin. `protocol/config/run_file.py` matches the paths with the schema.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ENVIRONMENT_PREFIX = "PENSTOCK_"
OVERRIDE = "override"  # the origin of a value from the command line

MAX_FILE_BYTES = 4 * 1024**2
_LINES_BUDGET = 4 * 1024**2  # characters that are parsed to find the lines of keys
_MAX_INT = 2**63

KeyPath = tuple[str, ...]

NOTHING = ("None", "none", "null")  # the texts that clear a value
_WORDS = {"True": True, "False": False}
_KEY_PART = re.compile(r'"([^"]*)"|\'([^\']*)\'|([^."\']+)')
_DELETION = re.compile(r"~[A-Za-z0-9_.-]+")  # hydra's; a path below the home directory has a slash
_TOML_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)")


class Given(NamedTuple):
    """One value of a source; ``text`` is its original text if it came from the environment or the command line."""

    path: KeyPath
    value: Any
    origin: str
    text: str | None = None

    @property
    def source(self) -> str:
        return re.sub(r"(:\d+)?( as [a-z0-9_.]+)?$", "", self.origin)

    @property
    def spelling(self) -> str:
        return match[1] if (match := re.search(r" as ([a-z0-9_.]+)$", self.origin)) else ""


def unusable(value: Any) -> str:
    """Return why no setting can have a value: a number beyond 64 bits, infinite, or a text with NUL; else ""."""
    if isinstance(value, list):
        return next(filter(None, map(unusable, value)), "")
    if isinstance(value, int) and not -_MAX_INT <= value < _MAX_INT:
        return "expected a number of at most 64 bits"
    if isinstance(value, float) and math.isinf(value):
        return "expected a finite number"
    return "expected a text without NUL" if isinstance(value, str) and "\0" in value else ""


def from_files(files: Sequence[Path], problems: list[str]) -> Iterator[Given]:
    for file in files:
        try:
            if file.exists() and not file.is_file():
                problems.append(f"{file}: not a regular file")
                continue
            if file.stat().st_size > MAX_FILE_BYTES:
                problems.append(f"{file}: {file.stat().st_size} bytes, the limit is {MAX_FILE_BYTES}")
                continue
            text = file.read_text(encoding="utf-8")
            yield from list(_from_text(str(file), text))
        except OSError as err:
            problems.append(f"{file}: not readable ({err.strerror})")
        except UnicodeDecodeError as err:
            problems.append(f"{file}: not UTF-8 text (at byte {err.start})")
        except SyntaxError as err:
            problems.append(str(err))
        except RecursionError:
            problems.append(f"{file}: nested too deeply")


def _from_text(name: str, text: str) -> Iterator[Given]:
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        place = _TOML_PLACE.search(str(err))
        line, column = (place[1], f" (column {place[2]})") if place else (text.count("\n") + 1, "")
        raise SyntaxError(f"{name}:{line}: not valid TOML: {_TOML_PLACE.sub('', str(err))}{column}") from None
    except ValueError as err:  # a number of more than 4,300 digits
        raise SyntaxError(f"{name}: not valid TOML: {err}") from None
    lines = key_lines(text)
    for path, value in leaves(content):
        if path:
            nearest = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in lines), ())
            yield Given(path, value, f"{name}:{lines.get(nearest, 1)}")


def from_environment(environ: Mapping[str, str]) -> Iterator[Given]:
    """Yield every ``PENSTOCK_<SECTION>__<KEY>``; other variables are ignored."""
    for name, text in sorted(environ.items()):
        section, separator, key = name.removeprefix(ENVIRONMENT_PREFIX).partition("__")
        if name.startswith(ENVIRONMENT_PREFIX) and separator:
            path = (section.lower(), *key.lower().split("__"))
            yield Given(path, scalar(text), f"environment {name}", text)


def from_overrides(overrides: Sequence[str], problems: list[str]) -> Iterator[Given]:
    """Yield ``a.b=c``, ``--a.b=c`` and ``--a.b c``; a key part that contains a dot is quoted.

    Of hydra's forms, ``+a.b=c`` and ``++a.b=c`` set a value too, and ``~a.b`` clears one.
    """
    remaining = list(overrides)
    while remaining:
        token = remaining.pop(0)
        name, separator, text = token.removeprefix("--").lstrip("+").partition("=")
        if name.startswith("~"):
            name, separator, text = name.removeprefix("~"), "=", NOTHING[0]
        if not separator and token.startswith("--") and remaining and not remaining[0].startswith("--"):
            separator, text = " ", remaining.pop(0)
        path = tuple(part[0] or part[1] or part[2] for part in _KEY_PART.findall(name))
        if not separator or not path:
            problems.append(f"override {token!r}: expected section.key=value or --section.key value")
            continue
        for extra, value in leaves(scalar(text)):
            yield Given(path + extra, value, OVERRIDE, None if extra else text)


def split_arguments(arguments: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Split command-line arguments into run files (``run.toml``, ``@ more.toml``) and overrides, each in order."""
    files: list[Path] = []
    overrides: list[str] = []
    is_value = False
    for argument in arguments:
        if is_value or argument.startswith("--") or "=" in argument or _DELETION.fullmatch(argument):
            overrides.append(argument)
            is_value = not is_value and argument.startswith("--") and "=" not in argument
        elif argument != "@":
            files.append(Path(argument.removeprefix("@")))
    return files, overrides


def scalar(text: str) -> Any:
    """Parse a text as a TOML value, or Python's True and False; anything else is returned as a string."""
    if text in _WORDS:
        return _WORDS[text]
    if "\n" in text or ("#" in text and text[0] not in "\"'[{"):  # TOML would parse more than one value
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, a number of more than 4,300 digits, or nested too deeply
        return text


def key_lines(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    statement, start, budget = "", 1, _LINES_BUDGET
    for number, line in enumerate(text.split("\n"), 1):
        statement += line + "\n"
        budget -= len(statement)
        if budget < 0:  # one statement of very many lines: what follows it gets no line
            break
        try:
            content = tomllib.loads(statement)  # succeeds exactly when the statement is complete
        except tomllib.TOMLDecodeError:
            continue
        is_header = statement.lstrip().startswith("[")
        prefix = () if is_header else table
        for path in _key_paths(content):
            lines.setdefault(prefix + path, start)
            table = path if is_header else table
        statement, start = "", number + 1
    return lines


def _key_paths(content: Any, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    if isinstance(content, list) and content and isinstance(content[0], dict):  # [[array of tables]]
        content = content[0]
    if isinstance(content, dict):
        for key, value in content.items():
            yield (*prefix, key)
            yield from _key_paths(value, (*prefix, key))


def put(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set the value at a path of nested tables, which are made where they are missing."""
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def leaves(value: Any, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, (*prefix, key))
    else:
        yield prefix, value
