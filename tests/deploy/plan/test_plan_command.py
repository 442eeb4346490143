"""`penstock plan`: a run file and rates in, figures of several bounds and sentences out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.deploy.plan.__main__ import main

RUN_FILE = """
run.id = "demo"
model.path = "/nowhere"
data.train = "train.jsonl"
rollout = { groups_per_step = 8, group_size = 4, max_new_tokens = 400, max_staleness = 3 }
"""


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    """A run file of a model that need not exist."""
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return str(path)


def test_the_plan_has_the_run_files_bound_and_others(run_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings may follow the flags; the JSON has a row for each bound."""
    assert main([run_file, "--workers", "3", "--json", "worker.packs_in_flight=6"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["max_staleness"] for row in said["waits"]] == [0, 1, 2, 3, 4, 8]
    assert all(0 < row["tokens_per_s"] <= 1.01 * row["ideal_tokens_per_s"] for row in said["waits"])
    assert said["says"]
    assert main([run_file]) == 0
    assert "           3*  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0"], "--workers 0: expected a number above 0"),
        (["--median", "500"], "at most longest_tokens = 400"),
        (["rollout.max_staleness=-1"], "rollout.max_staleness"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    run_file: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the flag or the setting that is wrong, and exit code 2."""
    assert main([run_file, *arguments]) == 2
    assert words in capsys.readouterr().err
