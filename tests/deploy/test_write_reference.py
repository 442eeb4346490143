"""The stored descriptions of settings and flags are those of the code, and complete."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from penstock.console.tools import explain_settings
from penstock.deploy import config_show, quickstart, write_reference
from penstock.protocol.config.foreign_config import ALIASES
from penstock.protocol.config.run_file import SECTIONS, format_config
from penstock.protocol.config.setting_description import ANY_NAME


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = explain_settings.run_file_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def problems(validator: jsonschema.Draft202012Validator, text: str) -> list[str]:
    return ["/".join(map(str, iter_error.absolute_path)) for iter_error in validator.iter_errors(tomllib.loads(text))]


@pytest.mark.parametrize(
    ("file", "made"),
    [
        (explain_settings.REFERENCE_FILE, write_reference.reference_document),
        (explain_settings.SCHEMA_FILE, write_reference.run_file_schema),
    ],
    ids=["reference", "schema"],
)
def test_the_stored_descriptions_are_those_of_the_code(file: Path, made):
    assert json.loads(file.read_text()) == json.loads(write_reference.as_text(made())), "run: make reference"


def test_every_setting_is_described():
    """Type, default and a description of every key of every section that a service reads."""
    known = explain_settings.load_reference()
    assert set(known.sections) == set(SECTIONS)
    assert all(known.sections.values())
    for setting in known.settings.values():
        assert setting.description.endswith((".", "…")), setting.key
        assert setting.type, setting.key
        assert setting.default, setting.key
        assert setting.services, setting.key
    shown = {
        line.partition(" = ")[0]
        for loaded in config_show.load_all([], ["model.path=m"], {})
        for line in format_config(loaded).splitlines()
    }
    assert {key for key in known.settings if ANY_NAME not in key.split(".")} == shown


def test_numbers_of_seconds_tokens_and_bytes_have_their_unit():
    settings = explain_settings.load_reference().settings
    units = {key: setting.unit for key, setting in settings.items() if setting.type != "text"}
    assert all(unit == "seconds" for key, unit in units.items() if key.endswith("_s"))
    assert all(unit == "tokens" for key, unit in units.items() if key.endswith("_tokens"))
    assert all(unit == "bytes" for key, unit in units.items() if key.endswith("_bytes"))
    assert (units["rollout.max_staleness"], units["trainer.steps"], units["trainer.lr"]) == (
        "versions",
        "optimizer steps",
        "",
    )


def test_the_default_is_that_of_the_default_algorithm():
    """Of a key that the default preset sets, its value: what a run gets whose file does not name the key."""
    settings = explain_settings.load_reference().settings
    assert settings["algorithm.dual_clip"].default == "1.2"
    assert settings["algorithm.stale_negative_weight"].presets == {"async_grpo": "0.5"}


def test_run_files_are_valid_in_the_schema(validator: jsonschema.Draft202012Validator):
    """The quickstart's, one that `config show` printed, one with other projects' names, and rewards made of parts."""
    options = quickstart.Options(seed=0, steps=10, workers=2, run_id="r", folder=Path("/f"), as_json=False, kill=False, engine="embedded")  # fmt: skip
    assert problems(validator, quickstart.run_file_text(options, Path("run.toml"))) == []
    assert problems(validator, config_show.as_text(config_show.load_all([], ["model.path=m"], {}))) == []
    parts = '[reward.define.mine.parts.correct]\nreward = "gsm8k"\n[reward.success]\nmine = {correct = 1.0}\n'
    assert problems(validator, parts) == []
    for name in ALIASES:
        nested = "[" + name.rpartition(".")[0] + "]\n" if "." in name else ""
        assert problems(validator, f"{nested}{name.rpartition('.')[2]} = 1\n") == [], name


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[trainer]\nstpes = 1\n", "trainer"),
        ("[trainer]\nsteps = 0\n", "trainer/steps"),
        ('[trainer]\nsteps = "5"\n', "trainer/steps"),
        ('[model]\ndtype = "float8"\n', "model/dtype"),
        ("[trianer]\nsteps = 1\n", ""),
        ("[reward.define.mine.parts.correct]\nweight = 1.0\n", "reward/define/mine/parts/correct"),
    ],
)
def test_mistakes_are_found_in_the_schema(validator: jsonschema.Draft202012Validator, text: str, place: str):
    """An editor marks unknown keys, wrong types and values, as the command would."""
    assert problems(validator, text) == [place]
