"""A reward is one file: added to a copy of the package, it is listed and scores through the real service."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.reward_service.conftest import Wire, asking
from tests.reward_service.processes import ROOT, StartService

from penstock.reward_service.__main__ import main

NEW_REWARD = '''"""factor times the share of capitals."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.rewards.reward import PureReward
from penstock.reward_service.rewards.reward import Verdict


class Parameters(Section):
    """Parameters of `capitals`."""

    factor: float = Field(default=1.0, description="What all capitals are worth.")


def judge(parameters: Parameters, completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    shares = [sum(map(str.isupper, text)) / len(text) for text in completions]
    return [Verdict(parameters.factor * share, {"share": share}) for share in shares]


REWARD = PureReward(
    name="capitals",
    description="factor times the share of capitals",
    judge=judge,
    parameters=Parameters,
    data_sources=("shouted",),
    parts=("share",),
)
'''

RUN_FILE = """
[reward.define.loud.parts.big]
reward = "capitals"
parameters.factor = 4.0
"""


def copy_of_the_package(folder: Path) -> Path:
    """Copy the packages that the reward service needs below ``folder``; return the entry for PYTHONPATH."""
    package = folder / "site" / "penstock"
    for name in ("protocol", "sandbox", "serving", "reward_service"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("*.pyc.*"))  # being written
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / "src" / "penstock" / name, package / name)
    return package.parent


@pytest.mark.slow
def test_one_new_file_is_a_reward(wire: Wire, start_service: StartService, tmp_path: Path) -> None:
    """With only the file added, the reward is listed with its parameters, fits its data set, and can be a part."""
    site = copy_of_the_package(tmp_path)
    (site / "penstock" / "reward_service" / "rewards" / "capitals.py").write_text(NEW_REWARD)
    environ = {"PYTHONPATH": str(site)}
    command = [sys.executable, "-P", "-m", "penstock.reward_service", "rewards"]
    listed = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True).stdout
    assert "capitals        factor times the share of capitals" in listed
    assert "also as shouted" in listed
    shown = subprocess.run(
        [*command, "capitals"], env=environ, capture_output=True, text=True, timeout=300, check=True
    ).stdout
    assert "factor       default 1.0: What all capitals are worth." in shown

    (tmp_path / "run.toml").write_text(RUN_FILE)
    start_service(str(tmp_path / "run.toml"), environ=environ)
    wire.announce([asking("x", "auto", "AbCd", "abcd", data_source="shouted"), asking("y", "loud", "AB", "aB")])
    scored = wire.wait_scored("x", "y")
    assert (scored["x"][0].rewards, scored["x"][0].scorer) == ((0.5, 0.0), "capitals")
    assert (scored["y"][0].rewards, scored["y"][0].scorer) == ((4.0, 2.0), "loud(capitals)")
    assert scored["y"][0].parts["big.share"] == (1.0, 0.5)


def test_a_reward_is_shown_by_its_name_and_no_secret_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", secret := "sk-" + "a1" * 12]) == 1
    error = capsys.readouterr().err
    assert "no built-in reward" in error
    assert main(["rewards", "nummeric"]) == 1
    assert "did you mean numeric" in capsys.readouterr().err
    assert main(["rewards", "overlong"]) == 0
    assert "longest      required: Length at which the full punishment is reached." in capsys.readouterr().out
    assert secret not in error
