"""Load settings from one TOML file for all services, the environment and overrides, each value with its origin.

Precedence: default < files (a later file wins) < environment < overrides. Tables merge key by key,
lists are replaced. The text ``None`` (or ``none``, ``null``) clears a value from any source, since
TOML has no null: the field becomes None if its type allows it, otherwise its default.

Types are strict (``steps = "5"`` is refused). All errors are raised together, each with its file and line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from penstock.protocol import seals
from penstock.protocol.config.foreign_config import ALIASES, advice, value_advice
from penstock.protocol.config.schema_keys import (
    SECTIONS,
    UnknownKeyError,
    is_secret,
    locate,
    members_of,
    spelt,
    table_of,
)
from penstock.protocol.config.sources import (
    ENVIRONMENT_PREFIX,
    NOTHING,
    OVERRIDE,
    Given,
    KeyPath,
    from_environment,
    from_files,
    from_overrides,
    leaves,
    put,
    split_arguments,
    unusable,
)
from penstock.protocol.errors import ConfigError
from penstock.protocol.secret_values import MASK, hide, scrub

__all__ = [
    "SECTIONS", "Loaded", "config_document", "format_config", "is_secret", "load", "refuse_masks", "split_arguments",
    "toml_key", "toml_text", "values_of",
]  # fmt: skip

_LISTS = ("tracker",)  # sections that are lists: [[tracker]]
_SET_ELSEWHERE = "environment"  # no command reads its definitions back: workers have them from their own run file

S = TypeVar("S", bound=BaseModel)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_OF_LISTS = {"list_type", "tuple_type"}


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    """Settings, each key's origin: ``default``, ``preset grpo``, ``run.toml:12``, ``environment X``, ``override``."""

    settings: S
    origins: dict[str, str]


