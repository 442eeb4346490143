"""The parts of an algorithm: registries, presets, those that a configuration chooses, and settings that would do nothing; imports no torch.

A preset says what its name sets, what it is called elsewhere, and what is not offered, with the reason. It sets
only what makes the algorithm; everything else keeps its default, and every part of a preset can be overridden. A preset
that belongs to one part is in that part's file; those of `presets.toml` combine parts. docs/algorithms.md has formulas, sources and
differences from the papers.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from penstock.protocol.extensions import Extension, Registry
from penstock.trainer.algorithm.corrections.interface import Correction
from penstock.trainer.algorithm.estimators.interface import Estimator
from penstock.trainer.algorithm.filters.interface import Filter
from penstock.trainer.algorithm.group_filters.interface import GroupFilter
from penstock.trainer.algorithm.losses.interface import Loss
from penstock.trainer.algorithm.parts import Part

P = TypeVar("P", bound=Part[Any])


def _registry(kind: str, expected: type[P], folder: str) -> Registry[P]:
    return Registry(kind, expected, package=f"penstock.trainer.algorithm.{folder}", group=f"penstock.{folder}")


LOSSES: Final[Registry[Loss[Any]]] = _registry("loss", Loss, "losses")
ESTIMATORS: Final[Registry[Estimator[Any]]] = _registry("advantage estimator", Estimator, "estimators")
FILTERS: Final[Registry[Filter[Any]]] = _registry("trajectory filter", Filter, "filters")
GROUP_FILTERS: Final[Registry[GroupFilter[Any]]] = _registry("group filter", GroupFilter, "group_filters")
CORRECTIONS: Final[Registry[Correction[Any]]] = _registry("correction", Correction, "corrections")
ALL: Final[tuple[Registry[Any], ...]] = (LOSSES, ESTIMATORS, FILTERS, GROUP_FILTERS, CORRECTIONS)

BY_KEY: dict[str, Registry[Any]] = {
    "loss": LOSSES, "advantage": ESTIMATORS, "filters": FILTERS, "group_filters": GROUP_FILTERS,
    "corrections": CORRECTIONS,
}  # fmt: skip


DEFAULT = "async_grpo"

_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
COMBINED: dict[str, dict[str, Any]] = _TABLE["presets"]
ALIASES: dict[str, str] = _TABLE["aliases"]
REFUSED: dict[str, str] = _TABLE["refused"]

# What a setting that belongs to no part does nothing without: any one of these must be on.
_SWITCHES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("overlong_buffer",): ("overlong_factor",),
    ("efficiency_spread", "efficiency_failure_spread"): ("efficiency_success",),
    ("reward_norm",): ("reward_shift", "reward_scale", "asym_clip"),
    ("ess_level",): ("ess_power", "ess_floor"),
    ("kl_coefficient",): ("kl_form", "kl_unbiased"),
    ("reward_kl_coefficient",): ("reward_kl_form",),
    ("kl_coefficient", "reward_kl_coefficient"): ("kl_target",),
    ("kl_coefficient", "reward_kl_coefficient", "dpo_coefficient"): ("reference_path", "reference_device"),
    ("kl_target",): ("kl_horizon",),
    ("distill_coefficient",): ("distill_form", "distill_clip"),
}
_OFF = (None, 0.0, "none", "off")


def _presets() -> dict[str, Mapping[str, Any]]:
    presets: dict[str, Mapping[str, Any]] = dict(COMBINED)
    for registry in ALL:
        for part in registry.built_in.values():
            for name, values in part.presets.items():
                if name in presets:
                    raise TypeError(f"two presets are named {name!r}; rename the one of {registry.kind} {part.name}")
                presets[name] = values
    return dict(sorted(presets.items()))


PRESETS: dict[str, Mapping[str, Any]] = _presets()


def canonical(name: str) -> str:
    """Return the preset that a name means in any project's spelling; raises ValueError with the reason or the list."""
    plain = name.lower().replace("-", "_").replace(" ", "_").replace(".", "")
    plain = ALIASES.get(plain, plain)
    if plain in PRESETS:
        return plain
    if plain in REFUSED:
        raise ValueError(f"{name!r} is not offered: {REFUSED[plain]}")
    near = difflib.get_close_matches(plain, [*PRESETS, *ALIASES], n=1)
    hint = f"did you mean {ALIASES.get(near[0], near[0])}? " if near else ""
    raise ValueError(f"unknown algorithm {name!r}; {hint}known are {', '.join(sorted(PRESETS))}")


