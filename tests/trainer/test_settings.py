"""The trainer's settings: documented, importable without torch, and contradictions say the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from protocol.errors import ConfigError
from protocol.foreign_keys import RENAMED
from protocol.runfile import SECTIONS, load
from trainer.settings import TrainerSettings


def settings(*overrides: str) -> TrainerSettings:
    return load(TrainerSettings, overrides=["model.path=model", *overrides]).settings


def test_the_model_folder_is_the_only_thing_that_must_be_said():
    """Every other setting has a default; without the model's path the loader says where to write it."""
    assert settings().model.path == Path("model")
    with pytest.raises(ConfigError, match=r"model.path is required: set `path` under \[model\]"):
        load(TrainerSettings)


@pytest.mark.parametrize("section", sorted(TrainerSettings.model_fields))
def test_every_setting_is_described(section: str):
    """Each field of each section says what it means."""
    assert section in SECTIONS
    model = TrainerSettings.model_fields[section].annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    assert model.__doc__
    undescribed = [name for name, field in model.model_fields.items() if not field.description]
    assert not undescribed


def test_foreign_names_lead_to_settings_that_exist():
    """What the table of other projects' names recommends is a key the trainer knows."""
    for name, target in RENAMED.items():
        for dotted in target.split(" (")[0].split(" and "):
            section, _, key = dotted.partition(".")
            if section in TrainerSettings.model_fields and not key.startswith("map."):
                model = TrainerSettings.model_fields[section].annotation
                assert isinstance(model, type)
                assert issubclass(model, BaseModel)
                assert key in model.model_fields, f"{name} -> {target}"


@pytest.mark.parametrize(
    ("overrides", "reply"),
    [
        (["trainer.micro_batch_tokens=100"], "raise it to at least 1280"),
        (["rollout.groups_per_message=64"], "a message never spans steps, lower it or set it to 0"),
        (["rollout.groups_per_step=1", "rollout.group_size=1", "trainer.num_ranks=2"], "have nothing to do, lower it"),
        (["rollout.max_staleness=8"], "raise it to at least 10"),
        (["eval.every=5"], "set data.eval, or eval.every = 0"),
        (["eval.samples=4"], "set eval.temperature above 0 or eval.samples = 1"),
        (["trainer.warmup_steps=200"], "trainer.warmup_steps is more than trainer.steps"),
        (["sft.warmup_steps=200"], "sft.warmup_steps is more than sft.steps"),
        (["data.map.promt=x"], "data.map.promt maps a column we do not read"),
        (["reward.name=my reward"], "should match pattern"),
        (["rollout.temperature=0"], "expected greater than 0"),
        (["algorithm.dual_clip=1"], "expected greater than 1"),
        (["trainer.zero_stage=4"], "expected 0, 1, 2 or 3, got 4"),
    ],
)
def test_contradictions_say_the_fix(overrides: list[str], reply: str):
    """Settings that cannot work together are refused with the change that helps."""
    with pytest.raises(ConfigError) as caught:
        settings(*overrides)
    assert reply in str(caught.value)


def test_files_are_one_or_a_list():
    """data.train takes one file or several; none at all is refused when it is needed."""
    assert settings("data.train=a.jsonl").data.train_files == (Path("a.jsonl"),)
    assert settings('data.train=["a", "b"]').data.train_files == (Path("a"), Path("b"))
    assert settings().data.eval_files == ()
    with pytest.raises(ConfigError, match=r"data.train names no file"):
        _ = settings().data.train_files


def test_settings_import_without_torch():
    """The settings load in a process that never imports torch."""
    code = "import sys, trainer.settings; assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
