"""`penstock.deploy.scoring`: a reward service for one command."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from tests.servers import require

from penstock.console.tools.rewards import RewardService
from penstock.deploy import scoring
from penstock.protocol import seals
from penstock.protocol.config.run_file import load, toml_text
from penstock.protocol.errors import ConfigError
from penstock.reward_service.settings import RewardSettings

DEFINED = {"gated": {"parts": {"correct": {"reward": "exact_match"}}}}


def recorded(folder: Path) -> Path:
    """Write the recorded settings of a run that defines a reward."""
    path = folder / "config.json"
    seals.write(path, json.dumps({"settings": {"reward": {"name": "gated", "define": DEFINED, "success": None}}}))
    return path


def test_recorded_rewards_and_given_settings_reach_the_service_and_addresses_do_not(tmp_path: Path):
    """A run file is read after the record; the servers and the name of the run are those of the scoring service."""
    words = ["run.toml", "nats.url=nats://a:1", "--s3.endpoint", "http://a:2", "run.id=x", "--reward.name", "gated"]
    first, *rest = scoring._settings_of(words, recorded(tmp_path), tmp_path)
    assert tomllib.loads(Path(first).read_text())["reward"]["define"] == DEFINED
    assert [Path(rest[0]).name, *rest[1:]] == ["run.toml", "--reward.name=gated"]
    settings = load(RewardSettings, files=[Path(first)], overrides=rest[1:], environ={}).settings
    assert list(settings.reward.define) == ["gated"]


def test_json_is_written_as_toml():
    """Any key and text comes back; what has no value is left out."""
    value = {"a b": [1, 2.5, True, 'x"\n\\ é'], "c": {"d": None, "e": {}}}
    assert tomllib.loads(f"v = {toml_text(value)}")["v"] == {"a b": value["a b"], "c": {"e": {}}}


def test_a_file_that_cannot_be_served_is_refused_before_anything_starts(tmp_path: Path):
    with (
        pytest.raises(ConfigError, match=r"reward\.txt: unknown file type; expected one of \.py, \.json, \.toml"),
        scoring.service([tmp_path / "reward.txt"], []),
    ):
        pass
    (tmp_path / "wrong.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"wrong\.py:1"), scoring.service([tmp_path / "wrong.py"], []):
        pass


@pytest.mark.slow
def test_a_served_file_scores_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The reward of the file, one that the run's settings define and the built-in ones are offered; the folder is removed."""
    require("nats-server")
    require("rclone")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(scoring.tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "strict.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 0.25 if solution_str == ground_truth else 0.0\n"
    )
    group = {"prompt": "p", "completions": ["a", "b"], "ground_truth": "a", "data_source": "d"}
    with scoring.service([tmp_path / "strict.py"], [], recorded=recorded(tmp_path)) as url:
        for reward, scores in (("strict", [0.25, 0.0]), ("gated", [1.0, 0.0]), ("exact_match", [1.0, 0.0])):
            answer = RewardService(url).call("POST", "/v1/score", {"reward": reward, "groups": [group]})
            assert [one["score"] for one in answer["results"][0]["scores"]] == scores
    assert list((tmp_path / "scratch").iterdir()) == []