def load(
    settings_class: type[S],
    *,
    files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Loaded[S]:
    """Build one service's settings from its sections of the run file.

    ``overrides`` are ``a.b=c``, ``--a.b=c`` or ``--a.b``, ``c``, in snake or kebab case. Sections of
    other services are ignored. A secret among the overrides is refused. Raises ConfigError that lists every error.
    """
    problems: list[str] = []
    entries = [*from_files(files, problems), *from_environment(environ or {}), *from_overrides(overrides, problems)]
    translated = [ours for entry in entries for ours in _without_aliases(entry)]
    problems += dict.fromkeys(
        f"{entry.origin}: {'.'.join(entry.path)} = {hide(entry.path, entry.value)}: {why}"
        for entry in [*entries, *translated]
        if (why := value_advice(".".join(entry.path), entry.value))
    )
    unreadable = bool(problems)
    chosen: dict[KeyPath, Given] = {}
    reported: set[tuple[KeyPath, str]] = set()
    for entry in translated:
        if why := unusable(entry.value):
            problems.append(f"{entry.origin}: {'.'.join(entry.path)}: {why}")
            continue
        try:
            _choose(settings_class, entry, chosen)
        except UnknownKeyError as err:
            if (err.unknown, entry.source) not in reported:
                reported.add((err.unknown, entry.source))
                problems.append(f"{entry.origin}: {err}")
    if unreadable:  # every required key of the unreadable file would be reported as missing
        raise ConfigError("\n".join(problems))
    wrong_types = dict(_wrong_types(settings_class, chosen))
    problems += wrong_types.values()
    try:
        settings = settings_class.model_validate(_tree(settings_class, chosen))
    except ValidationError as err:
        problems += _explain(settings_class, err, chosen, known=wrong_types)
    else:
        if not problems:
            origins = {
                path: chosen[path].origin if path in chosen else _origin_of_unset(settings, path)
                for path, _ in values_of(settings)
            }
            return Loaded(settings, {".".join(path): origin for path, origin in origins.items()})
    raise ConfigError("\n".join(problems))


def _origin_of_unset(settings: BaseModel, path: KeyPath) -> str:
    """Return the origin of a value that no source gave: a section may fill in others than defaults, as a preset's."""
    origin_of = getattr(getattr(settings, path[0], None), "origin_of", None)
    return origin_of(path[1]) if origin_of is not None and len(path) > 1 else "default"


def values_of(settings: BaseModel, prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for name in type(settings).model_fields:
        yield from _values(getattr(settings, name), (*prefix, name))


def _values(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, BaseModel):
        yield from values_of(value, path)
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _values(item, (*path, key))
    else:
        yield path, value


def format_config(loaded: Loaded[Any]) -> str:
    """Return every value with its origin as TOML that `load` reads back; secrets are masked."""
    rows: list[tuple[str, str]] = []
    for path, value in values_of(loaded.settings):
        key = toml_key(path)
        rows.append((f"{key} = {toml_text(_shown(loaded.settings, path, value))}", loaded.origins[".".join(path)]))
    width = min(60, max((len(assignment) for assignment, _ in rows), default=0))
    return "".join(f"{assignment:<{width}}  # {origin}\n" for assignment, origin in rows)


def config_document(loaded: Loaded[Any]) -> dict[str, Any]:
    """Return the settings as a session stores them: `hide` is for where they are shown, since commands read them back.

    Masked are only fields of secrets and, in the options of environments, secrets by name and tables of variables;
    ``digests`` has an HMAC of each under the user's key. ``literal`` names keys whose text contains the mask itself.
    """
    document: dict[str, Any] = {"settings": {}, "origins": loaded.origins}
    for path, value in values_of(loaded.settings):
        key = ".".join(path)
        is_declared = bool(value) and is_secret(type(loaded.settings), path)
        plain = MASK if is_declared else to_jsonable_python(_plain(value))
        shown = hide(path, plain, with_texts=False) if path[0] == _SET_ELSEWHERE else plain
        put(document["settings"], path, shown)
        if shown != plain:
            document.setdefault("digests", {})[key] = seals.digest(key, json.dumps(plain, sort_keys=True))
        elif not is_declared and MASK in json.dumps(plain):
            document.setdefault("literal", []).append(key)
    return document


def refuse_masks(
    document: Mapping[str, Any], sections: Sequence[str], where: str, *, files: Sequence[Path] = ()
) -> None:
    """Raise ConfigError for a setting of these sections of a `config_document` that is masked and that no file sets."""
    can_use = {*document.get("literal", ()), *(".".join(entry.path) for entry in from_files(files, []))}
    for path, value in leaves({name: document["settings"].get(name) for name in sections}):
        if MASK in json.dumps(value) and (key := ".".join(path)) not in can_use:
            raise ConfigError(
                f"{where}: {key} was stored with {MASK} in its text, so that it cannot be used; give the run file"
            )


def _shown(settings: BaseModel, path: KeyPath, value: Any) -> Any:
    return MASK if value and is_secret(type(settings), path) else hide(path, _plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple) and any(isinstance(item, BaseModel) for item in value):  # [[tracker]]
        return [item.model_dump(mode="json", exclude_defaults=True) for item in value]
    return value


def toml_key(path: KeyPath) -> str:
    return ".".join(part if _BARE_KEY.fullmatch(part) else toml_text(part) for part in path)


def toml_text(value: Any) -> str:
    """Return a value as TOML; None as the text that clears a value, or left out of a table."""
    if value is None:
        return '"none"'
    if isinstance(value, BaseModel):
        return toml_text(value.model_dump(mode="json", exclude_defaults=True))
    if isinstance(value, dict):
        pairs = (f"{toml_key((name,))} = {toml_text(item)}" for name, item in value.items() if item is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_text(item) for item in value)}]"
    if isinstance(value, (bool, int, float)):
        return repr(value).lower()
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _without_aliases(entry: Given) -> Iterator[Given]:
    dotted = spelt(entry.path)
    alias = ALIASES.get(dotted)
    if alias is None:
        yield entry
        return
    for key in alias.keys:
        origin = f"{entry.origin} as {dotted}"
        yield entry._replace(path=tuple(key.split(".")), value=alias.value(entry.value), origin=origin)


def _choose(settings_class: type[BaseModel], entry: Given, chosen: dict[KeyPath, Given]) -> None:
    section = entry.path[0].replace("-", "_")
    is_section = len(entry.path) > 1 or entry.value == {} or section in _LISTS
    if section in SECTIONS and section not in settings_class.model_fields and is_section:
        return  # another service's section
    path, annotation = locate(settings_class, entry.path)
    members, table = members_of(annotation), table_of(annotation)
    if entry.value == {} and table is not None:
        return
    if entry.source == OVERRIDE and entry.value not in ("", *NOTHING) and is_secret(settings_class, path):
        dotted, variable = ".".join(path), ENVIRONMENT_PREFIX + "__".join(path).upper()
        raise UnknownKeyError(
            path,
            f"{dotted} is refused on the command line, which every user of this machine can read (ps); set "
            f"{dotted}_file = FILE, or the environment variable {variable}",
        )
    value = _meant(entry, section, members)
    if isinstance(value, str) and value in NOTHING:
        for cleared in [known for known in chosen if known[: len(path)] == path]:
            del chosen[cleared]
        if type(None) in members:
            chosen[path] = Given(path, None, entry.origin)
    elif table is not None and set(members) <= {table, type(None)}:
        dotted = ".".join(path)
        hint = advice(dotted) or f"write {dotted}.KEY = VALUE"
        raise UnknownKeyError(path, f"{dotted} is a section, not a value; {hint}")
    elif _replaces(path, entry, chosen.get(path)):
        for known in [known for known in chosen if _is_within(known, path) or _is_within(path, known)]:
            del chosen[known]  # a value takes the place of a table, and a table that of a value
        chosen[path] = Given(path, value, entry.origin)


