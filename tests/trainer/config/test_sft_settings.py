"""`penstock sft` uses a setting or refuses it: none is accepted and ignored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from penstock.protocol.config.run_file import load, values_of
from penstock.protocol.errors import ConfigError
from penstock.trainer.commands import sft_settings
from penstock.trainer.commands.sft_settings import READ, SFT_KEYS, check_ranks, chosen_settings
from penstock.trainer.settings import TrainerSettings

MODEL = "model.path=m"


def chosen(*overrides: str, run_file: Path | None = None) -> tuple[TrainerSettings, list[str]]:
    given = [MODEL, *overrides]
    return chosen_settings(load(TrainerSettings, files=[run_file] if run_file else [], overrides=given), given)


def other_value(value: Any) -> Any:
    """Return a value of the same type that differs."""
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


def test_every_setting_is_used_or_refused():
    """Each key, changed on the command line, is read by SFT, stands for a key of [sft], or is refused under its name."""
    loaded = load(TrainerSettings, overrides=[MODEL])
    keys = set()
    for key, settings in changed_settings():
        keys.add(key)
        names = [".".join(path) for path, _ in values_of(settings)]
        one = type(loaded)(settings, {name: "override" if name.startswith(key) else "default" for name in names})
        is_used = key in SFT_KEYS or any(key == name or key.startswith(f"{name}.") for name in READ)
        if is_used:
            result, unread = chosen_settings(one, [])
            assert unread == []
            if key in SFT_KEYS:
                section, name = SFT_KEYS[key].split(".")
                assert getattr(getattr(result, section), name) == other_value(
                    getattr(getattr(loaded.settings, key.split(".")[0]), key.split(".")[1])
                )
        else:
            with pytest.raises(ConfigError, match=f"override: {key}(\\.x)? is not read by `penstock sft`; "):
                chosen_settings(one, [])
    assert len(keys) > 150
    assert keys >= READ | SFT_KEYS.keys(), "a key that SFT is said to read does not exist"


def test_the_source_reads_what_is_listed():
    """Every key listed as read occurs in the code of SFT, by its section and name."""
    root = Path(sft_settings.__file__).parent.parent
    files = (
        "learner/sft.py",
        "commands/sft.py",
        "data/dataset.py",
        "data/row_formats.py",
        "data/inputs.py",
        "settings.py",
    )
    code = "\n".join((root / name).read_text() for name in files)
    code += Path(sft_settings.__file__).read_text().partition("def check_ranks")[2]  # after the list itself
    for key in READ - {"run.id", "run.dir"}:
        section, name = key.split(".")
        owners = [f"settings.{section}", *(["data", "_data", "self"] if section == "data" else ["self"])]
        assert any(f"{owner}.{name}" in code for owner in owners), key


def test_general_names_mean_those_of_sft_on_the_command_line():
    """learning_rate, max_steps and train_batch_size are honoured; two values for one setting are refused."""
    settings, unread = chosen("learning_rate=0.5", "max_steps=7", "train_batch_size=3", "data.shuffle=false")
    assert (settings.sft.lr, settings.sft.steps, settings.sft.batch_size, unread) == (0.5, 7, 3, [])
    with pytest.raises(ConfigError, match=r"trainer.lr and sft.lr are both given"):
        chosen("trainer.lr=1.0", "sft.lr=2.0")
    with pytest.raises(ConfigError, match=r"sft.warmup_steps is more than sft.steps"):
        chosen("max_steps=7", "sft.warmup_steps=9")


def test_refusals_name_the_key_that_is_read():
    """Evaluation data, adapters and the settings of other services are refused with what to do; all are listed together."""
    with pytest.raises(ConfigError) as caught:
        chosen("data.eval=x", "model.lora.rank=4", "worker.device=cuda")
    text = str(caught.value)
    assert "override: data.eval is not read by `penstock sft`; nothing is evaluated" in text
    assert "override: model.lora.rank is not read by `penstock sft`; all weights are trained" in text
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
        ConfigError, match=r"--nproc-per-node 2 -m penstock.trainer sft ..., or set trainer.num_ranks=1"
    ):
        check_ranks(asked, 1)
    check_ranks(asked, 2)
    check_ranks(load(TrainerSettings, overrides=[MODEL]), 2)
