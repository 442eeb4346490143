"""`penstock reward list | test | errors | drain | resume | remove` against a real reward service."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.console.command import Replaced, penstock, server_arguments
from tests.console.record import recorded_run as recorded
from tests.reward_service.processes import Service

from penstock.console import connections, launch
from penstock.console.cli import reward_verbs
from penstock.console.tools import rewards
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.errors import ConfigError
from penstock.protocol.transport.bus import Bus

Reward = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def service(
    run_streams: str, nats_settings: NatsSettings, s3_settings: S3Settings, tmp_path: Path
) -> Iterator[Service]:
    started = Service(run_streams, nats_settings, s3_settings, tmp_path)
    yield started.ready()
    started.kill()


@pytest.fixture
def reward(service: Service, tmp_path: Path) -> Reward:
    """A verb of `penstock reward` about the service, with the exit code that is expected."""

    def call(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return penstock("reward", *words, "--url", service.url, cwd=tmp_path, code=code)

    return call


def test_list_test_and_remove(service: Service, reward: Reward):
    rows = json.loads(reward("list", "--json").stdout)["rewards"]
    assert {"gsm8k", "math", "exact"} & {row["name"] for row in rows}
    assert "gsm8k" in reward("list").stdout
    scored = reward("test", "gsm8k", "#### 7", "#### 8", "--ground-truth", "7").stdout.splitlines()
    assert scored[0].startswith("scored by gsm8k")
    assert [line.split()[0] for line in scored[1:]] == ["1.000", "0.000"]
    assert service.register("mine", "http://127.0.0.1:9/score").status_code == 201
    failed = reward("test", "mine", code=1)
    assert "mine could not score" in failed.stderr
    assert "would wait and be retried" in failed.stderr
    reward("remove", "mine")
    assert "no endpoint 'mine' is registered" in reward("remove", "mine", code=1).stderr
    assert "gsm9k" in reward("test", "gsm9k", code=1).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reply"),
    [
        (["--url", "http://127.0.0.1:1"], "no reward service answers at http://127.0.0.1:1"),
        (["--url", "http://127.0.0.1:1"], "penstock reward service"),  # what starts one
        (["--token-file", "nowhere"], "--token-file nowhere: not readable"),
    ],
)
def test_a_service_that_cannot_be_asked_is_an_error_with_the_reason(words: list[str], reply: str, tmp_path: Path):
    assert reply in penstock("reward", "list", *words, cwd=tmp_path, code=1).stderr


def rows_file(folder: Path, *rows: Mapping[str, object]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow
def test_a_reward_is_tested_on_rows_of_a_data_file(reward: Reward, tmp_path: Path):
    """The table has the scores of right and wrong answers; the JSON has every score and their spread."""
    data = rows_file(tmp_path, *({"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(30)))
    asked = ("test", "gsm8k", "--data", data, "-n", "20")
    tried = reward(*asked)
    assert "right answer after ####" in tried.stdout
    assert "gsm8k on 20 rows: 140 scores, mean 0.143" in tried.stdout
    found = json.loads(reward(*asked, "--json").stdout)
    assert set(found["by_answer"]["right answer after ####"]) == {1.0}
    assert set(found["by_answer"]["another row's answer after ####"]) == {0.0}
    assert len(found["by_answer"]["nothing"]) == 20
    assert found["spread"]["num_distinct"] == 2


def test_the_rows_of_a_run_file_are_read_as_the_run_reads_them(reward: Reward, tmp_path: Path):
    """Its data.train with its columns; a second place for the same is refused."""
    rows_file(tmp_path, *({"q": f"{n} + {n}", "a": str(2 * n)} for n in range(4)))
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[data]\ntrain = "rows.jsonl"\n[data.map]\nprompt = "q"\nground_truth = "a"\n'
    )
    asked = ("test", "gsm8k", "--run-file", "run.toml")
    found = json.loads(reward(*asked, "--json").stdout)
    assert found["by_answer"]["right answer after ####"] == [1.0] * 4
    for words, reply in (
        (("test", "gsm8k", "--data", "run.toml"), "run.toml: a run file, no data; type: --run-file run.toml"),
        ((*asked, "--data", "rows.jsonl"), "--data rows.jsonl and --run-file run.toml: leave one out"),
        ((*asked, "--map", "rows.jsonl"), "[data.map]"),
    ):
        assert reply in reward(*words, code=1).stderr


def test_extra_info_is_a_json_object(reward: Reward):
    """What a row's column of that name would hold; anything else is refused before a service is asked."""
    for text, reply in (("{", "not valid JSON"), ("[1]", "expected a JSON object, got list")):
        assert f"--extra-info: {reply}" in reward("test", "gsm8k", "--extra-info", text, code=1).stderr
    reward("test", "gsm8k", "--extra-info", '{"a": 1}')


