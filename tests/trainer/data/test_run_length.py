"""`trainer.epochs`: passes over the rows become steps at the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.run_file import config_document, load
from penstock.protocol.errors import ConfigError
from penstock.trainer.data.data_order import known_steps, with_steps
from penstock.trainer.recovery import resume_checks
from penstock.trainer.recovery.resume_checks import changed_settings
from penstock.trainer.settings import TrainerSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and ten prompts of which one is too long."""
    folder = tmp_path_factory.mktemp("length")
    write_model(folder / "model", seed=0)
    rows = [{"prompt": "1+1=" if number else "1+" * 60} for number in range(10)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def overrides(folder: Path, *more: str) -> list[str]:
    return [
        f"model.path={folder / 'model'}", f"data.train={folder / 'train.jsonl'}", "data.text_prompts=plain",
        "reward.name=r", "run.id=r",
        f"run.dir={folder}", "data.max_prompt_tokens=32", "rollout.max_new_tokens=8", "rollout.groups_per_step=4",
        *more,
    ]  # fmt: skip


@pytest.mark.parametrize(("epochs", "steps"), [("1", 3), ("2", 5), ("0.5", 1), ("4", 9), ("0.01", 1)])
def test_epochs_count_the_rows_that_are_not_left_out(folder: Path, epochs: str, steps: int) -> None:
    """Nine prompts, four a step, the last one filled up from the next epoch; the origin of the number is recorded."""
    loaded = load(TrainerSettings, overrides=overrides(folder, f"num_train_epochs={epochs}"))
    assert known_steps(loaded) is None
    found = with_steps(loaded)
    assert found.settings.trainer.steps == steps
    assert found.origins["trainer.steps"] == f"override as num_train_epochs: {float(epochs):g} x 9 rows"


def test_steps_of_the_command_line_replace_epochs_of_the_run_file(folder: Path) -> None:
    file = folder / "run.toml"
    file.write_text("[trainer]\nepochs = 2\n")
    loaded = load(TrainerSettings, files=[file], overrides=overrides(folder, "trainer.steps=7"))
    found = with_steps(loaded).settings.trainer
    assert (known_steps(loaded), found.steps, found.epochs) == (7, 7, None)
    both = load(TrainerSettings, overrides=overrides(folder, "trainer.steps=7", "trainer.epochs=2"))
    with pytest.raises(ConfigError, match=r"trainer\.steps and trainer\.epochs are both given; leave one out"):
        with_steps(both)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["trainer.epochs=1", "trainer.warmup_steps=4"], "trainer.warmup_steps = 4 is more than trainer.steps = 3"),
        (["trainer.epochs=1", "algorithm.name=ppo", "critic.head_start_steps=3"], "leaves none of trainer.steps = 3"),
    ],
)
def test_a_length_that_does_not_fit_is_refused_once_it_is_known(folder: Path, more: list[str], problem: str) -> None:
    loaded = load(TrainerSettings, overrides=overrides(folder, *more))
    with pytest.raises(ConfigError, match=problem):
        with_steps(loaded)


def test_a_resumed_or_finished_run_of_epochs_is_recognised(folder: Path) -> None:
    """Counted steps are no change of a setting; a finished run says so, and more epochs train on."""
    given = overrides(folder, "trainer.epochs=2")
    loaded = load(TrainerSettings, overrides=given)
    (folder / "r").mkdir()
    record = folder / "r" / "config.json"
    record.write_text(json.dumps(config_document(with_steps(loaded))))
    assert changed_settings(record, json.dumps(config_document(loaded)).encode()) == []
    (folder / "r" / "trainer.json").write_text('{"run_id": "r", "complete": true, "steps": 5}')
    said = resume_checks.finished_notice(loaded.settings)
    assert said is not None
    assert "is finished: 5 of 5 steps" in said
    assert "raise trainer.epochs" in said
    assert (
        resume_checks.finished_notice(load(TrainerSettings, overrides=overrides(folder, "trainer.epochs=3")).settings)
        is None
    )
