"""`penstock reward list | test | remove` against a real reward service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.connection import NatsSettings, S3Settings
from tests.console.test_command import penstock
from tests.reward_service.processes import Service


@pytest.fixture
def service(
    ring_streams: str, nats_settings: NatsSettings, s3_settings: S3Settings, tmp_path: Path
) -> Iterator[Service]:
    started = Service(ring_streams, nats_settings, s3_settings, tmp_path)
    yield started.ready()
    started.kill()


def test_list_test_and_remove(service: Service, tmp_path: Path):
    """The rewards are listed, tried and removed from the command line."""
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
    assert "would wait and come again" in failed.stderr
    assert penstock("reward", "remove", "mine", "--url", service.url, cwd=tmp_path).returncode == 0
    again = penstock("reward", "remove", "mine", "--url", service.url, cwd=tmp_path)
    assert again.returncode == 1
    assert "no endpoint 'mine' is registered" in again.stderr


def test_an_unknown_reward_is_refused_by_name(service: Service, tmp_path: Path):
    """A slip in a reward's name is answered with what the service says."""
    answer = penstock("reward", "test", "gsm9k", "--url", service.url, cwd=tmp_path)
    assert answer.returncode == 1
    assert "gsm9k" in answer.stderr


def test_no_service_says_how_to_start_one(tmp_path: Path):
    """Where nobody listens, the address and the next command are in the text."""
    answer = penstock("reward", "list", "--url", "http://127.0.0.1:1", cwd=tmp_path)
    assert answer.returncode == 1
    assert "no reward service answers at http://127.0.0.1:1" in answer.stderr
    assert "penstock reward service" in answer.stderr


def test_a_token_file_that_is_missing_is_named(tmp_path: Path):
    """The file that should hold the token is in the text."""
    answer = penstock("reward", "list", "--token-file", "nowhere", cwd=tmp_path)
    assert answer.returncode == 1
    assert "--token-file nowhere: not readable" in answer.stderr