@pytest.mark.slow
def test_equal_scores_and_rows_that_cannot_be_scored_are_named(reward: Reward, tmp_path: Path):
    """A row without a right answer and a missing file are errors that name file and row."""
    data = rows_file(tmp_path, *({"prompt": "say", "ground_truth": text} for text in ("a", "b", "c")))
    tried = reward("test", "format", "--data", data, code=1)
    assert "all 21 scores are 0: equal scores give no training signal" in tried.stderr
    tried = reward("test", "gsm8k", "--data", rows_file(tmp_path, {"prompt": "say"}), code=1)
    assert "rows.jsonl:1: BadGroundTruth" in tried.stderr
    assert "1 of 1 rows could not be scored" in tried.stderr
    assert "absent.jsonl: not readable" in reward("test", "gsm8k", "--data", "absent.jsonl", code=1).stderr


def test_an_endpoint_is_drained_and_resumed(service: Service, reward: Reward):
    service.register("drainable", "http://127.0.0.1:9/score")
    assert "drainable: EndpointDrained; 0 groups in running calls" in reward("drain", "drainable").stdout
    assert "drainable: in service" in reward("resume", "drainable").stdout
    reward("remove", "drainable")


def test_the_errors_of_a_run_are_listed_by_reason(
    bus: Bus, run_streams: str, nats_settings: NatsSettings, tmp_path: Path
):
    """Waiting and dead-lettered groups are counted, with the newest error."""
    asked = ("reward", "errors", run_streams, *server_arguments(nats_settings))
    assert "has no reward errors" in penstock(*asked, cwd=tmp_path, code=0).stdout
    failed = {"reason": "EndpointFailed", "group_ids": ["a", "b"]}
    errors = [recorded.event("reward_error", 0.0, "r0", detail=f"HTTP 50{number}", **failed) for number in range(2)]
    letter = recorded.dead_letter("a").model_copy(update={"reason": "EndpointFailed"})
    recorded.Services(bus, run_streams).say(*errors, letter)
    (line,) = json.loads(penstock(*asked, "--json", cwd=tmp_path, code=1).stdout)
    assert line.pop("newest") in {"HTTP 501", letter.detail}
    assert line == {"reason": "EndpointFailed", "waited": 4, "dead": 1}


def test_a_reward_that_the_run_file_names_as_code_is_tried(
    tmp_path: Path, replaced: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    """The service that is started for the command gets the run file, which allows it to load the code."""
    monkeypatch.setattr(connections, "answers", lambda _: False)
    with pytest.raises(Replaced):
        reward_verbs.try_reward("my_reward.py:f", run_file=tmp_path / "run.toml")
    command = replaced[0]
    assert command[: command.index("--")] == launch.module("penstock.deploy.scoring", str(tmp_path / "run.toml"))


def test_a_command_gets_a_reward_service_where_none_answers(
    tmp_path: Path, replaced: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connections, "answers", lambda _: True)
    assert rewards.service_url(None, (), (), []) == launch.REWARD_URL
    assert rewards.service_url("http://gpu-1:8700", (), (), []) == "http://gpu-1:8700"
    file = tmp_path / "strict.py"
    with pytest.raises(ConfigError, match="there is no such file"):
        rewards.service_url(None, [file], (), [])
    file.write_text("")
    with pytest.raises(ConfigError, match="--serve starts a reward service for this command, and --url names another"):
        rewards.service_url("http://gpu-1:8700", [file], (), [])
    typed = ["rescore", "first", "--serve", str(file), "--reward", "strict", f"--serve={file}"]
    with pytest.raises(Replaced):
        rewards.service_url(None, [file], ["run.toml"], typed)
    monkeypatch.setattr(connections, "answers", lambda _: False)
    with pytest.raises(Replaced):
        rewards.service_url(None, (), (), ["reward", "test", "gsm8k"])
    scoring, again = launch.module("penstock.deploy.scoring"), launch.module("penstock")
    assert replaced == [
        [*scoring, "--serve", str(file), "run.toml", "--", *again, "rescore", "first", "--reward", "strict"],
        [*scoring, "--", *again, "reward", "test", "gsm8k"],
    ]
