"""The run file that the quickstart writes for a real SGLang, and its warm-up."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from penstock.deploy import quickstart, sglang_cpu
from penstock.deploy.processes.child import DeployError
from penstock.deploy.quickstart import Options, _engine_sections
from penstock.deploy.quickstart_task import TASKS, QuickstartTask, write_model
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.run_file import load
from penstock.rollout_service.environments.environment import load_environments
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.settings import TrainerSettings


def test_a_real_sglang_is_updated_in_mid_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker accepts its section of either engine."""
    monkeypatch.setenv(sglang_cpu.PYTHON_VARIABLE, sys.executable)
    file = tmp_path / "run.toml"
    file.write_text('[run]\nid = "r"\n' + _engine_sections("sglang"))
    settings = load(RolloutSettings, files=[file]).settings
    assert (settings.worker.engine, settings.worker.update_mode) == ("sglang", "retract")
    assert settings.sglang.python == Path(sys.executable)
    file.write_text('[run]\nid = "r"\n' + _engine_sections("embedded"))
    assert load(RolloutSettings, files=[file]).settings.worker.engine == "embedded"


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_the_run_file_of_a_task_is_one(tmp_path: Path, task: QuickstartTask):
    """Trainer and workers read it; what it asks for fits the rows that the task writes."""
    options = Options(7, 12, 2, "r", tmp_path, as_json=True, kill=True, engine="embedded", task=task)
    task.write_data(tmp_path / "data", seed=7, num_sft=4, num_train=6, num_eval=5)
    write_model(tmp_path / "start", seed=7)
    file = tmp_path / "run.toml"
    file.write_text(quickstart.run_file_text(options, file))
    trainer = load(TrainerSettings, files=[file]).settings
    worker = load(RolloutSettings, files=[file]).settings
    assert trainer.rollout.environment in load_environments(worker.worker.environments, worker.environment.define)
    assert (trainer.trainer.steps, trainer.rollout.group_size) == (12, task.group_size)
    prompts = PromptSet(
        [tmp_path / "data" / "train.jsonl"],
        data=trainer.data,
        reward=trainer.reward,
        tokenizer=ChatTokenizer.read(tmp_path / "start"),
        max_new_tokens=trainer.rollout.max_new_tokens,
    )
    assert [len(prompts[number].messages) for number in range(6)] == [1] * 6


_KILLED = "import os, signal, sys; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            f"import pathlib\nif not pathlib.Path('{{mark}}').exists(): pathlib.Path('{{mark}}').touch(); {_KILLED}",
            None,
        ),
        (_KILLED, r"sft failed; it ended with SIGKILL"),
        ("print('no such file'); raise SystemExit(2)", r"sft failed; it ended with exit code 2.*\n    no such file"),
    ],
)
def test_a_killed_warm_up_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, expected: str | None
) -> None:
    """A SIGKILL during the warm-up costs its steps, not the quickstart; a third one, or an error of its own, ends it."""
    program = program.replace("{mark}", str(tmp_path / "mark"))
    monkeypatch.setattr(quickstart.launch, "module", lambda *_: [sys.executable, "-S", "-c", program])
    options = quickstart.Options(
        seed=0, steps=2, workers=1, run_id="r", folder=tmp_path, as_json=True, kill=False, engine="embedded"
    )
    shown: list[str] = []

    def warm_up() -> bool:
        return quickstart._warm_up(options, tmp_path / "run.toml", shown.append, threading.Event())  # type: ignore[arg-type]

    if expected is None:
        assert warm_up()
        assert [line.partition(",")[0] for line in shown] == [
            "warm-up   was killed (SIGKILL); starting it again from its first step",
            "warm-up   60 supervised steps on 128 examples each",
        ]
    else:
        with pytest.raises(DeployError, match=expected):
            warm_up()
        assert len(shown) == (2 if program == _KILLED else 0)
