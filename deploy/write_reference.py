"""Describe every setting in two files that the command reads.

    python -m penstock.deploy.write_reference            (write both files anew, after a change of settings)

``console/tools/reference.json``: the settings of all services, from their classes. ``console/tools/run.schema.json``: the
JSON Schema of a run file. They are files because importing the classes takes longer than a help text may; a test compares
them with the code.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any, Literal, get_args

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock.console.tools import explain_settings
from penstock.deploy.config_show import SERVICES
from penstock.deploy.describe_settings import describe
from penstock.protocol.config.run_file import SECTIONS
from penstock.reward_service.registry.built_in import BUILT_INS
from penstock.rollout_service.engines.engine_kind import ENGINES
from penstock.rollout_service.environments.environment import ENVIRONMENTS
from penstock.trainer.algorithm.chosen_parts import CORRECTIONS, ESTIMATORS, FILTERS, GROUP_FILTERS, LOSSES, PRESETS

_NAMES = ("trainer", "rollout worker", "reward service", "trackers")
_CLEARS = ["none", "None", "null"]  # TOML has no null: these words stand for it, see `run_file`


def reference_document() -> dict[str, Any]:
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
        "sections": {name: (inspect.getdoc(_section(name)) or "").partition("\n")[0] for name in SECTIONS},
        "settings": [setting.to_document() for setting in settings],
    }


def run_file_schema() -> dict[str, Any]:
    """Return the JSON Schema of a run file, whose every key may be left to another file or an override."""
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [(service, "validation") for service in SERVICES]
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
        return [_for_toml(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema == {"type": "null"}:
        return {"enum": _CLEARS}
    is_generated = isinstance(schema.get("title"), str) and schema.get("title") != "Penstock run file"
    toml_schema = {key: _for_toml(value) for key, value in schema.items() if not (key == "title" and is_generated)}
    if "default" in toml_schema and toml_schema["default"] is None:
        toml_schema["default"] = _CLEARS[0]
    return toml_schema


def _section(name: str) -> type[BaseModel]:
    field = next(service.model_fields[name] for service in SERVICES if name in service.model_fields)
    annotation = field.annotation
    while not isinstance(annotation, type):  # the tables of a list
        annotation = get_args(annotation)[0]
    return annotation


def main() -> int:
    for file, document in (
        (explain_settings.REFERENCE_FILE, reference_document()),
        (explain_settings.SCHEMA_FILE, run_file_schema()),
    ):
        file.write_text(as_text(document), encoding="utf-8")
        print(file)
    return 0


def as_text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
