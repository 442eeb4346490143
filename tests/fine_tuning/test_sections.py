"""`penstock sft` and `penstock dpo` use a setting or refuse it: none is accepted and ignored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from penstock import fine_tuning, trainer
from penstock.fine_tuning.sections import DPO, READ, RM, SFT, OwnSection, check_ranks
from penstock.protocol.config.run_file import load, values_of
from penstock.protocol.errors import ConfigError
from penstock.trainer.settings import GivenAnswersSettings, TrainerSettings

MODEL = "model.path=m"


def chosen(*overrides: str, run_file: Path | None = None) -> tuple[TrainerSettings, list[str]]:
    given = [MODEL, *overrides]
    return SFT.chosen_settings(load(TrainerSettings, files=[run_file] if run_file else [], overrides=given), given)


def other_value(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str() | Path():
            return f"{value}x"
        case list() | tuple():
            return [*value, "x"]
        case dict():
            return {"x": "y"}
        case _:
            return 7


def changed_settings() -> Iterator[tuple[str, TrainerSettings]]:
    """Yield every key of the trainer's settings with the settings in which only this key has another value."""
    standard = load(TrainerSettings, overrides=[MODEL]).settings

    def changed(model: BaseModel, path: tuple[str, ...], value: Any) -> Any:
        name, *rest = path
        inner = getattr(model, name)
        new = changed(inner, tuple(rest), value) if rest else value
        return model.model_copy(update={name: new})

    for path, value in values_of(standard):
        yield ".".join(path), changed(standard, path, other_value(value))


@pytest.mark.parametrize("command", [SFT, DPO, RM], ids=["sft", "dpo", "rm"])
def test_every_setting_is_used_or_refused(command: OwnSection):
    """Each key, changed on the command line, is read, stands for a key of the own section, or is refused under its name."""
    loaded = load(TrainerSettings, overrides=[MODEL])
    keys, section = set(), command.section
    for key, settings in changed_settings():
        keys.add(key)
        names = [".".join(path) for path, _ in values_of(settings)]
        origins = {name: "override" if name.startswith(key) else "default" for name in names}
        one = type(loaded)(settings, origins)
        is_used = key in command.keys or any(key == name or key.startswith(f"{name}.") for name in command.read)
        if is_used:
            result, unread = command.chosen_settings(one, [])
            assert unread == []
            if key in command.keys:
                _, name = command.keys[key].split(".")
                assert getattr(getattr(result, section), name) == other_value(
                    getattr(getattr(loaded.settings, key.split(".")[0]), key.split(".")[1])
                )
        else:
            with pytest.raises(ConfigError, match=f"override: {key}(\\.x)? is not read by `penstock {section}`; "):
                command.chosen_settings(one, [])
    assert len(keys) > 150
    assert keys >= command.read | command.keys.keys(), "a key that the command is said to read does not exist"


def test_the_source_reads_what_is_listed():
    """Every key listed as read occurs in the code of the commands, by its section and name."""
    root, own = Path(trainer.__file__).parent, Path(fine_tuning.__file__).parent
    files = [*own.glob("*.py"), *(root / "commands").glob("*.py")]
    files += [root / f"{name}settings.py" for name in ("", "data_", "rollout_", "optimizer_")]
    files += [root / "data" / f"{name}.py" for name in ("turns", "pairs", "read_rows", "row_checks", "inputs")]
    code = "\n".join(file.read_text().partition("READ = ")[0] for file in files)
    code += (own / "sections.py").read_text().partition("def check_ranks")[2]  # after the list itself
    for key in READ - {"run.id", "run.dir"} | SFT.also_read:
        *sections, name = key.split(".")
        owners = [f"settings.{'.'.join(sections)}", sections[-1], "data", "_data", "self"]
        assert any(f"{owner}.{name}" in code for owner in owners), key


def test_general_names_mean_those_of_sft_on_the_command_line():
    """learning_rate, max_steps and train_batch_size are honoured; two values for one setting are refused."""
    settings, unread = chosen("learning_rate=0.5", "max_steps=7", "train_batch_size=3", "data.shuffle=false")
    assert (settings.sft.lr, settings.sft.steps, settings.sft.batch_size, unread) == (0.5, 7, 3, [])
    with pytest.raises(ConfigError, match=r"trainer.lr and sft.lr are both given"):
        chosen("trainer.lr=1.0", "sft.lr=2.0")
    with pytest.raises(ConfigError, match=r"sft.warmup_steps is more than sft.steps"):
        chosen("max_steps=7", "sft.warmup_steps=9")


