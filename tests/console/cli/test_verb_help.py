"""The help of every verb: its flags and its settings, from the code, without importing anything slow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from penstock.console.cli import main, verb_help
from penstock.console.cli.verb_help import words_of
from penstock.console.tools import explain_settings
from penstock.protocol.command_line import arguments_of

ROOT = Path(__file__).parents[3]
_SLOW = (
    *("torch", "deepspeed", "transformers", "pydantic", "pyarrow", "numpy", "nats", "minio", "fastapi", "httpx"),
    *("tokenizers", "safetensors", "matplotlib"),
    *("penstock.trainer", "penstock.rollout_service", "penstock.deploy"),
)
_LIGHT = {"penstock.deploy", "penstock.deploy.data_check", "penstock.deploy.data_check.commands"}
_WALK = """
import contextlib, io, json, sys
from penstock.console.cli import main
from penstock.console.cli.verb_help import words_of
loaded = set(sys.modules)
answers = {}
for verb in words_of(main.app).verbs:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main.main([*verb.split(), "--help"])
    answers[verb] = out.getvalue()
print(json.dumps({"answers": answers, "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def walk() -> dict:
    """The help of every verb, and the modules that it took."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _WALK],
        capture_output=True, text=True, timeout=60, check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "110"},
    )  # fmt: skip
    return json.loads(done.stdout)


def test_every_help_lists_what_its_command_line_takes(walk: dict):
    """Every name, the kind of its value, its choices and what it is for; nothing that it does not take is completed."""
    completed = words_of(main.app).flags
    for verb, one in verb_help.verbs_of(main.app):
        answer = re.sub(r"[│\s]+", " ", walk["answers"][verb])
        shown = [argument for argument in arguments_of(one) if argument.show]
        for argument in shown:
            options = [name for name in argument.names if name.startswith("-")]
            names = [argument.names[0].lstrip("-").upper(), *options] if argument.index is not None else options
            value = r" [A-Z]+(\.{3})?" if argument.index is None and argument.hint not in {bool, bool | None} else ""
            row = f" {re.escape(' '.join(names))}{value} {re.escape(argument.parameter.help or '')}"
            assert re.search(row, answer), (verb, row)
            for choice in _choices(argument.hint):
                assert re.search(rf"\[choices: [^]]*\b{choice}\b", answer), (verb, choice)
        assert set(completed[verb]) <= {"--help", *(name for argument in shown for name in argument.names)}, verb


def _choices(hint: object) -> Iterator[str]:
    for one in get_args(hint):
        yield from [one] if get_origin(hint) is Literal else _choices(one)


def test_every_help_lists_the_flags_and_settings_of_its_verb_and_an_example(walk: dict):
    """The example is a line that can be typed unchanged."""
    known = explain_settings.load_reference().settings
    for verb, one in verb_help.verbs_of(main.app):
        answer = walk["answers"][verb]
        for key in verb_help.SETTINGS.get(verb, ()):
            assert f"  {key} " in answer, (verb, key)
            assert known[key].type in " ".join(answer.split()), (verb, key)
        if verb and one.default_command is not None:
            assert f"Example:  penstock {'runs' if verb == 'runs list' else verb}" in answer, verb
            listed = ("Settings it", "Parameters", "Arguments")
            assert verb == "version" or any(title in answer for title in listed), verb


def test_help_imports_nothing_slow(walk: dict):
    """Neither torch nor a settings class, an HTTP or NATS client, or a service: that is what keeps help fast."""
    assert set(walk["modules"]) >= _LIGHT, "the exceptions are no longer than needed"
    loaded = set(walk["modules"]) - _LIGHT
    assert not [one for one in loaded if one.startswith(_SLOW) and (one in _SLOW or one.split(".")[0] in _SLOW)]
    assert not [one for one in loaded if one.startswith(tuple(f"{slow}." for slow in _SLOW))]


def test_settings_in_help_exist():
    assert verb_help.SETTINGS.keys() <= words_of(main.app).verbs.keys()
    keys = {key for keys in verb_help.SETTINGS.values() for key in keys}
    assert keys <= explain_settings.load_reference().settings.keys()
