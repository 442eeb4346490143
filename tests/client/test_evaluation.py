"""`Client.evaluate`: the command that it runs, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.client import evaluation
from penstock.client.client import _target_name
from penstock.client.handles import FineTuning
from penstock.client.local_backend import LocalTraining
from penstock.client.processes import LocalProcess, RunFailed
from penstock.console.cli.main import app
from penstock.console.cli.options import EvalOptions
from penstock.console.evaluation_results import EvaluationResult
from penstock.protocol.errors import ConfigError, PenstockError

ROWS = [{"prompt": "sort 31", "ground_truth": "13"}]


def parse(words: list[str]) -> tuple[str, tuple[str, ...], EvalOptions]:
    """Target, settings and options as `penstock eval` reads them."""
    _, bound, _ = app.parse_args(["eval", *words])
    return bound.args[0], bound.args[1:], bound.kwargs["options"]


def test_the_arguments_are_those_of_the_verb(tmp_path: Path) -> None:
    """Every argument reaches the parser of `penstock eval` under its name; settings are overrides."""
    options = {"samples": 4, "reward": "my_reward.py", "temperature": 0.5, "max_tokens": None, "workers": 2}
    words = evaluation.arguments("demo@best", ["a.jsonl", "b.jsonl"], tmp_path, options, {"eval": {"num_prompts": 3}})
    target, rest, parsed = parse(words)
    assert target == "demo@best"
    assert parsed.data == (Path("a.jsonl"), Path("b.jsonl"))
    assert (parsed.samples, parsed.temperature, parsed.max_tokens, parsed.workers) == (4, 0.5, None, 2)
    assert parsed.serve == (Path("my_reward.py").absolute(),)
    assert parsed.reward is None
    assert parsed.json
    assert rest == (f"run.dir={tmp_path}", "eval.num_prompts=3")


def test_a_reward_by_name_is_asked_for_by_name(tmp_path: Path) -> None:
    words = evaluation.arguments("m", ["a.jsonl"], tmp_path, {"reward": "math"}, {})
    assert parse(words)[2].reward == "math"


def test_what_a_version_is_of(tmp_path: Path) -> None:
    """Runs have versions; folders and trainings on given answers have none, and one that goes on has no model yet."""
    assert _target_name("demo", 7) == "demo@7"
    assert _target_name("demo", "best") == "demo@best"
    assert _target_name(tmp_path, None) == str(tmp_path)
    with pytest.raises(ConfigError, match="has no versions; they belong to runs"):
        _target_name(tmp_path, 7)
    process = LocalProcess("one", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    try:
        with pytest.raises(PenstockError, match=r"has no model: it is running; wait\(\) for its end"):
            _target_name(FineTuning("sft", LocalTraining("sft", tmp_path / "sft", tmp_path / "model", process)), None)
    finally:
        process.stop()


def test_functions_and_consoles_are_refused(tmp_path: Path) -> None:
    with (
        penstock.Client(runs=tmp_path / "runs") as client,
        pytest.raises(ConfigError, match="write the function into a file, and pass its path"),
    ):
        client.evaluate("demo", "a.jsonl", reward=lambda completions: [0.0])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the Runs API has no evaluate"):
        penstock.Client("http://127.0.0.1:1", token="x").evaluate("demo", "a.jsonl")


@pytest.mark.parametrize(("code", "failed"), [(0, 0), (3, 1)])
def test_the_result_of_the_verb_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, failed: int
) -> None:
    result: dict[str, Any] = {"evaluation_id": "v1-a", "model": "m", "k": 1, "sources": []}
    result["sources"] = [{"source": "all", "prompts": 1, "complete": 1 - failed, "failed": failed}]
    _print(monkeypatch, ["logs in …", json.dumps(result), "1 prompt failed"], code)
    found = evaluation.evaluate("demo", ROWS, tmp_path, {}, {})
    assert isinstance(found, EvaluationResult)
    assert found.overall.failed == failed
    assert json.loads(next((tmp_path / evaluation.FOLDER).glob("rows-*.jsonl")).read_text()) == ROWS[0]


def test_an_evaluation_that_fails_raises_with_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _print(monkeypatch, ["penstock eval: there is no run demo"], 1)
    with pytest.raises(RunFailed, match="there is no run demo"):
        evaluation.evaluate("demo", ROWS, tmp_path, {}, {})


def _print(monkeypatch: pytest.MonkeyPatch, lines: list[str], code: int) -> None:
    """Have a process that prints these lines run in the verb's place."""
    program = f"import sys; print({chr(10).join(lines)!r}); sys.exit({code})"
    monkeypatch.setattr(evaluation.launch, "module", lambda *_: [sys.executable, "-c", program])
