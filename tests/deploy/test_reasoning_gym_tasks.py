"""Tasks of reasoning-gym: their files, their scores through the reward service's processes, and what is refused."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.servers import needs

from penstock.console.cli.main import run
from penstock.deploy import config_show
from penstock.deploy import reasoning_gym_tasks as tasks
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import RewardRequest
from penstock.protocol.packs.group_pack import GroupTexts
from penstock.reward_service.errors import RewardError
from penstock.reward_service.registry.user_rewards import UserRewards
from penstock.reward_service.scores import GroupScores
from penstock.trainer.settings import TrainerSettings

pytestmark = needs("reasoning_gym", extra="reasoning-gym")

SUMS = "chain_sum:max_terms=2,max_digits=2"


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def question(row: dict[str, Any]) -> str:
    return (row.get("prompt") or row["messages"])[0]["content"]


def test_no_question_is_in_two_files(tmp_path: Path) -> None:
    """Neighbouring seeds of reasoning-gym share problems; the files share none, and every seed has one evaluation."""
    folders = [tmp_path / str(seed) for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        task = tasks.parse_task(SUMS)
        written = tasks.write_data(folder, [[task]], seed=seed, num_train=300, num_eval=64, num_warm_up=32)
        assert (written.num_train, written.num_eval, written.num_warm_up) == (300, 64, 32)
        asked = [question(row) for name in ("train", "eval", "sft") for row in rows(folder, name)]
        assert len(set(asked)) == len(asked) == 300 + 64 + 32
    assert (folders[0] / "eval.jsonl").read_bytes() == (folders[1] / "eval.jsonl").read_bytes()
    train = [{question(row) for row in rows(folder, "train")} for folder in folders]
    assert len(train[0] & train[1]) < 150


def test_a_task_with_too_few_questions_is_refused(tmp_path: Path) -> None:
    """There are 200 sums and differences of two digits: 150 of them held out leave too few to train on."""
    task = tasks.parse_task("chain_sum:max_terms=2,max_digits=1")
    with pytest.raises(ConfigError, match="too few different questions"):
        tasks.write_data(tmp_path / "data", [[task]], seed=0, num_train=300, num_eval=150, num_warm_up=8)
    assert not (tmp_path / "data").exists()


async def test_the_reward_service_gives_the_task_s_own_scores(tmp_path: Path) -> None:
    """Right, in tags, wrong; a row that is no problem of reasoning-gym is an error and no score."""
    tasks.write_data(tmp_path, [[tasks.parse_task(SUMS)]], seed=0, num_train=8, num_eval=8, num_warm_up=1)
    row = rows(tmp_path, "eval")[0]
    truth = json.loads(row["ground_truth"])["entry"]["answer"]
    rewards = UserRewards(RewardSettings(name=tasks.REWARD), num_workers=1, timeout_s=60.0)
    scorer = rewards.by_name[tasks.REWARD]

    def group(ground_truth: str) -> GroupTexts:
        completions = (truth, f"so\n<answer> {truth} </answer>", f"{int(truth) + 1}")
        request = RewardRequest(name=tasks.REWARD, data_source=row["data_source"], ground_truth=ground_truth)
        return GroupTexts("g", question(row), completions, ("stop",) * 3, request)

    try:
        good, foreign = await scorer.score([group(row["ground_truth"]), group("42")], attempt=1)
    finally:
        await rewards.close()
    assert isinstance(good, GroupScores)
    assert good.rewards[:2] == (1.0, 1.0)
    assert good.rewards[2] < 1.0
    assert good.parts["right"] == (1.0, 1.0, 0.0)
    assert isinstance(foreign, RewardError)
    assert "no problem of reasoning-gym" in str(foreign)


def test_tasks_whose_scorers_evaluate_text_are_refused() -> None:
    """The list is that of the installed package: every `score_answer` from which eval or SymPy's parser is reached."""
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    assert {name for name, (task, _) in datasets.items() if evaluates(task)} == tasks.EVALUATES_ANSWERS
    for name in ("countdown", "puzzle24"):
        with pytest.raises(ConfigError, match="evaluates answers as code"):
            tasks.parse_task(name)
        truth = json.dumps({"task": name, "options": {}, "entry": {"answer": "1"}})
        with pytest.raises(ConfigError, match="evaluates answers as code"):
            tasks.score("reasoning_gym", "1", truth)


def evaluates(task: type) -> bool:
    """Return True if functions of the task's module that `score_answer` reaches evaluate text."""
    tree = ast.parse(inspect.getsource(sys.modules[task.__module__]))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    seen: set[str] = set()
    left = ["score_answer"]
    while left:
        name = left.pop()
        if name not in functions and name in {"eval", "exec", "parse_expr", "sympify"}:
            return True
        if name not in functions or name in seen:
            continue
        seen.add(name)
        calls = [node.func for node in ast.walk(functions[name]) if isinstance(node, ast.Call)]
        left += [getattr(call, "id", getattr(call, "attr", "")) for call in calls]
    return False


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("chain_sums", "has no task 'chain_sums'; near: chain_sum"),
        ("chain_sum:terms=2", "unexpected keyword argument 'terms'"),
        ("chain_sum:max_terms=0", "max_terms must be >= min_terms"),
        ("chain_sum:seed=3", "have flags of their own"),
    ],
)
def test_what_is_no_task_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tasks.parse_task(text)


def test_the_recipe_writes_a_run_file_of_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every service takes it: the reward by its import path, with what counts as correct, and room for questions."""
    shared = f"smollm2 --no-train --gguf any.gguf --dir {tmp_path} --dtype float32 --steps 10".split()
    assert run(["recipe", *shared, "--task", SUMS]) == 0
    loaded = config_show.load_all([tmp_path / "smollm2" / "run.toml"], [], {})
    trainer = next(one.settings for one in loaded if isinstance(one.settings, TrainerSettings))
    assert (trainer.reward.name, trainer.reward.success) == (tasks.REWARD, {tasks.REWARD: 1.0})
    found = rows(tmp_path / "smollm2" / "data", "train")
    assert len(found) == 320
    assert max(len(question(row)) for row in found) < trainer.data.max_prompt_tokens
    assert run(["recipe", *shared, "--run", "none", "--task", "countdown"]) == 1
    assert "evaluates answers as code" in capsys.readouterr().err
