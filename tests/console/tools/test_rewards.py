"""`penstock reward list | test | errors | drain | resume | remove` against a real reward service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.console.command import penstock
from tests.reward_service.processes import Service
from tests.servers import secret_file

from penstock.console import connections, launch
from penstock.console.cli import reward_verbs
from penstock.console.tools import rewards
from penstock.protocol import subjects
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import DeadLetter, RunEvent
from penstock.protocol.transport.bus import Bus


@pytest.fixture
def service(
    run_streams: str, nats_settings: NatsSettings, s3_settings: S3Settings, tmp_path: Path
) -> Iterator[Service]:
    started = Service(run_streams, nats_settings, s3_settings, tmp_path)
    yield started.ready()
    started.kill()


def test_list_test_and_remove(service: Service, tmp_path: Path):
    rows = json.loads(penstock("reward", "list", "--json", "--url", service.url, cwd=tmp_path).stdout)["rewards"]
    assert {"gsm8k", "math", "exact"} & {row["name"] for row in rows}
    assert "gsm8k" in penstock("reward", "list", "--url", service.url, cwd=tmp_path).stdout

    tried = penstock(
        *("reward", "test", "gsm8k", "#### 7", "#### 8", "--ground-truth", "7", "--url", service.url), cwd=tmp_path
    )
    assert tried.returncode == 0, tried.stderr
    lines = tried.stdout.splitlines()
    assert lines[0].startswith("scored by gsm8k")
    assert [line.split()[0] for line in lines[1:]] == ["1.000", "0.000"]

    assert service.register("mine", "http://127.0.0.1:9/score").status_code == 201
    failed = penstock("reward", "test", "mine", "--url", service.url, cwd=tmp_path)
    assert failed.returncode == 1
    assert "mine could not score" in failed.stderr
    assert "would wait and be retried" in failed.stderr
    assert penstock("reward", "remove", "mine", "--url", service.url, cwd=tmp_path).returncode == 0
    again = penstock("reward", "remove", "mine", "--url", service.url, cwd=tmp_path)
    assert again.returncode == 1
    assert "no endpoint 'mine' is registered" in again.stderr


def test_an_unknown_reward_is_refused_by_name(service: Service, tmp_path: Path):
    answer = penstock("reward", "test", "gsm9k", "--url", service.url, cwd=tmp_path)
    assert answer.returncode == 1
    assert "gsm9k" in answer.stderr


def test_without_a_service_the_error_explains_how_to_start_one(tmp_path: Path):
    answer = penstock("reward", "list", "--url", "http://127.0.0.1:1", cwd=tmp_path)
    assert answer.returncode == 1
    assert "no reward service answers at http://127.0.0.1:1" in answer.stderr
    assert "penstock reward service" in answer.stderr


def test_a_token_file_that_is_missing_is_named(tmp_path: Path):
    answer = penstock("reward", "list", "--token-file", "nowhere", cwd=tmp_path)
    assert answer.returncode == 1
    assert "--token-file nowhere: not readable" in answer.stderr


def rows_file(folder: Path, *rows: dict[str, object]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_reward_is_tested_on_rows_of_a_data_file(service: Service, tmp_path: Path):
    """The table has the scores of right and wrong answers; the JSON has every score and their spread."""
    data = rows_file(tmp_path, *({"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(30)))
    asked = ("reward", "test", "gsm8k", "--data", data, "-n", "20", "--url", service.url)
    tried = penstock(*asked, cwd=tmp_path)
    assert tried.returncode == 0, tried.stderr
    assert "right answer after ####" in tried.stdout
    assert "gsm8k on 20 rows: 140 scores, mean 0.143" in tried.stdout
    found = json.loads(penstock(*asked, "--json", cwd=tmp_path).stdout)
    assert set(found["by_answer"]["right answer after ####"]) == {1.0}
    assert set(found["by_answer"]["another row's answer after ####"]) == {0.0}
    assert len(found["by_answer"]["nothing"]) == 20
    assert found["spread"]["num_distinct"] == 2


def test_the_rows_of_a_run_file_are_read_as_the_run_reads_them(service: Service, tmp_path: Path):
    """Its data.train with its columns; a second place for the same is refused."""
    rows_file(tmp_path, *({"q": f"{n} + {n}", "a": str(2 * n)} for n in range(4)))
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[data]\ntrain = "rows.jsonl"\n[data.map]\nprompt = "q"\nground_truth = "a"\n'
    )
    asked = ("reward", "test", "gsm8k", "--run-file", "run.toml", "--url", service.url)
    found = json.loads(penstock(*asked, "--json", cwd=tmp_path).stdout)
    assert found["by_answer"]["right answer after ####"] == [1.0] * 4
    asked_as_data = penstock("reward", "test", "gsm8k", "--data", "run.toml", "--url", service.url, cwd=tmp_path)
    assert "run.toml: a run file, no data; type: --run-file run.toml" in asked_as_data.stderr
    for more, reply in (
        ("--data", "--data rows.jsonl and --run-file run.toml: leave one out"),
        ("--map", "[data.map]"),
    ):
        refused = penstock(*asked, more, "rows.jsonl", cwd=tmp_path)
        assert refused.returncode == 1
        assert reply in refused.stderr


def test_a_reward_that_the_run_file_names_as_code_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The service that is started for the command gets the run file, which allows it to load the code."""
    started: list[list[str]] = []

    def replace(command: list[str]) -> None:
        started.append(command)
        raise Replaced

    monkeypatch.setattr(launch, "replace_process", replace)
    monkeypatch.setattr(connections, "answers", lambda _: False)
    with pytest.raises(Replaced):
        reward_verbs.try_reward("my_reward.py:f", run_file=tmp_path / "run.toml")
    assert started[0][: started[0].index("--")] == launch.module("penstock.deploy.scoring", str(tmp_path / "run.toml"))


