"""`penstock settings`: the sections of a run file, the settings of one, or one setting in full.

The descriptions are in the files `reference.json` and `run.schema.json`, which `deploy/write_reference.py` writes.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.protocol.config.foreign_config import ALIASES, RENAMED, Alias, advice
from penstock.protocol.config.setting_description import SettingDescription
from penstock.protocol.errors import ConfigError

REFERENCE_FILE = Path(__file__).with_name("reference.json")
SCHEMA_FILE = Path(__file__).with_name("run.schema.json")
_WIDEST = 120
_NARROWEST = 60
_FIRST_PART = re.compile(r"[;.] ")


@dataclass(frozen=True, slots=True)
class Reference:
    sections: Mapping[str, str]
    settings: Mapping[str, SettingDescription]


@functools.cache
def load_reference() -> Reference:
    document = json.loads(REFERENCE_FILE.read_text(encoding="utf-8"))
    return Reference(
        sections=document["sections"],
        settings={setting["key"]: SettingDescription.from_document(setting) for setting in document["settings"]},
    )


def nearest_keys(word: str) -> list[str]:
    """Return the keys nearest to a word that is none: the same name in any section, else similar ones."""
    keys = list(load_reference().settings)
    same = [key for key in keys if key.rpartition(".")[2] == word.rpartition(".")[2]]
    return same or difflib.get_close_matches(word, [*load_reference().sections, *keys], n=3, cutoff=0.7)


def print_settings(topic: str | None, *, as_json: bool) -> int:
    known = load_reference()
    if topic is None and not as_json:
        print("\n".join(_sections(known)))
        return 0
    settings = list(known.settings.values()) if topic is None else find(topic)
    if as_json:
        print(json.dumps([setting.to_document() for setting in settings], ensure_ascii=False))
    elif len(settings) == 1:
        print("\n".join(explain(settings[0])))
    else:
        if topic is not None and topic in known.sections:
            print(f"[{topic}]  {known.sections[topic]}\n")
        print("\n".join(table(settings)))
        print("\nnext: penstock settings KEY shows one in full")
    return 0


def run_file_schema() -> dict[str, Any]:
    """Return the JSON Schema of a run file, in which other projects' names of settings are allowed, marked as such."""
    return with_aliases(json.loads(SCHEMA_FILE.read_text(encoding="utf-8")), ALIASES)


def find(topic: str) -> list[SettingDescription]:
    """Return the settings that a word names: a section, a table, a key, another project's key, or the end of keys.

    For a word that names none, those whose key has it, else those whose description does. Raises ConfigError with the nearest keys, or with what is said of another project's key.
    """
    settings = load_reference().settings
    word = topic.removeprefix("--").strip("[]").replace("-", "_")
    if word in settings:
        return [settings[word]]
    below = [setting for key, setting in settings.items() if key.startswith(f"{word}.")]
    if below:
        return below
    meant = set(ALIASES[word].keys if word in ALIASES else ())
    if any(
        key.rpartition(".")[2] == word for key in settings
    ):  # and another project's word for a setting of another name
        meant.update(RENAMED.get(word, "").replace(",", " ").split())
    named = [setting for key, setting in settings.items() if key in meant or key.rpartition(".")[2] == word]
    return named or _mentioning(word)


def _mentioning(word: str) -> list[SettingDescription]:
    if instead := advice(word):
        raise ConfigError(f"{word} is a key of another project: {instead}")
    settings = load_reference().settings.values()
    if matching := [setting for setting in settings if word in re.split(r"[._]", setting.key)]:
        return matching
    whole = re.compile(rf"\b{re.escape(word.replace('_', ' '))}\b", re.IGNORECASE)
    if matching := [setting for setting in settings if whole.search(setting.description)]:
        return matching
    near = nearest_keys(word)
    hint = f"did you mean {', '.join(near)}?" if near else "`penstock settings` lists the sections"
    raise ConfigError(f"no setting or section is named {word}; {hint}")


