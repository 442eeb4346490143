"""`penstock eval` end to end: real servers, reward service, worker and engine, killed and given again."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.deadline import ends_within
from tests.servers import require, wait_for

from penstock.console import evaluation_results
from penstock.console.cli.options import EvalOptions
from penstock.console.evaluation_results import Outcome
from penstock.console.registry import versions
from penstock.console.registry.versions import Tag
from penstock.deploy import quickstart_task
from penstock.deploy.bootstrap import connection_arguments, without_servers
from penstock.deploy.early_checks import check_inputs
from penstock.deploy.evaluation import target
from penstock.deploy.evaluation.evaluate import correctness
from penstock.deploy.evaluation.prepare import _sampling, alone, prepare
from penstock.protocol import seals
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.errors import ConfigError, UntrustedFolder
from penstock.trainer.evaluation.eval_result import SuccessRules
from penstock.trainer.settings import TrainerSettings

ROOT = Path(__file__).parents[3]


def command(folder: Path, *options: str) -> list[str]:
    return [
        *(sys.executable, "-P", "-m", "penstock", "eval", str(folder / "model"), "--data", str(folder / "eval.jsonl")),
        *("-k", "2", "--max-tokens", "9", "--json", f"run.dir={folder / 'runs'}", *options),
    ]


@pytest.mark.chaos
def test_an_evaluation_that_was_killed_continues_and_gives_one_result(tmp_path: Path) -> None:
    """Prompts that were over are not sampled again; the result counts every prompt once, and is printed and stored."""
    require("nats-server")
    require("rclone")
    quickstart_task.write_data(tmp_path, seed=0, num_sft=1, num_train=1, num_eval=200)
    quickstart_task.write_model(tmp_path / "model", seed=0)
    evaluations = tmp_path / "runs" / "eval-model" / evaluation_results.FOLDER

    def outcomes() -> dict[int, Outcome]:
        return next((evaluation_results.read_outcomes(one) for one in evaluations.glob("model-*")), {})

    with subprocess.Popen(command(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
        wait_for(outcomes, "the first prompts")
        killed.send_signal(signal.SIGKILL)
    before = outcomes()
    assert before
    done = subprocess.run(command(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [(one["source"], one["prompts"], one["complete"]) for one in result["sources"]] == [
        ("sort_digits", 200, 200)
    ]
    after = outcomes()
    assert sorted(after) == list(range(200))
    assert {number: after[number] for number in before} == before
    assert next(evaluation_results.results_of(tmp_path / "runs" / "eval-model")).model_dump(mode="json") == result
    assert not (next(evaluations.glob("model-*")) / "work" / "store").exists()


def test_what_is_evaluated_is_named_by_folder_or_run(tmp_path: Path) -> None:
    quickstart_task.write_model(tmp_path / "some model", seed=0)
    runs = [f"run.dir={tmp_path / 'runs'}"]
    found = target.find(str(tmp_path / "some model"), runs, {})
    assert (found.run, found.version, found.home) == (None, None, tmp_path / "runs" / "eval-some-model")
    home = tmp_path / "runs" / "one"
    home.mkdir(parents=True)
    seals.write(
        home / "config.json", '{"settings": {"data": {"train": "x", "system_prompt": "s"}, "reward": {"name": "math"}}}'
    )
    with pytest.raises(ConfigError, match="run one has no final model yet"):
        target.find("one", runs, {})
    quickstart_task.write_model(home / "model", seed=0)
    (home / "trainer.json").write_text('{"version": 12}')
    final = target.find("one", runs, {})
    assert (final.run, final.version, final.folder) == ("one", 12, home / "model")
    assert (
        target.recorded_settings(final, with_reward=True) == 'data = {system_prompt = "s"}\nreward = {name = "math"}\n'
    )
    assert target.recorded_settings(final, with_reward=False) == 'data = {system_prompt = "s"}\n'
    (home / "config.json").write_text('{"settings": {"data": {"format": "evil.py:f"}}}')
    with pytest.raises(UntrustedFolder, match="penstock runs trust one"):
        target.recorded_settings(final, with_reward=True)
    versions.store_tag(home, "kept", Tag(version=7))
    quickstart_task.write_model(home / versions.MODELS / "kept", seed=0)
    kept = target.find("one@kept", runs, {})
    assert (kept.run, kept.version, kept.folder) == ("one", 7, home / versions.MODELS / "kept")
    with pytest.raises(ConfigError, match="no run two"):
        target.find("two", runs, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": 0}, "-k 0: expected 1 sample"),
        ({"num_prompts": 0}, "--num-prompts 0: expected 1 or more"),
        ({}, r"--data: there is no file .*gone\.jsonl"),
    ],
)
def test_options_that_evaluate_nothing_are_refused(given: dict[str, object], message: str, tmp_path: Path) -> None:
    quickstart_task.write_model(tmp_path / "model", seed=0)
    options = replace(EvalOptions(data=(Path("gone.jsonl"),)), **given)
    with contextlib.ExitStack() as cleaned, pytest.raises(ConfigError, match=message):
        prepare(str(tmp_path / "model"), [f"run.dir={tmp_path / 'runs'}"], options, cleaned)
    assert not list(tmp_path.glob("runs/*/*/*"))


@pytest.mark.parametrize(("temperature", "samples"), [(0.0, 2), (-1.0, 1), (101.0, 2), (math.nan, 1)])
def test_a_temperature_that_samples_nothing_new_is_refused(temperature: float, samples: int, tmp_path: Path) -> None:
    """Greedy samples are all the same; a temperature below 0, above 100 or not a number has no meaning."""
    quickstart_task.write_model(tmp_path, seed=0)
    overrides = ["data.train=t.jsonl", f"model.path={tmp_path}"]
    trainer = load(TrainerSettings, overrides=overrides).settings
    with pytest.raises(ConfigError, match="--temperature"):
        _sampling(EvalOptions(data=(), temperature=temperature, samples=samples), trainer, ChatTokenizer.read(tmp_path))


def test_a_version_that_is_not_stored_and_settings_that_are_damaged_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "one"
    home.mkdir()
    seals.write(home / "config.json", "[]")
    runs = [f"run.dir={tmp_path}"]
    rows = [{"version": 3, "head": True, "state_root": "a", "kept": {"best": None}}]
    monkeypatch.setattr(target.launch, "module", lambda *_: [sys.executable, "-c", f"print({json.dumps(rows)!r})"])
    found = target.find("one@head", runs, {})
    assert found.version == 3
    with pytest.raises(ConfigError, match=r"config\.json: its settings cannot be read"):
        target.recorded_settings(found, with_reward=True)
    with pytest.raises(ConfigError, match="run one has no version 4; stored: 3"), ends_within(30):
        target.find("one@4", runs, {})
    monkeypatch.setattr(target.launch, "module", lambda *_: [sys.executable, "-c", "exit('penstock: no NATS')"])
    with pytest.raises(ConfigError, match=r"^no NATS$"):
        target.find("one@head", runs, {})


def test_answers_fit_the_context_where_the_default_of_training_would_not(tmp_path: Path) -> None:
    """The services of an evaluation sample answers of its length alone; the quickstart's model has 128 positions."""
    quickstart_task.write_data(tmp_path, seed=0, num_sft=1, num_train=1, num_eval=2)
    quickstart_task.write_model(tmp_path / "model", seed=0)
    options = EvalOptions(data=(tmp_path / "eval.jsonl",), max_tokens=9, samples=1)
    with contextlib.ExitStack() as cleaned:
        prepared = prepare(str(tmp_path / "model"), [f"run.dir={tmp_path / 'runs'}"], options, cleaned)
        files, overrides = split_arguments(prepared.arguments)
        check_inputs(load(TrainerSettings, files=files, overrides=overrides, environ={}).settings)