@pytest.mark.parametrize(("text", "reply"), [("{", "not valid JSON"), ("[1]", "expected a JSON object, got list")])
def test_extra_info_is_a_json_object(service: Service, tmp_path: Path, text: str, reply: str):
    """What a row's column of that name would hold; anything else is refused before a service is asked."""
    refused = penstock("reward", "test", "gsm8k", "--extra-info", text, "--url", service.url, cwd=tmp_path)
    assert refused.returncode == 1
    assert f"--extra-info: {reply}" in refused.stderr
    taken = penstock("reward", "test", "gsm8k", "--extra-info", '{"a": 1}', "--url", service.url, cwd=tmp_path)
    assert taken.returncode == 0, taken.stderr


def test_equal_scores_give_a_warning(service: Service, tmp_path: Path):
    data = rows_file(tmp_path, *({"prompt": "say", "ground_truth": text} for text in ("a", "b", "c")))
    tried = penstock("reward", "test", "format", "--data", data, "--url", service.url, cwd=tmp_path)
    assert tried.returncode == 1
    assert "all 21 scores are 0: equal scores give no training signal" in tried.stderr


def test_rows_that_cannot_be_scored_are_named(service: Service, tmp_path: Path):
    """A row without a right answer and a missing file are errors that name file and row."""
    data = rows_file(tmp_path, {"prompt": "say"})
    tried = penstock("reward", "test", "gsm8k", "--data", data, "--url", service.url, cwd=tmp_path)
    assert tried.returncode == 1
    assert "rows.jsonl:1: BadGroundTruth" in tried.stderr
    assert "1 of 1 rows could not be scored" in tried.stderr
    absent = penstock("reward", "test", "gsm8k", "--data", "absent.jsonl", "--url", service.url, cwd=tmp_path)
    assert absent.returncode == 1
    assert "absent.jsonl: not readable" in absent.stderr


def test_an_endpoint_is_drained_and_resumed(service: Service, tmp_path: Path):
    service.register("drainable", "http://127.0.0.1:9/score")
    drained = penstock("reward", "drain", "drainable", "--url", service.url, cwd=tmp_path)
    assert "drainable: EndpointDrained; 0 groups in running calls" in drained.stdout, drained.stderr
    resumed = penstock("reward", "resume", "drainable", "--url", service.url, cwd=tmp_path)
    assert "drainable: in service" in resumed.stdout
    assert penstock("reward", "remove", "drainable", "--url", service.url, cwd=tmp_path).returncode == 0


def test_the_errors_of_a_run_are_listed_by_reason(
    bus: Bus, run_streams: str, nats_settings: NatsSettings, tmp_path: Path
):
    """Waiting and dead-lettered groups are counted, with the newest error."""
    where = (
        f"nats.url={nats_settings.url}",
        f"nats.user={nats_settings.user}",
        f"nats.password_file={secret_file(nats_settings.secret())}",
    )
    asked = ("reward", "errors", run_streams, *where)
    none = penstock(*asked, cwd=tmp_path)
    assert "has no reward errors" in none.stdout, none.stderr
    for number in range(2):
        event = RunEvent(
            run_id=run_streams,
            source="r0",
            kind="reward_error",
            at=0.0,
            data={"reason": "EndpointFailed", "detail": f"HTTP 50{number}", "group_ids": ["a", "b"]},
        )
        bus.publish(subjects.events(run_streams, "reward_error"), event, msg_id=f"w{number}").wait()
    letter = DeadLetter(
        run_id=run_streams,
        stage="generated",
        subject="s",
        reason="EndpointFailed",
        detail="HTTP 503 at last",
        group_ids=("a",),
        num_delivered=5,
    )
    bus.publish(subjects.dead(run_streams, "generated"), letter, msg_id="d").wait()
    found = penstock(*asked, "--json", cwd=tmp_path)
    assert found.returncode == 1
    (line,) = json.loads(found.stdout)
    assert (line["reason"], line["waited"], line["dead"]) == ("EndpointFailed", 4, 1)
    assert line["newest"] in {"HTTP 501", "HTTP 503 at last"}


class Replaced(Exception):
    """The process would have been replaced."""


def test_a_command_gets_a_reward_service_where_none_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[list[str]] = []

    def replace(command: list[str]) -> None:
        started.append(command)
        raise Replaced

    monkeypatch.setattr(launch, "replace_process", replace)
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
    scoring = launch.module("penstock.deploy.scoring")
    assert started == [
        [
            *scoring,
            "--serve",
            str(file),
            "run.toml",
            "--",
            *launch.module("penstock", "rescore", "first", "--reward", "strict"),
        ],
        [*scoring, "--", *launch.module("penstock", "reward", "test", "gsm8k")],
    ]
