"""Run files from strangers: each is refused with its file, and none hangs, crashes or leaves the runs' folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.protocol.config import sources
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.trainer.settings import TrainerSettings

BASE = '[model]\npath = "m"\n[run]\n'
ID = "must be 1 to 48 characters"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(pytest.param(f'{BASE}id = "{name}"', ID, id=f"run id {name[:12]!r}") for name in
          ("../../etc", "a/b", "..", ".", "", "a" * 49, "a\\tb", "A", "-a", "a b", "a\\nb", "é", "a.b", "%2e%2e")),
        pytest.param(BASE + 'dir = "a\\u0000b"', "run.dir: expected a text without NUL", id="NUL in a path"),
        pytest.param(BASE + f"[trainer]\nsteps = {'9' * 30}", "trainer.steps: expected a number of at most 64", id="30 digits"),
        pytest.param(BASE + f"[trainer]\nsteps = {'9' * 5000}", "run.toml: not valid TOML", id="5,000 digits"),
        pytest.param(BASE + "[trainer]\nlr = inf", ":5: trainer.lr: expected a finite number", id="inf"),
        pytest.param(BASE + "[trainer]\nlr = 1e400", ":5: trainer.lr: expected a finite number", id="1e400"),
        pytest.param(BASE + "[trainer]\nlr = nan", ":5: trainer.lr: expected greater than 0", id="nan"),
        pytest.param(BASE + "[trainer]\nbetas = [0.9, inf]", "trainer.betas: expected a finite number", id="inf in a list"),
        pytest.param(BASE + "[trainer]\nsteps = 2020-01-01", "trainer.steps: expected a valid integer", id="a date"),
        pytest.param(BASE + f"[data]\ntrain = {'[' * 5000}{']' * 5000}", "nested too deeply", id="nested lists"),
        pytest.param(BASE + f"[data]\nmap = {'{a=' * 2000}1{'}' * 2000}", "nested too deeply", id="nested tables"),
        pytest.param(".".join("a" * 2000) + " = 1", "nested too deeply", id="a key of 2,000 parts"),
        pytest.param("a = '''" + "x\n" * 2000, "not valid TOML", id="an open text"),
        pytest.param("a = [\n" + "[1]\n,\n" * 2000 + "]", "unknown", id="4,000 lines of one value"),
        pytest.param(BASE + '[run]\nid = "b"', "Cannot declare", id="a section twice"),
        pytest.param("\0" * 10, ":1: not valid TOML", id="NUL"),
        pytest.param("#" * (sources.MAX_FILE_BYTES + 1), "bytes, the limit is", id="too long"),
    ],
)  # fmt: skip
def test_a_hostile_run_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setattr(sources, "_LINES_BUDGET", 1024**2)
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.toml") as caught:
        load(TrainerSettings, files=[tmp_path / "run.toml"])
    assert expected in str(caught.value)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
def test_only_a_regular_file_is_read(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match=r"run\.toml: not a regular file"):
        load(TrainerSettings, files=[tmp_path / "run.toml"])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.id=../x", ID),
        ("trainer.steps=" + "[" * 5000, "trainer.steps: expected a valid integer"),
        ("trainer.steps=" + "9" * 5000, "trainer.steps: expected a valid integer"),
        ("trainer.lr=inf", "trainer.lr: expected a finite number"),
        (".".join("a" * 3000) + "=1", "unknown section"),
    ],
    ids=lambda text: text[:24],
)
def test_a_hostile_override_is_refused(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(TrainerSettings, overrides=[override, "model.path=m"])
    assert expected in str(caught.value)


def test_a_text_for_a_list_is_answered_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r'rollout\.stop: expected a valid array, got "x"; write \["x"\]'):
        load(TrainerSettings, overrides=["rollout.stop=x", "model.path=m"])