@dataclass(frozen=True, slots=True)
class ChosenParts:
    loss: Extension[Loss[Any]]
    estimator: Extension[Estimator[Any]]
    filters: tuple[Extension[Filter[Any]], ...]
    group_filters: tuple[Extension[GroupFilter[Any]], ...]
    corrections: tuple[Extension[Correction[Any]], ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ChosenParts:
        return cls(
            LOSSES.find(values["loss"]),
            ESTIMATORS.find(values["advantage"]),
            tuple(sorted(_found(FILTERS, values, "filters"), key=lambda one: one.value.precedence)),
            tuple(sorted(_found(GROUP_FILTERS, values, "group_filters"), key=lambda one: one.value.precedence)),
            tuple(_found(CORRECTIONS, values, "corrections")),
        )

    def __iter__(self) -> Iterator[Extension[Any]]:
        yield from (self.loss, self.estimator, *self.filters, *self.group_filters, *self.corrections)

    @property
    def option_names(self) -> frozenset[str]:
        return frozenset(name for part in self for name in part.value.option_names)

    @property
    def digests(self) -> dict[str, str]:
        kinds = {
            Loss: LOSSES, Estimator: ESTIMATORS, Filter: FILTERS, GroupFilter: GROUP_FILTERS, Correction: CORRECTIONS,
        }  # fmt: skip
        return {f"extension {kinds[type(part.value)].kind} {part.name}": part.digest for part in self if part.digest}


def _found(registry: Registry[Any], values: Mapping[str, Any], key: str) -> Iterator[Extension[Any]]:
    for name, part in registry.built_in.items():
        if part.switch and values[part.switch] != part.options.model_fields[part.switch].default:
            yield Extension(name, part)
    for name in dict.fromkeys(values[key]):
        yield registry.find(name)


def option_fields(registries: Sequence[Registry[Any]] = ALL) -> dict[str, FieldInfo]:
    """Return the options of all built-in parts by name; raises TypeError when two parts declare one differently."""
    fields: dict[str, FieldInfo] = {}
    for registry in registries:
        for part in registry.built_in.values():
            for name, info in part.options.model_fields.items():
                if not is_same_option(fields.setdefault(name, info), info):
                    raise TypeError(f"{registry.kind} {part.name}: option {name} is declared differently elsewhere")
    return fields


def is_same_option(option: FieldInfo, other: FieldInfo) -> bool:
    return (option.annotation, option.default, option.metadata, option.description) == (
        other.annotation, other.default, other.metadata, other.description,
    )  # fmt: skip


def options_of_user_code(
    parts: ChosenParts, values: Mapping[str, Any], keys: Mapping[str, FieldInfo]
) -> dict[str, Any]:
    """Return [algorithm.options] with every option of the chosen user code, at its default where none is set.

    Raises ValueError for an option that no chosen part has, for a wrong value, and for an option that has the name of a key of
    [algorithm] and another declaration.
    """
    filled: dict[str, Any] = {}
    for extension in parts:
        if not extension.digest:
            continue
        part: Part[Any] = extension.value
        for name in part.option_names:
            if name in keys and not is_same_option(keys[name], part.options.model_fields[name]):
                raise ValueError(
                    f"{extension.name}: option {name} is declared otherwise than algorithm.{name}; rename it, or inherit "
                    "the options class that declares that key"
                )
        added = [name for name in part.option_names if name not in keys]
        text = json.dumps({name: values[name] for name in added if name in values}, default=str)
        try:  # JSON's strictness: a list is a tuple and a text a path, but "5" is no number
            options = part.options.model_validate_json(text, strict=True)
        except ValidationError as err:
            raise ValueError(explain(err, "algorithm.options")) from None
        filled |= {name: options.model_dump(mode="json")[name] for name in added}
    unknown = sorted(set(values) - set(filled))
    if unknown:
        near = difflib.get_close_matches(unknown[0], filled, n=1)
        hint = f"did you mean algorithm.options.{near[0]}?" if near else f"known are {', '.join(filled) or 'none'}"
        raise ValueError(
            f"unknown key algorithm.options.{unknown[0]}; {hint}; the table holds the options of your own loss, "
            "estimator, filters and corrections"
        )
    return filled


def explain(error: ValidationError, table: str) -> str:
    first = error.errors(include_url=False)[0]
    text = str(first["msg"]).removeprefix("Value error, ").replace("Input should be ", "expected ")
    key = ".".join(map(str, first["loc"]))
    return f"{table}.{key}: {text}" if key else text


def refuse_idle(changed: frozenset[str], values: Mapping[str, Any], parts: ChosenParts) -> None:
    read = parts.option_names
    by_choice: set[str] = set()
    for key, registry, chosen in (("loss", LOSSES, parts.loss), ("advantage", ESTIMATORS, parts.estimator)):
        known = {name for part in registry.built_in.values() for name in part.option_names}
        by_choice |= known
        idle = sorted((changed & known) - read)
        if idle:
            raise ValueError(
                f"algorithm.{idle[0]} does nothing with algorithm.{key} = {values[key]}, "
                f"which reads {', '.join(chosen.value.option_names) or 'none of these'}"
            )
    for registry, key in ((FILTERS, "filters"), (GROUP_FILTERS, "group_filters"), (CORRECTIONS, "corrections")):
        _refuse_parts_off(registry, key, changed - by_choice - read)
    for switches, settings in _SWITCHES.items():
        idle = sorted(changed & set(settings))
        if idle and all(values[switch] in _OFF for switch in switches):
            needed = " and ".join(f"algorithm.{switch}" for switch in switches)
            raise ValueError(f"algorithm.{idle[0]} does nothing while {needed} is off; set that too")


def _refuse_parts_off(registry: Registry[Any], key: str, unread: frozenset[str]) -> None:
    for part in registry.built_in.values():
        idle = sorted(unread & (set(part.option_names) - {part.switch}))
        if idle and part.switch:
            raise ValueError(f"algorithm.{idle[0]} does nothing while algorithm.{part.switch} is off; set that too")
        if idle:
            raise ValueError(
                f"algorithm.{idle[0]} does nothing while algorithm.{key} does not name {part.name}; add it there"
            )
