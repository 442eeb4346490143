"""Find the keys of a settings class: their spelling in the schema, their annotations, and what an unknown key may have meant."""

from __future__ import annotations

import types
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from penstock.protocol.config.foreign_config import ABSENT, ALIASES, REFUSED, advice, ending_in
from penstock.protocol.config.sources import KeyPath

SECTIONS = (
    "run", "nats", "s3", "model", "data", "rollout", "reward", "algorithm", "critic", "trainer", "eval", "metrics",
    "sft", "dpo", "rm", "worker", "teacher", "environment", "sglang", "vllm", "placement", "reward_service", "retention",
    "tracker", "tracking",
)  # fmt: skip
_NEAR = 0.75  # of two dotted keys, whose sections alone make many of them alike


class UnknownKeyError(Exception):
    """A path that is not in the schema; ``unknown`` is its shortest unknown prefix, reported once per source."""

    def __init__(self, unknown: KeyPath, text: str) -> None:
        super().__init__(text)
        self.unknown = unknown


def is_secret(settings_class: type[BaseModel], path: KeyPath) -> bool:
    """Return True if a value must not be shown: its field has ``repr=False``."""
    node: Any = settings_class
    for part in path:
        if is_model(node):
            field = node.model_fields[part]
            if not field.repr:
                return True
            node = table_of(field.annotation)
        else:  # a table whose keys are the user's
            node = table_of(get_args(node)[1]) if get_origin(node) is dict else None
    return False


def locate(settings_class: type[BaseModel], path: KeyPath) -> tuple[KeyPath, Any]:
    node: Any = settings_class
    field_path: KeyPath = ()
    for depth, part in enumerate(path):
        table = table_of(node)
        if is_model(table):
            name = part if part in table.model_fields else part.replace("-", "_")
            if name not in table.model_fields:
                raise unknown_key(settings_class, path, depth, tuple(table.model_fields))
            node = table.model_fields[name].annotation
        elif table is not None:
            name, node = part, get_args(table)[1]
        elif node is Any:  # options of an extension, which it checks itself
            name = part
        else:
            raise unknown_key(settings_class, path, depth)
        field_path = (*field_path, name)
    return field_path, node


def spelt(path: KeyPath) -> str:
    dotted = ".".join(part.replace("-", "_") for part in path)
    return dotted.lower() if dotted.isupper() else dotted


def unknown_key(settings_class: type[BaseModel], path: KeyPath, depth: int, fields: KeyPath = ()) -> UnknownKeyError:
    dotted = spelt(path)
    spelling = tuple(dotted.split("."))
    if dotted in REFUSED:
        return UnknownKeyError(spelling, f"{dotted} is refused: {REFUSED[dotted]}")
    instead = advice(dotted)
    if instead:
        return UnknownKeyError(spelling, f"{dotted} is a key of another project; {instead}")
    if depth == 0 and len(path) > 1:
        similar = get_close_matches(spelling[0], SECTIONS, n=1)
        hint = f"did you mean [{similar[0]}]?" if similar else f"the sections are {', '.join(SECTIONS)}"
        return UnknownKeyError(spelling[:1], f"unknown section [{spelling[0]}]; {hint}")
    known = [".".join(leaf) for leaf in _schema_leaves(settings_class)]
    siblings = [name for name in known if depth and name.startswith(".".join(spelling[:depth]) + ".")]
    if not siblings and depth:  # in a table whose names are the user's: [reward.define.NAME]
        siblings = [".".join((*spelling[:depth], name)) for name in fields]
    near = [name.rpartition(".")[2] for name in siblings]
    is_theirs = depth > 0 and spelling[-1] in ABSENT  # a similar key would do something else
    similar = [] if is_theirs else get_close_matches(spelling[-1], near, n=1, cutoff=0.7)
    similar = [siblings[near.index(name)] for name in similar]
    similar += [name for name in known if name.rpartition(".")[2] == spelling[-1]]  # right key, wrong section
    if not similar and depth:  # a key that another project writes without a section, or in another one
        if spelling[-1] in ALIASES:
            keys = ALIASES[spelling[-1]].keys
            names = {key.rpartition(".")[2] for key in keys}
            candidates = [
                sibling for sibling in siblings if sibling.rpartition(".")[2] in names
            ]  # sft.lr, not trainer.lr
            similar = candidates or list(keys)
        elif instead := advice(spelling[-1]):
            return UnknownKeyError(spelling, f"unknown key {dotted}; {instead}")
    if not similar and (theirs := ending_in(spelling[-1])):
        if theirs not in ALIASES:
            return UnknownKeyError(spelling, f"unknown key {dotted}; as {theirs}: {advice(theirs)}")
        similar = list(ALIASES[theirs].keys)
    similar += get_close_matches(dotted, known, n=1, cutoff=_NEAR)
    hint = f"did you mean {similar[0]}?" if similar else f"known here: {', '.join(siblings or SECTIONS)}"
    return UnknownKeyError(spelling, f"unknown key {dotted}; {hint}")


def _schema_leaves(model: type[BaseModel], prefix: KeyPath = ()) -> Iterator[KeyPath]:
    for name, field in model.model_fields.items():
        table = table_of(field.annotation)
        if is_model(table):
            yield from _schema_leaves(table, (*prefix, name))
        else:
            yield (*prefix, name)


def members_of(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return members_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in members_of(part))
    return (annotation,)


def table_of(annotation: Any) -> Any:
    return next((m for m in members_of(annotation) if get_origin(m) is dict or is_model(m)), None)


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
