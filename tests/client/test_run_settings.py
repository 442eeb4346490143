"""The settings of a call as keys of a run file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.client import run_settings
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.trainer.settings import TrainerSettings


def test_nested_and_dotted_names_are_the_same_setting() -> None:
    """Both spellings, mixed, give one key path; numbers of numpy, paths and tuples become values of a run file."""
    nested = run_settings.flat({"trainer": {"lr": np.float64(0.5), "betas": (0.9, 0.98)}, "model": {"path": Path("m")}})
    dotted = run_settings.flat({"trainer.lr": 0.5, "trainer": {"betas": [0.9, 0.98]}, "model.path": "m"})
    assert nested == dotted == {("trainer", "lr"): 0.5, ("trainer", "betas"): [0.9, 0.98], ("model", "path"): "m"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": {"lr": 1}, "trainer.lr": 2}, "trainer.lr is given twice"),
        ({"trainer": {"lr": object()}}, "trainer.lr: expected a number.*got object"),
        ({"trainer": {1: 2}}, "setting 1: expected a name"),
        ({"trainer..lr": 1}, "expected a name"),
        ({"trainer": {"steps": len}}, "trainer.steps: expected.*got builtin_function"),
    ],
)
def test_what_no_run_file_can_have_is_refused(settings: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_settings.flat(settings)


def test_an_argument_and_a_setting_of_one_key_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.path is given twice"):
        run_settings.merged(run_settings.section("model", "a", "path"), run_settings.flat({"model": {"path": "b"}}))


def test_a_section_may_stand_for_the_value_of_its_main_key() -> None:
    assert run_settings.section("algorithm", "grpo", "name") == {("algorithm", "name"): "grpo"}
    given = {"name": "grpo", "clip_low": 0.1}
    assert run_settings.section("algorithm", given, "name") == run_settings.flat({"algorithm": given})


def test_the_run_file_is_read_back_as_the_settings_that_were_checked(tmp_path: Path) -> None:
    """Overrides and file give equal settings, for texts with quotes, lists, None and tables."""
    values = run_settings.flat(
        {
            "model": {"path": 'a "b" #c'},
            "run": {"id": "x"},
            "data": {"train": "rows.jsonl", "system_prompt": "two\nlines \u2603"},
            "trainer": {"steps": 7, "lr": 1e-6, "betas": [0.9, 0.98]},
        }
    )
    file = tmp_path / "run.toml"
    file.write_text(run_settings.run_file_text(values, "penstock train run.toml"), encoding="utf-8")
    assert tomllib.loads(file.read_text())["trainer"]["lr"] == 1e-6
    by_file = load(TrainerSettings, files=[file]).settings
    assert by_file == load(TrainerSettings, overrides=run_settings.overrides(values)).settings
    assert by_file.data.system_prompt == "two\nlines \u2603"
