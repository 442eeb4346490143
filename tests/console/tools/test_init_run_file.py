"""`penstock init`: a run file that every service accepts, from flags or from answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest

from penstock.console.tools.init_run_file import SCHEMA_NAME, Answers, DataSample, init, lengths
from penstock.deploy.config_show import load_all
from penstock.deploy.data_check.commands import main as check_data
from penstock.deploy.quickstart_task import write_model
from penstock.protocol.errors import ConfigError

GIVEN = Answers(model="models/Qwen", data='d "1".jsonl', reward="gsm8k")


def fits(gpus: str, settings: Sequence[str]) -> tuple[list[str], list[str]]:
    assert {"model.path=m", "model.gradient_checkpointing=true", "worker.engine=sglang"} <= set(settings)
    return ["model.lora.rank=16", "model.activation_offload=true"], [f"placed on {gpus}"]


def settings_of(file: Path) -> dict[str, object]:
    trainer, rollout, *_ = (one.settings for one in load_all([file], [], {}))
    return {
        "id": trainer.run.id, "model": trainer.model.path, "data": trainer.data.train_files, "reward": trainer.reward.name,
        "dtype": trainer.model.dtype, "engine": rollout.worker.engine,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reward", "gpus", "evaluation"),
    list(product(["gsm8k", "my_reward.py", "pkg.rewards:fn", "none"], ["0", "1", "3x24GB"], [None, "e"])),
)
def test_every_combination_is_accepted(
    tmp_path: Path, reward: str, gpus: str, evaluation: str | None, capsys: pytest.CaptureFixture[str]
):
    """By trainer, worker and reward service; on GPUs the engines are SGLang servers, and settings with which the run fits are added."""
    file = tmp_path / "math-run.toml"
    assert init(file, Answers("m", "d", evaluation, reward, gpus), schema=False, ask=None, fit=fits) == 0
    found = settings_of(file)
    assert found["id"] == "math-run"
    assert found["reward"] == {"my_reward.py": "my_reward", "none": None}.get(reward, reward)
    assert (found["engine"], found["dtype"]) == (("embedded", "float32") if gpus == "0" else ("sglang", "bfloat16"))
    text = file.read_text()
    assert ("[model.lora]" in text, f"# GPUs:     placed on {gpus}\n" in text) == (gpus != "0", gpus != "0")
    out = capsys.readouterr().out
    assert f"--local{' --serve my_reward.py' if reward == 'my_reward.py' else ''}\n" in out
    tried = {"my_reward.py": "my_reward --serve my_reward.py", "none": None}.get(reward, reward)
    assert (f"next: penstock reward test {tried} --run-file {file}" in out) == (reward != "none")


def test_settings_have_comments_and_other_keys_are_there_to_uncomment(tmp_path: Path):
    file = tmp_path / "run.toml"
    init(file, GIVEN, schema=False, ask=None, fit=fits)
    text = file.read_text()
    assert settings_of(file)["data"] == (Path('d "1".jsonl'),)
    assert "# Peak learning rate of AdamW\nlr = 1e-06\n" in text
    assert "# warmup_steps = 0\n" in text
    file.with_name("all.toml").write_text(
        "\n".join(line.removeprefix("# ") if line.startswith("# ") and " = " in line and "..." not in line else line
                  for line in text.splitlines()),
    )  # fmt: skip
    load_all([file.with_name("all.toml")], [], {})


def sampled(**more: object) -> DataSample:
    return DataSample(num_rows=9, formats=("flat",), num_prompts=9, num_truths=9, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("longest", "context", "expected"),
    [(None, None, (1024, 256)), (21, 32_768, (1024, 256)), (3000, 32_768, (3008, 256)), (21, 128, (64, 64)), (120, 128, (120, 8)),
     (21, 1200, (600, 256)), (500, 128, (500, 1))],
)  # fmt: skip
def test_the_limits_fit_prompts_and_the_models_context(
    longest: int | None, context: int | None, expected: tuple[int, int]
):
    """The usual ones where they fit, else half of the context for each, or what the longest prompt leaves."""
    assert lengths(sampled(longest_prompt=longest, context_tokens=context)) == expected


@pytest.mark.slow
def test_the_data_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Columns with likely names are mapped, the model's context is counted, the check comes before the training."""
    write_model(tmp_path / "m", seed=0)
    data = tmp_path / "odd.jsonl"
    data.write_text('{"problem": "sort 31", "solution": "13", "level": 2}\n' * 3)
    file = tmp_path / "run.toml"
    init(file, Answers(str(tmp_path / "m"), str(data), None, "exact_match"), schema=False, ask=None, fit=fits)
    trainer = load_all([file], [], {})[0].settings
    assert trainer.data.map == {"prompt": "problem", "ground_truth": "solution"}
    assert trainer.data.max_prompt_tokens + trainer.rollout.max_new_tokens <= 128
    out, err = capsys.readouterr()
    assert out.index(f"penstock data check --run {file}") < out.index(f"penstock train {file}")
    assert "3 rows read, format flat, prompt from problem, ground_truth from solution, longest prompt" in err
    assert check_data(["data-check", "--run", str(file)]) == 0


def test_data_that_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The run file is written all the same, without a map; the first problem is named."""
    data = tmp_path / "x.jsonl"
    data.write_text('{"aa": 1}\n')
    init(tmp_path / "run.toml", Answers("m", str(data), None, "exact_match"), schema=False, ask=None, fit=fits)
    assert "map = " not in (tmp_path / "run.toml").read_text()
    assert "x.jsonl:1: no format recognised from the columns aa" in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path):
    """Neither the run file nor the schema; the first names the way out."""
    file, schema = tmp_path / "run.toml", tmp_path / SCHEMA_NAME
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"run.toml exists and is not overwritten"):
        init(file, GIVEN, schema=True, ask=None, fit=fits)
    assert (file.read_text(), schema.exists()) == ("mine", False)
    schema.write_text("mine too")
    init(tmp_path / "other.toml", GIVEN, schema=True, ask=None, fit=fits)
    assert schema.read_text() == "mine too"
    assert (tmp_path / "other.toml").read_text().startswith(f"#:schema ./{SCHEMA_NAME}\n")


def test_a_file_that_appears_while_it_asks_is_not_overwritten(tmp_path: Path):
    """Written by another shell between the first question and the last."""

    def ask(_: str) -> str:
        (tmp_path / "run.toml").write_text("theirs")
        return "x"

    with pytest.raises(ConfigError, match=r"run\.toml cannot be written \(File exists\)"):
        init(
            tmp_path / "run.toml",
            Answers("m", "d", "e", "gsm8k", "0", 5, algorithm="grpo"),
            schema=True,
            ask=ask,
            fit=fits,
        )
    assert (tmp_path / "run.toml").read_text() == "theirs"


def test_on_a_terminal_it_asks_for_what_is_missing(tmp_path: Path):
    asked: list[str] = []
    answers: Iterator[str] = iter(["", "models/Q", "train.jsonl", "", "exact_match", "", "7", "", ""])

    def ask(question: str) -> str:
        asked.append(question.split(maxsplit=1)[0])
        return next(answers)

    init(tmp_path / "run.toml", Answers(), schema=False, ask=ask, fit=fits)
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
        (Answers("m", "d", reward="gsm8k", steps=0), "--steps must be at least 1"),
    ],
)
def test_wrong_answers_write_nothing(tmp_path: Path, answers: Answers, problem: str):
    with pytest.raises(ConfigError, match=problem):
        init(tmp_path / "run.toml", answers, schema=True, ask=None, fit=fits)
    assert list(tmp_path.iterdir()) == []
