"""`penstock init`: a run file that every service accepts, from flags or from answers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from penstock.console.tools.init_run_file import SCHEMA_NAME, Answers, init
from penstock.deploy.config_show import load_all
from penstock.protocol.errors import ConfigError

GIVEN = Answers(model="models/Qwen", data='d "1".jsonl', reward="gsm8k")


def settings_of(file: Path) -> dict[str, object]:
    trainer, rollout, *_ = (one.settings for one in load_all([file], [], {}))
    return {
        "id": trainer.run.id, "model": trainer.model.path, "data": trainer.data.train_files, "reward": trainer.reward.name,
        "ranks": trainer.trainer.num_ranks, "engine": rollout.worker.engine, "device": rollout.worker.device,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reward", "gpus", "evaluation"),
    list(product(["gsm8k", "my_reward.py", "pkg.rewards:fn", "none"], [0, 1, 3], [None, "e"])),
)
def test_every_combination_is_accepted(
    tmp_path: Path, reward: str, gpus: int, evaluation: str | None, capsys: pytest.CaptureFixture[str]
):
    """By trainer, worker and reward service; with one GPU both share it, with several half of them train."""
    file = tmp_path / "math-run.toml"
    assert init(file, Answers("m", "d", evaluation, reward, gpus), schema=False, ask=None) == 0
    found = settings_of(file)
    assert found["id"] == "math-run"
    assert found["reward"] == {"my_reward.py": "my_reward", "none": None}.get(reward, reward)
    assert (found["ranks"], found["engine"], found["device"]) == {
        0: (1, "embedded", "cpu"),
        1: (1, "embedded", "cuda"),
        3: (1, "sglang", "cpu"),
    }[gpus]
    assert ("--serve my_reward.py" in capsys.readouterr().out) == (reward == "my_reward.py" and gpus < 2)


def test_settings_have_comments_and_other_keys_are_there_to_uncomment(tmp_path: Path):
    """What each key is, and quoted values."""
    file = tmp_path / "run.toml"
    init(file, GIVEN, schema=False, ask=None)
    text = file.read_text()
    assert settings_of(file)["data"] == (Path('d "1".jsonl'),)
    assert "# Peak learning rate of AdamW\nlr = 1e-06\n" in text
    assert "# warmup_steps = 0\n" in text
    file.with_name("all.toml").write_text(
        "\n".join(line.removeprefix("# ") if line.startswith("# ") and " = " in line and "..." not in line else line
                  for line in text.splitlines()),
    )  # fmt: skip
    load_all([file.with_name("all.toml")], [], {})


def test_nothing_is_overwritten(tmp_path: Path):
    """Neither the run file nor the schema; the first names the way out."""
    file, schema = tmp_path / "run.toml", tmp_path / SCHEMA_NAME
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"run.toml exists and is not overwritten"):
        init(file, GIVEN, schema=True, ask=None)
    assert (file.read_text(), schema.exists()) == ("mine", False)
    schema.write_text("mine too")
    init(tmp_path / "other.toml", GIVEN, schema=True, ask=None)
    assert schema.read_text() == "mine too"
    assert (tmp_path / "other.toml").read_text().startswith(f"#:schema ./{SCHEMA_NAME}\n")


def test_a_file_that_appears_while_it_asks_is_not_overwritten(tmp_path: Path):
    """Written by another shell between the first question and the last."""

    def ask(_: str) -> str:
        (tmp_path / "run.toml").write_text("theirs")
        return "x"

    with pytest.raises(ConfigError, match=r"run\.toml cannot be written \(File exists\)"):
        init(tmp_path / "run.toml", Answers("m", "d", "e", "gsm8k", 0, 5, algorithm="grpo"), schema=True, ask=ask)
    assert (tmp_path / "run.toml").read_text() == "theirs"


def test_on_a_terminal_it_asks_for_what_is_missing(tmp_path: Path):
    """What has no default is asked until it is answered; Enter takes a default."""
    asked: list[str] = []
    answers: Iterator[str] = iter(["", "models/Q", "train.jsonl", "", "exact_match", "", "7", "", ""])

    def ask(question: str) -> str:
        asked.append(question.split(maxsplit=1)[0])
        return next(answers)

    init(tmp_path / "run.toml", Answers(), schema=False, ask=ask)
    assert asked == ["Model", "Model", "Training", "Held-out", "Reward:", "GPUs", "Optimizer", "Name", "Algorithm"]
    assert "steps = 7\n" in (tmp_path / "run.toml").read_text()
    assert settings_of(tmp_path / "run.toml")["reward"] == "exact_match"


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        (Answers(model="m"), "data, reward not given: add --data DATA --reward REWARD"),
        (Answers("m", "d", reward="gsm8k", algorithm="grop"), "no algorithm is named grop; did you mean grpo"),
        (Answers("m", "d", reward="my rewards/x:f"), "is no name that a run file can hold"),
        (Answers("m", "d", reward="gsm8k", run_id="My Run"), "run"),
        (Answers("m", "d", reward="gsm8k", gpus=-1), "--gpus must be at least 0"),
    ],
)
def test_wrong_answers_write_nothing(tmp_path: Path, answers: Answers, problem: str):
    """Each is answered with what is expected."""
    with pytest.raises(ConfigError, match=problem):
        init(tmp_path / "run.toml", answers, schema=True, ask=None)
    assert list(tmp_path.iterdir()) == []