def test_steps_or_epochs():
    """Both are refused, steps of the command line stand above epochs of a run file, and a warm-up may count epochs' steps."""
    with pytest.raises(ConfigError, match=r"sft.steps and sft.epochs are both given"):
        chosen("sft.epochs=2", "max_steps=9")
    settings, _ = chosen("sft.epochs=2", "sft.warmup_steps=900")
    assert (settings.sft.epochs, settings.sft.warmup_steps) == (2.0, 900)


def test_steps_of_the_command_line_stand_above_epochs(tmp_path: Path):
    run_file = tmp_path / "run.toml"
    run_file.write_text("[sft]\nepochs = 3\n")
    settings, _ = chosen("sft.steps=4", run_file=run_file)
    assert (settings.sft.steps, settings.sft.epochs) == (4, None)


def test_refusals_name_the_key_that_is_read():
    """Evaluation data, publication and the settings of other services are refused with what to do; all are listed together."""
    with pytest.raises(ConfigError) as caught:
        chosen("data.eval=x", "model.lora.rank=4", "model.lora.publish=merged", "worker.device=cuda")
    text = str(caught.value)
    assert "override: data.eval is not read by `penstock sft`; rows for the validation loss are sft.eval_data" in text
    assert "override: model.lora.publish is not read by `penstock sft`; the result is a model folder" in text
    assert "override: worker.device is not read by `penstock sft`, which starts no service" in text


def test_a_shared_run_file_lists_what_sft_does_not_use(tmp_path: Path):
    """With a section [sft] the other sections are those of `penstock train`, and are named; without it they are refused."""
    run_file = tmp_path / "run.toml"
    general = '[nats]\nurl = "nats://elsewhere:4222"\n[data]\neval = "e.jsonl"\n[trainer]\nlr = 0.25\nsteps = 5\n'
    run_file.write_text(general + "[sft]\nsteps = 9\n")
    settings, unread = chosen(run_file=run_file)
    assert (settings.sft.steps, settings.sft.lr) == (9, 1e-5)
    assert sorted(unread) == ["data.eval", "trainer.lr", "trainer.steps"]
    run_file.write_text(general)
    with pytest.raises(ConfigError, match=rf"{run_file}:6: trainer.lr is not read by `penstock sft`; use sft.lr"):
        chosen(run_file=run_file)


def test_the_number_of_ranks_is_not_ignored():
    """A number of processes that was asked for and not started is refused with both ways out; without one any number is right."""
    asked = load(TrainerSettings, overrides=[MODEL, "trainer.num_ranks=2"])
    with pytest.raises(
        ConfigError, match=r"--nproc-per-node 2 -m penstock.fine_tuning sft ..., or set trainer.num_ranks=1"
    ):
        check_ranks(asked, "sft", 1)
    check_ranks(asked, "sft", 2)
    check_ranks(load(TrainerSettings, overrides=[MODEL]), "sft", 2)


@pytest.mark.parametrize(
    ("key", "near"),
    [("sft.learning_rate", "sft.lr"), ("dpo.learning_rate", "dpo.lr"), ("trainer.learning_rate", "trainer.lr")],
)
def test_a_key_of_another_project_is_answered_with_that_of_its_section(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key {key}; did you mean {near}\\\\?"):
        load(TrainerSettings, files=[], overrides=["model.path=m", f"{key}=1e-5"], environ={})


@pytest.mark.parametrize(
    "override",
    ["trainer.micro_batch_tokens=400", "rollout.groups_per_step=1", "trainer.num_ranks=100", "trainer.steps=5"],
)
def test_what_only_groups_need_is_not_asked_of_given_answers(override: str) -> None:
    """Settings that the command does not read refuse none that it reads."""
    loaded: Any = load(GivenAnswersSettings, overrides=[MODEL, override])
    settings, unread = SFT.chosen_settings(loaded, [MODEL, override])
    assert (settings.model.path, unread) == (Path("m"), [])