def _is_within(path: KeyPath, table: KeyPath) -> bool:
    return len(path) > len(table) and path[: len(table)] == table


def _meant(entry: Given, section: str, members: tuple[Any, ...]) -> Any:
    """Return a value as its field needs it: the text of a run named 7, a list of one."""
    if entry.text is not None and not isinstance(entry.value, (str, list)) and _is_text_only(members):
        return entry.text
    if section in _LISTS and not isinstance(entry.value, list) and entry.value not in NOTHING:
        return [entry.value]
    return entry.value


def _replaces(path: KeyPath, entry: Given, earlier: Given | None) -> bool:
    if earlier is None or earlier.source != entry.source or earlier.spelling == entry.spelling:
        return True
    if earlier.spelling and entry.spelling and _sets_several(earlier) != _sets_several(entry):
        return _sets_several(earlier)
    dotted = ".".join(path)
    raise UnknownKeyError(
        path,
        f"{dotted} is given twice, as {earlier.spelling or dotted} and as {entry.spelling or dotted}; leave one out",
    )


def _sets_several(entry: Given) -> bool:
    """Return True for an alias of several settings: that of one overrules it, as clip_ratio_high does clip_ratio."""
    return len(ALIASES[entry.spelling].keys) > 1


def _is_text_only(members: tuple[Any, ...]) -> bool:
    return (str in members or Path in members) and not {int, float, bool}.intersection(members)


def _tree(settings_class: type[BaseModel], chosen: Mapping[KeyPath, Given]) -> dict[str, Any]:
    tree: dict[str, Any] = {name: {} for name, field in settings_class.model_fields.items() if field.is_required()}
    for path, entry in chosen.items():
        put(tree, path, entry.value)
    return tree


def _wrong_types(settings_class: type[BaseModel], chosen: Mapping[KeyPath, Given]) -> Iterator[tuple[KeyPath, str]]:
    for path, entry in chosen.items():
        _, annotation = locate(settings_class, path)
        try:  # strict as JSON: a list is a valid tuple and a string a valid path, but "5" is not a number
            TypeAdapter(annotation).validate_json(json.dumps(entry.value, default=str), strict=True)
        except ValidationError as err:
            yield path, _refusal(settings_class, entry, err.errors(include_url=False))


def _explain(
    settings_class: type[BaseModel],
    failure: ValidationError,
    chosen: Mapping[KeyPath, Given],
    known: Mapping[KeyPath, str],
) -> Iterator[str]:
    by_path: dict[KeyPath, list[Any]] = {}
    for error in failure.errors(include_url=False):
        path: KeyPath = ()
        for part in error["loc"]:  # after a leaf follow list indices and the names of union members
            try:
                path, _ = locate(settings_class, (*path, str(part)))
            except UnknownKeyError:
                break
        by_path.setdefault(path, []).append(error)
    for path, errors in by_path.items():
        if path in known:
            continue
        if path in chosen:
            yield _refusal(settings_class, chosen[path], errors)
        elif errors[0]["type"] == "missing":
            yield f"{'.'.join(path)} is required: set `{path[-1]}` under [{'.'.join(path[:-1])}] or as an override"
        else:
            text = _expectation(errors[0])
            named = [entry for entry in chosen.values() if re.search(rf"\b{re.escape('.'.join(entry.path))}\b", text)]
            places = "".join(f" [{'.'.join(entry.path)}: {entry.origin}]" for entry in named)
            yield f"{'.'.join(path) + ': ' if path else ''}{text}{places}"


def _refusal(settings_class: type[BaseModel], entry: Given, errors: Sequence[Any]) -> str:
    expected = " or ".join(dict.fromkeys(_expectation(error) for error in errors))
    value = hide(entry.path, entry.value)
    got = "" if is_secret(settings_class, entry.path) else f", got {json.dumps(value, default=str)}"
    if got and isinstance(value, str) and {error["type"] for error in errors} <= _OF_LISTS:
        got += f"; write {json.dumps([value])}"
    return f"{entry.origin}: {'.'.join(entry.path)}: {expected}{got}"


def _expectation(error: Any) -> str:
    text = scrub(str(error["msg"])).removeprefix("Value error, ").removeprefix("Input should be ")
    if text != error["msg"] and error["type"] != "value_error":
        text = f"expected {text}"
    return text + "".join(f" (entry {part + 1})" for part in error["loc"][-1:] if isinstance(part, int))