def explain(setting: SettingDescription) -> Iterator[str]:
    yield setting.key
    yield from wrapped(setting.description, "  ")
    yield ""
    for title, text in (
        ("type", f"{setting.type}, in {setting.unit}" if setting.unit else setting.type),
        ("default", setting.default),
        ("presets", _presets(setting.presets)),
        ("allowed", setting.allowed),
        ("read by", ", ".join(setting.services)),
        ("other names", ", ".join(sorted(name for name, alias in ALIASES.items() if setting.key in alias.keys))),
        ("similar", ", ".join(_similar(setting.key, RENAMED))),
        ("run file", _in_a_file(setting)),
        (
            "command",
            "refused: every user of the machine can read it there" if setting.secret else f"{setting.key}=VALUE",
        ),
        ("environment", f"PENSTOCK_{setting.key.upper().replace('.', '__')}=VALUE"),
    ):
        if text:
            yield from wrapped(text, f"  {title:<12} ")


def table(settings: Sequence[SettingDescription], *, indent: str = "", short: bool = False) -> Iterator[str]:
    """Yield a line or more for each setting: key, type, default, description; if ``short`` only its first part."""
    keys = max((len(setting.key) for setting in settings), default=0)
    for setting in settings:
        about = first_part(setting) if short else setting.description
        yield from wrapped(f"{summary(setting)}  {about}", f"{indent}{setting.key:<{keys}}  ")


def first_part(setting: SettingDescription) -> str:
    """Return the description up to its first full stop or semicolon."""
    return _FIRST_PART.split(setting.description, maxsplit=1)[0].rstrip(".")


def summary(setting: SettingDescription) -> str:
    unit = f" of {setting.unit}" if setting.unit and "number" in setting.type else ""
    default = setting.default if setting.default.startswith("made") else f"default {setting.default}"
    return f"({setting.type}{unit}; {'required' if setting.default == 'required' else default})"


def with_aliases(schema: dict[str, Any], aliases: Mapping[str, Alias]) -> dict[str, Any]:
    """Return a schema that also allows other projects' names of settings, each with the key that it sets."""
    for name, alias in aliases.items():
        node = schema
        *tables, last = name.split(".")
        for part in tables:
            node = node.setdefault("properties", {}).setdefault(part, {"type": "object", "additionalProperties": False})
            if "$ref" in node:
                node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        note = f"Another project's name of {' and '.join(alias.keys)}."
        node.setdefault("properties", {}).setdefault(last, {"description": note, "deprecated": True})
    return schema


def _sections(known: Reference) -> Iterator[str]:
    width = max(map(len, known.sections))
    for name, about in known.sections.items():
        count = sum(setting.section == name for setting in known.settings.values())
        yield from wrapped(f"{count:>3}  {about}", f"{name:<{width}}  ", extra=5)
    yield ""
    yield "next: penstock settings SECTION, or penstock settings SECTION.KEY"


def _presets(presets: Mapping[str, str]) -> str:
    by_value: dict[str, list[str]] = {}
    for name, value in presets.items():
        by_value.setdefault(value, []).append(name)
    return "; ".join(f"{value} in {', '.join(names)}" for value, names in by_value.items())


def _similar(key: str, renamed: Mapping[str, str]) -> list[str]:
    """Return other projects' keys that are answered with this one, but differ in meaning or values."""
    return sorted(name for name, target in renamed.items() if key in target.replace(",", " ").split())


def _in_a_file(setting: SettingDescription) -> str:
    section, _, key = setting.key.rpartition(".")
    example = setting.default if setting.default[:1] in '"[{-0123456789tf' else "VALUE"
    return f"[{section}] {key} = {example}"


def wrapped(text: str, indent: str, *, extra: int = 0, width: int | None = None) -> list[str]:
    """Return a text in lines, each after the first indented like it and by ``extra``, for the terminal or ``width``."""
    width = width or min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((100, 24)).columns))
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent if indent == "# " else " " * (len(indent) + extra),
        break_long_words=False,
        break_on_hyphens=False,
    )
