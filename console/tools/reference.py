"""The descriptions of settings that the command prints; `deploy/write_reference.py` writes their files."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.protocol.config.setting_description import SettingDescription

FILE = Path(__file__).with_name("reference.json")
SCHEMA = Path(__file__).with_name("run.schema.json")


@dataclass(frozen=True, slots=True)
class Reference:
    sections: Mapping[str, str]
    settings: Mapping[str, SettingDescription]


@functools.cache
def load() -> Reference:
    document = json.loads(FILE.read_text(encoding="utf-8"))
    return Reference(
        sections=document["sections"],
        settings={one["key"]: SettingDescription.from_document(one) for one in document["settings"]},
    )


def nearest(word: str) -> list[str]:
    """Return the keys nearest to a word that is none: the same name in any section, else similar ones."""
    keys = list(load().settings)
    same = [key for key in keys if key.rpartition(".")[2] == word.rpartition(".")[2]]
    return same or difflib.get_close_matches(word, [*load().sections, *keys], n=3, cutoff=0.7)
