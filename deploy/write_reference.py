"""Describe every setting and every flag of the command in two files that the command reads.

    python -m penstock.deploy.write_reference            (write both files anew, after a change of settings or flags)

``console/tools/reference.json``: the settings of all services and the flags of the verbs that start another process,
from their settings classes and argument parsers. ``console/tools/run.schema.json``: the JSON Schema of a run file.
They are files because importing the classes takes longer than a help text may; a test compares them with the code.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock.agents.hosting import list_environments, register, try_environment
from penstock.agents.hosting import serve as serve_environment
from penstock.console.tools import reference
from penstock.deploy import bootstrap, certificates, local, quickstart, train_attached, train_local
from penstock.deploy.config_import import __main__ as config_import
from penstock.deploy.config_show import SERVICES
from penstock.deploy.plan import __main__ as plan
from penstock.deploy.recipe import __main__ as recipe
from penstock.protocol.config.describe_settings import describe
from penstock.protocol.config.run_file import SECTIONS
from penstock.reward_model import __main__ as reward_model
from penstock.reward_service.hosting import serve, serve_grader, serve_judge
from penstock.reward_service.registry.built_in import BUILT_INS
from penstock.rollout_service.engines.engine_kind import ENGINES
from penstock.rollout_service.environments.environment import ENVIRONMENTS
from penstock.trainer.algorithm.presets import PRESETS
from penstock.trainer.algorithm.registries import CORRECTIONS, ESTIMATORS, FILTERS, GROUP_FILTERS, LOSSES
from penstock.trainer.commands import data_check

_NAMES = ("trainer", "rollout worker", "reward service", "trackers")
_CLEARS = ["none", "None", "null"]  # TOML has no null: these words stand for it, see `run_file`

_PARSERS: dict[str, Callable[[Sequence[str]], object]] = {
    "quickstart": quickstart.main,
    "train": train_attached.main,
    "train --local": train_local.main,
    "up": local.main,
    "bootstrap": bootstrap.main,
    "certs": certificates.main,
    "data check": data_check.main,
    "config import": config_import.main,
    "plan": plan.main,
    "recipe": recipe.main,
    "env serve": serve_environment.main,
    "env register": register.main,
    "env drain": register.drain,
    "env resume": register.resume,
    "env test": try_environment.main,
    "env list": list_environments.main,
    "reward serve": serve.main,
    "reward serve-judge": serve_judge.main,
    "reward serve-grader": serve_grader.main,
    "reward serve-model": reward_model.main,
}


def reference_document() -> dict[str, Any]:
    """Return sections, settings and flags as plain JSON values."""
    settings = describe(
        dict(zip(_NAMES, SERVICES, strict=True)),
        names={
            "algorithm.name": tuple(PRESETS),
            "algorithm.loss": tuple(LOSSES.built_in),
            "algorithm.advantage": tuple(ESTIMATORS.built_in),
            "algorithm.filters": tuple(FILTERS.built_in),
            "algorithm.group_filters": tuple(GROUP_FILTERS.built_in),
            "algorithm.corrections": tuple(CORRECTIONS.built_in),
            "worker.engine": tuple(ENGINES.built_in),
            "rollout.environment": tuple(ENVIRONMENTS.built_in),
            "reward.name": tuple(BUILT_INS),
        },
        presets=PRESETS,
        preset_key="algorithm.name",
    )
    return {
        "sections": {name: _first_line(_section(name)) for name in SECTIONS},
        "settings": [one.to_document() for one in settings],
        "verbs": {verb: _flags(_parser_of(main)) for verb, main in _PARSERS.items()},
    }


def run_file_schema() -> dict[str, Any]:
    """Return the JSON Schema of a run file, whose every key may be left to another file or an override."""
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [(one, "validation") for one in SERVICES]
    by_class, document = models_json_schema(models, ref_template="#/$defs/{model}")
    definitions = document["$defs"]
    sections: dict[str, Any] = {}
    for reference_to in by_class.values():
        service = definitions.pop(reference_to["$ref"].rpartition("/")[2])
        sections |= {name: schema for name, schema in service["properties"].items() if name not in sections}
    for schema in sections.values():
        schema.pop("default", None)
        if "$ref" in schema:  # not a list of tables, each of which is whole
            definitions[schema["$ref"].rpartition("/")[2]].pop("required", None)
    return _for_toml(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "Penstock run file",
            "type": "object",
            "properties": {name: sections[name] for name in SECTIONS},
            "additionalProperties": False,
            "$defs": definitions,
        }
    )


def _for_toml(schema: Any) -> Any:
    """Return a schema without generated titles, with the words that stand for null in its place."""
    if isinstance(schema, list):
        return [_for_toml(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema == {"type": "null"}:
        return {"enum": _CLEARS}
    is_generated = isinstance(schema.get("title"), str) and schema.get("title") != "Penstock run file"
    found = {key: _for_toml(value) for key, value in schema.items() if not (key == "title" and is_generated)}
    if "default" in found and found["default"] is None:
        found["default"] = _CLEARS[0]
    return found


def _section(name: str) -> type[BaseModel]:
    field = next(service.model_fields[name] for service in SERVICES if name in service.model_fields)
    found = field.annotation
    while not isinstance(found, type):  # the tables of a list
        found = get_args(found)[0]
    return found


def _first_line(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "").partition("\n")[0]


def _parser_of(main: Callable[[Sequence[str]], object]) -> argparse.ArgumentParser:
    """Return the argument parser of a command: the one that answers ``--help``."""
    with _caught_help() as caught, contextlib.suppress(SystemExit):
        main(["--help"])
    [parser] = caught
    return parser


@contextlib.contextmanager
def _caught_help() -> Iterator[list[argparse.ArgumentParser]]:
    """Collect the parsers that would print their help."""
    caught: list[argparse.ArgumentParser] = []
    original = argparse.ArgumentParser.print_help
    argparse.ArgumentParser.print_help = lambda self, file=None: caught.append(self)
    try:
        yield caught
    finally:
        argparse.ArgumentParser.print_help = original


def _flags(parser: argparse.ArgumentParser) -> dict[str, Any]:
    actions = [action for action in parser._actions if action.dest != "help"]
    return {
        "flags": [
            {
                "names": list(action.option_strings),
                "value": _value(action),
                "help": action.help or "",
                "choices": [str(choice) for choice in action.choices or ()],
                "repeatable": isinstance(action, argparse._AppendAction) or action.nargs in ("+", "*"),
            }
            for action in actions
        ],
        "epilog": parser.epilog or "",
    }


def _value(action: argparse.Action) -> str:
    """Return what stands for a flag's value in help texts; empty for a switch."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return "|".join(map(str, action.choices))
    if isinstance(action.metavar, str):
        return action.metavar
    if not action.option_strings:
        return action.dest.upper()
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(action.type, "TEXT")  # pyright: ignore[reportArgumentType]


def main() -> int:
    """Write both files; returns 0."""
    for file, document in ((reference.FILE, reference_document()), (reference.SCHEMA, run_file_schema())):
        file.write_text(as_text(document), encoding="utf-8")
        print(file)
    return 0


def as_text(document: dict[str, Any]) -> str:
    """Return a document as its file holds it."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
