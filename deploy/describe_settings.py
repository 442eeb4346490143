"""Describe every setting of a settings class in plain values, from the class itself; pure.

The help of the command, `penstock settings`, shell completion and the documentation print these descriptions. They are
stored beside the command (`python -m penstock.deploy.write_reference`), because importing every settings class takes
longer than a help text may.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from penstock.protocol.config.run_file import toml_text
from penstock.protocol.config.schema_keys import is_model, members_of
from penstock.protocol.config.setting_description import ANY_NAME, MADE_AT_START, REQUIRED, SettingDescription

# Unit of a number, by the end of its key; a number without unit matches none.
_UNITS = (
    (r"_s$", "seconds"),
    (r"_h$", "hours"),
    (r"_mb$", "MB"),
    (r"_bytes$", "bytes"),
    (r"(_tokens|context_length|max_model_len|max_num_batched_tokens)$", "tokens"),
    (r"(^|[._])steps$|checkpoint_every$|eval\.every$|retrained_interval$|resume_older_step$", "optimizer steps"),
    (r"(max_staleness|keep_versions|anchor_every|check_weights_every)$", "versions"),
    (r"(groups_per_step|groups_per_message)$", "groups"),
    (r"(group_size|eval\.samples|check_texts)$", "completions"),
    (r"(eval\.num_prompts)$", "prompts"),
    (r"(data\.max_samples|sft\.batch_size)$", "rows"),
    (r"rollout\.max_attempts$", "generations"),
    (r"_attempts$", "deliveries"),
    (r"(packs_in_flight|max_packs|reward_service\.concurrency)$", "packs"),
    (r"(max_running|max_running_requests|max_num_seqs)$", "sequences"),
    (r"(num_ranks|_workers)$", "processes"),
    (r"keep_checkpoints$", "checkpoints"),
    (r"kl_horizon$", "trajectories"),
    (r"oldest_patience$", "durations of the last step"),
    (r"max_mismatch$", "nats per token"),
    (r"kl_target$", "nats per token"),
    (r"(tp_size|ep_size|dp_size|gpus_per_engine)$", "GPUs"),
)
_NUMBERS = {int: "whole number", float: "number"}
_NAMES: dict[Any, str] = {**_NUMBERS, bool: "true or false", str: "text", Path: "path", Any: "any value"}
_LIMITS = {  # by the name of the constraint
    "ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}", "min_length": "at least {} {}",
    "max_length": "at most {} {}", "pattern": "matching {}",
}  # fmt: skip
_CHOICE_PATTERN = re.compile(r"^\^\(([a-z|_]+)\)\$$")


def describe(
    services: Mapping[str, type[BaseModel]],
    *,
    names: Mapping[str, Sequence[str]],
    presets: Mapping[str, Mapping[str, Any]],
    preset_key: str,
) -> list[SettingDescription]:
    """Return every setting of the services (by name), in the order of their sections.

    ``names`` has the built-in names of keys whose value is one of registered names, ``presets`` what each preset sets in its
    section, and ``preset_key`` names a preset.
    """
    section = preset_key.rpartition(".")[0]
    fields: dict[str, tuple[FieldInfo, list[str]]] = {}
    for service, settings in services.items():
        for key, field in _fields(settings):
            fields.setdefault(key, (field, []))[1].append(service)
    default_preset = str(fields[preset_key][0].default) if preset_key in fields else ""
    described = []
    for key, (field, readers) in fields.items():
        table, _, name = key.rpartition(".")
        preset_values = {
            preset: as_toml(values[name]) for preset, values in presets.items() if table == section and name in values
        }
        described.append(
            _describe(key, field, readers, names.get(key, ()), preset_values, preset_values.get(default_preset))
        )
    return described


def as_toml(value: Any) -> str:
    return toml_text(to_jsonable_python(value))


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        nested = next(
            (member for member in members_of(field.annotation) if get_origin(member) is dict or is_model(member)), None
        )
        if nested is not None and is_model(nested):
            yield from _fields(nested, f"{prefix}{name}.")
        elif nested is not None and is_model(get_args(nested)[1]):
            yield f"{prefix}{name}", field
            yield from _fields(get_args(nested)[1], f"{prefix}{name}.{ANY_NAME}.")
        else:
            yield f"{prefix}{name}", field


def _describe(
    key: str,
    field: FieldInfo,
    services: Sequence[str],
    names: Sequence[str],
    presets: Mapping[str, str],
    of_default_preset: str | None,
) -> SettingDescription:
    members = members_of(field.annotation)
    plain = [member for member in members if member is not type(None)]
    values = _values(plain, field)
    is_number = any(member in _NUMBERS for member in plain)
    unit = next((unit for pattern, unit in _UNITS if is_number and re.search(pattern, key)), "")
    counted = "entries" if get_origin(plain[0]) in (list, tuple, dict) else "characters"
    limits = ", ".join(
        filter(None, (_limits(some, counted) for some in (field.metadata, *_inner_metadata(field.annotation))))
    )
    if values:
        limits = f"one of {', '.join(values)}"
    elif names:
        limits = f"built in: {', '.join(names)}"
    if type(None) in members:
        limits = "; or ".join(filter(None, (limits, '"none"'))) if limits else 'also "none"'
    return SettingDescription(
        key=key,
        type=" or ".join(dict.fromkeys(_type_name(member) for member in plain)),
        default=_default(field) if of_default_preset is None else of_default_preset,
        allowed=limits,
        values=tuple(values or names),
        unit=unit,
        description=field.description or "",
        services=tuple(services),
        presets=presets,
        secret=not field.repr,
    )


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return MADE_AT_START
    return REQUIRED if field.default is PydanticUndefined else as_toml(field.default)


def _values(members: Sequence[Any], field: FieldInfo) -> list[str]:
    if members == [bool]:
        return ["true", "false"]
    choices = [str(value) for member in members if get_origin(member) is Literal for value in get_args(member)]
    for constraint in field.metadata:
        if choice := _CHOICE_PATTERN.match(str(getattr(constraint, "pattern", ""))):
            choices += choice[1].split("|")
    return choices


def _type_name(annotation: Any, *, many: bool = False) -> str:
    members = members_of(annotation)
    if len(members) != 1:
        return " or ".join(
            dict.fromkeys(_type_name(member, many=many) for member in members if member is not type(None))
        )
    (annotation,) = members
    origin = get_origin(annotation)
    parts: tuple[Any, ...] = get_args(annotation)
    if origin is Literal:
        name = _type_name(type(parts[0]))
    elif origin is dict:
        return f"table of {_type_name(parts[1], many=True)}"
    elif origin is tuple and Ellipsis not in parts:
        return f"list of {len(parts)} {_type_name(parts[0], many=True)}"
    elif origin in (list, tuple):
        return f"list of {_type_name(parts[0], many=True)}"
    else:
        name = "table" if is_model(annotation) else _NAMES.get(annotation) or "text"
    return f"{name}s" if many and name not in ("true or false",) else name


def _limits(metadata: Sequence[Any], counted: str) -> str:
    return ", ".join(
        text.format(f"{value:g}" if isinstance(value, float) else value, counted)
        for name, text in _LIMITS.items()
        for constraint in metadata
        if (value := getattr(constraint, name, None)) is not None
    )


def _inner_metadata(annotation: Any) -> Iterator[Sequence[Any]]:
    for member in get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ():
        if get_origin(member) is Annotated:
            infos = get_args(member)[1:]
            yield [
                constraint
                for info in infos
                for constraint in (info.metadata if isinstance(info, FieldInfo) else [info])
            ]