def test_other_weights_are_another_evaluation(tmp_path: Path) -> None:
    quickstart_task.write_model(tmp_path / "model", seed=0)
    first = target.find(str(tmp_path / "model"), [], {}).identity
    assert target.find(str(tmp_path / "model"), [], {}).identity == first
    quickstart_task.write_model(tmp_path / "model", seed=1)
    assert target.find(str(tmp_path / "model"), [], {}).identity != first


def test_the_servers_of_the_run_are_not_those_of_the_evaluation() -> None:
    """Addresses and folders of the run say where a version is stored; the evaluation's services never get them."""
    of_the_run = ["--nats.url", "nats://a:1", "s3.endpoint=http://a:2", "run.dir=/runs"]
    rest = [*of_the_run, "worker.device=cuda", "--rollout.stop", "x"]
    assert connection_arguments(rest) == ["--nats.url=nats://a:1", "s3.endpoint=http://a:2", "run.dir=/runs"]
    assert without_servers(rest) == ["worker.device=cuda", "--rollout.stop=x"]


def test_one_evaluation_runs_once(tmp_path: Path) -> None:
    refused = pytest.raises(ConfigError, match="this evaluation runs in another process")
    with alone(tmp_path), refused, alone(tmp_path):
        pass
    with alone(tmp_path):
        pass


def test_correct_is_what_the_rule_of_its_reward_says() -> None:
    """By the reward of the data source where the reward is chosen by it; without a rule nothing is correct or wrong."""
    rules = SuccessRules({"exact_match": 1.0, "mixed": {"right": 0.5}}, {"sort": "exact_match"})
    auto = Outcome(prompt=0, source="s", reward="auto", data_source="sort", rewards=(1.0, 0.0))
    parts = Outcome(prompt=1, source="s", reward="mixed", rewards=(0.1, 0.9), parts={"right": (1.0, 0.0)})
    found = correctness([auto, parts], rules)
    assert found.of == {0: (True, False), 1: (True, False)}
    assert found.rule == "exact_match ≥ 1, mixed.right ≥ 0.5"
    unknown = correctness([auto, Outcome(prompt=2, source="s", reward="length", rewards=(3.0,))], rules)
    assert unknown.of is None
    assert "set reward.success.length" in unknown.rule
    assert correctness([parts.model_copy(update={"parts": {}})], rules).rule.endswith("has no part right")
