"""What becomes of a key of another system: taken as a setting, answered with the one to use, or with why there is none.

For users who migrate a configuration. The table is `foreign_keys.json`: for each system the keys that are ``taken``
(exactly the same meaning: the settings that it sets), ``renamed`` (another meaning or other values: the setting to
use), ``absent`` (why there is none, and what does its work) and the ``prefixes`` of keys with one answer. Of the absent
keys and prefixes, ``harmless`` names those that change nothing in what their system trains either; every other one is a
decision in an import. `penstock config import` asks its ``rules`` first, which derive settings from a value and the
keys beside it (`deploy/config_import/rules.py`). A text ``$name`` stands for an entry of ``texts``, ``values``,
``aliases`` or ``rules``. A key that several systems have is answered as the first of `SYSTEMS` has it; `penstock config
import` reads the table of the file's system first. Similar keys are refused with advice: nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("foreign_keys.json").read_text(encoding="utf-8"))
_INEXACT = (
    "tokens would come from another distribution than the one whose log-probabilities the engine reports and the "
    "trainer computes, which makes the importance ratio wrong; remove it (rollout.temperature is applied on both sides)"
)
_OF_SAMPLING = (
    "top_p", "top_k", "min_p", "typical_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "min_new_tokens", "logit_bias", "sampling_params",
)  # fmt: skip
# Settings of other systems that would make the training data wrong here.
REFUSED: dict[str, str] = {f"rollout.{name}": _INEXACT for name in _OF_SAMPLING}
# Values of accepted keys that have no counterpart here.
_ABSENT_VALUES: dict[tuple[str, object], str] = {
    ("trainer.save_freq", -1): "a run is resumed from its checkpoints, so they are always made; set "
    "trainer.checkpoint_every to trainer.steps for one at the end",
    **dict.fromkeys(
        [("model.lora.targets", word) for word in ("all-linear", "all_linear", "all")],
        "leave model.lora.targets out: every linear layer but the head then gets an adapter",
    ),
}


@dataclass(frozen=True, slots=True)
class Alias:
    keys: tuple[str, ...]
    values: Mapping[Any, Any] = field(default_factory=dict)
    as_list: bool = False  # a single text is a list of one
    left_out: tuple[str, ...] = ()  # entries of a list that are always on here

    def value(self, theirs: Any) -> Any:
        if self.left_out:
            listed = [theirs] if isinstance(theirs, str) and theirs not in ("None", "none", "null") else theirs
            return [entry for entry in listed if entry not in self.left_out] if isinstance(listed, list) else listed
        if self.as_list and isinstance(theirs, str) and theirs not in ("None", "none", "null"):
            return [theirs]
        return self.values.get(theirs, theirs) if isinstance(theirs, (str, int)) else theirs


@dataclass(frozen=True, slots=True)
class ForeignSystem:
    taken: Mapping[str, Alias]
    renamed: Mapping[str, str]
    absent: Mapping[str, str]
    prefixes: Mapping[str, str]
    harmless: frozenset[str]  # absent keys, and prefixes, that change nothing in what that system trains either
    rules: Mapping[str, Any]  # of `penstock config import` alone, as is the next
    spelled: Mapping[str, str]  # a key of a newer version: the one that the tables have


def _alias(form: Any) -> Alias:
    if isinstance(form, str) and form.startswith("$"):
        form = _TABLE["aliases"][form[1:]]
    if not isinstance(form, dict):
        return Alias((form,) if isinstance(form, str) else tuple(form))
    values = form.get("values", [])
    pairs = _TABLE["values"][values[1:]] if isinstance(values, str) else values
    return Alias(tuple(form["keys"]), dict(pairs), form.get("as_list", False), tuple(form.get("left_out", ())))


def _texts(answers: Mapping[str, str]) -> dict[str, str]:
    return {key: _TABLE["texts"][text[1:]] if text.startswith("$") else text for key, text in answers.items()}


def _system(table: Mapping[str, Any]) -> ForeignSystem:
    taken = {key: _alias(form) for key, form in table["taken"].items()}
    renamed, absent, prefixes = (_texts(table[part]) for part in ("renamed", "absent", "prefixes"))
    without_effect = {f"${name}" for name in _TABLE["harmless_texts"]}
    harmless = [key for part in ("absent", "prefixes") for key, text in table[part].items() if text in without_effect]
    return ForeignSystem(
        taken,
        renamed,
        absent,
        prefixes,
        frozenset(harmless + table["harmless"]),
        {key: _TABLE["rules"][form[1:]] if form[0] == "$" else form for key, form in table.get("rules", {}).items()},
        table.get("spelled", {}),
    )


SYSTEMS: dict[str, ForeignSystem] = {name: _system(table) for name, table in _TABLE["systems"].items()}
ESTIMATOR = _alias("$estimator")
NEUTRAL: Mapping[str, list[Any]] = _TABLE["neutral"]  # by the end of a key: values with which it changes nothing


def _joined(order: list[ForeignSystem]) -> tuple[dict[str, Alias], dict[str, str], dict[str, str]]:
    tables: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = ({}, {}, {})
    for system in order:
        known = set[str]().union(*tables)
        for table, theirs in zip(tables, (system.taken, system.renamed, system.absent), strict=True):
            table.update({key: entry for key, entry in theirs.items() if key not in known})
    return tables


ALIASES, RENAMED, ABSENT = _joined(list(SYSTEMS.values()))
_PREFIXES: dict[str, str] = {key: why for system in SYSTEMS.values() for key, why in system.prefixes.items()}


def value_advice(dotted: str, value: object) -> str | None:
    """Return what to write instead of another project's value of a key, or of one in a list; None for others."""
    values = value if isinstance(value, list) else [value]
    return next((why for v in values if isinstance(v, (str, int)) and (why := _ABSENT_VALUES.get((dotted, v)))), None)


def advice(dotted: str) -> str | None:
    """Return what to use instead of another project's key; None for an unknown key."""
    if dotted in RENAMED:
        return f"use {RENAMED[dotted]}"
    return ABSENT.get(dotted) or prefix_advice(dotted, _PREFIXES)


def ending_in(last: str) -> str | None:
    """Return the key of another project that ends with a name, for a name that was written without its sections."""
    dotted = f".{last}"
    return next((key for table in (ALIASES, RENAMED, ABSENT) for key in table if key.endswith(dotted)), None)


def prefix_advice(dotted: str, prefixes: Mapping[str, str]) -> str | None:
    """Return the answer for all keys that begin as this one does, by the longest such beginning."""
    prefix = prefix_of(dotted, prefixes)
    return prefixes[prefix] if prefix else None


def prefix_of(dotted: str, prefixes: Mapping[str, str]) -> str:
    """Return the longest prefix in a table that a key begins with; empty for none."""
    return max((known for known in prefixes if dotted.startswith(known) or dotted + "." == known), key=len, default="")
