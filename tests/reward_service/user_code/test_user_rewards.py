"""Rewards by import path and file: run in worker processes, recorded with a digest, and an error when they fail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.reward_service.conftest import Wire, asking
from tests.reward_service.processes import StartService
from tests.servers import wait_for

from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.errors import ConfigError
from penstock.reward_service.endpoints.wire import GroupToScore
from penstock.reward_service.errors import UserCodeFailed
from penstock.reward_service.registry.user_rewards import UserRewards, WorkerPool

MODULE = '''
import os, subprocess, sys, time
from pathlib import Path

from pydantic import Field

from penstock.protocol.config.connection import Section
from penstock.reward_service.errors import BadGroundTruth
from penstock.reward_service.rewards.reward import PureReward
from penstock.reward_service.rewards.reward import Verdict

print("printed while it is imported")


def tilted(data_source, solution_str, ground_truth, extra_info=None):
    """verl's signature."""
    print("printed while it scores", solution_str)
    if "leave" in solution_str:
        os._exit(3)
    if "hang" in solution_str:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        time.sleep(300)
    if "raise" in solution_str:
        raise RuntimeError("cannot judge this")
    seen = sum(name.startswith("PENSTOCK_") for name in os.environ)
    return {"score": float(solution_str == ground_truth), "settings_seen": seen, "pid": os.getpid()}


def weighed(solution_str, ground_truth, *, factor, offset=0.0):
    """verl's with arguments of the run file (reward_kwargs)."""
    return factor * (solution_str == ground_truth) + offset


async def by_length(prompts, completions, **columns):
    """TRL's signature."""
    return [len(text) for text in completions]


class Parameters(Section):
    factor: float = Field(gt=0)


def judge(parameters, completions, truth):
    if truth is None:
        raise BadGroundTruth("a ground truth is needed")
    return [Verdict(parameters.factor * (text == truth)) for text in completions]


scaled = PureReward(name="scaled", description="factor times exact match", judge=judge, parameters=Parameters)
number = 3
'''

RUN_FILE = """
[reward]
name = "my_rewards.py:tilted"
by_source.long = "my_module:by_length"

[reward.define.both.parts.exact]
reward = "my_module:scaled"
parameters.factor = 4.0

[reward.define.both.parts.form]
reward = "my_module:by_length"
weight = 0.5

[reward.define.arguments.parts.one]
reward = "rewards/mine.py:weighed"
parameters = { factor = 3, offset = -0.5 }
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A working directory with user code, once as a file and once as a module."""
    for name in ("my_rewards.py", "my_module.py"):
        (tmp_path / name).write_text(MODULE)
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "mine.py").write_text(MODULE)
    (tmp_path / "run.toml").write_text(RUN_FILE)
    return tmp_path


def test_code_of_the_run_file_scores_and_its_digest_is_recorded(
    wire: Wire, start_service: StartService, code: Path
) -> None:
    """By file, in a folder too, by module and with parameters: the group has rewards, parts and the code's digest."""
    service = start_service(str(code / "run.toml"), cwd=code)
    wire.announce(
        [
            asking("file", "my_rewards.py:tilted", "4", "5"),
            asking("module", "my_module:by_length", "four", "4"),
            asking("parts", "both", "4", "12"),
            asking("arguments", "arguments", "4", "5"),
            asking("truthless", "both", "4", truth=None),
        ]
    )
    found = {name: groups[0] for name, groups in wire.wait_scored("file", "module", "parts", "arguments").items()}
    assert found["file"].rewards == (1.0, 0.0)
    assert found["file"].parts["settings_seen"] == (0.0, 0.0)
    name, _, digest = found["file"].scorer.partition("@")
    assert (name, len(digest)) == ("my_rewards.py:tilted", 16)
    assert found["module"].rewards == (4.0, 1.0)
    assert found["parts"].rewards == (4.5, 1.0)
    assert found["arguments"].rewards == (2.5, -0.5)
    assert found["arguments"].scorer.startswith("arguments(rewards/mine.py:weighed@")
    digest = found["module"].scorer.partition("@")[2]
    assert found["parts"].scorer == f"both(my_module:scaled@{digest}, my_module:by_length@{digest})"
    (letter,) = wire.wait_dead("truthless")
    assert (letter.reason, "a ground truth is needed" in letter.detail) == ("BadGroundTruth", True)
    assert found["file"].parts["pid"][0] != service.pid
    assert "printed while it scores" in service.output

    rows = {row["name"]: row for row in service.get("/v1/rewards")["rewards"]}
    assert rows["my_rewards.py:tilted"]["kind"] == "user"
    body = {"reward": "os:getcwd", "groups": [{"completions": ["x"]}]}
    refused = service.post("/v1/score", body).json()["results"][0]["error"]
    assert refused["reason"] == "UnknownReward"
    assert "the run file of this reward service does not name" in refused["detail"]


@pytest.mark.slow
def test_code_that_fails_is_an_error_of_its_group_only(wire: Wire, start_service: StartService, code: Path) -> None:
    """A call that hangs, ends its process or raises is dead-lettered with its reason; other groups are scored."""
    service = start_service(
        str(code / "run.toml"), "reward_service.endpoint_attempts=2", "reward_service.user_timeout_s=3", cwd=code
    )
    name = "my_rewards.py:tilted"
    wire.announce([asking(text, name, "4", text) for text in ("hang", "leave", "raise")] + [asking("fine", name, "4")])
    assert wire.wait_scored("fine")["fine"][0].rewards == (1.0,)
    letters = {letter.group_ids[0]: letter for letter in wire.wait_dead("hang", "leave", "raise")}
    assert (letters["hang"].reason, letters["leave"].reason) == ("UserCodeFailed", "UserCodeFailed")
    assert "did not answer in time while scoring group hang and was killed" in letters["hang"].detail
    assert "ended with code 3 while scoring group leave" in letters["leave"].detail
    assert letters["raise"].reason == "ScoreRefused"
    assert "RuntimeError: cannot judge this (my_rewards.py, line" in letters["raise"].detail
    assert wire.take().keys() == {"fine"}
    assert service.alive()


@pytest.mark.slow
def test_workers_exit_with_a_killed_service(wire: Wire, start_service: StartService, code: Path) -> None:
    service = start_service(str(code / "run.toml"), cwd=code)
    wire.announce([asking("file", "my_rewards.py:tilted", "4")])
    (scored,) = wire.wait_scored("file")["file"]
    worker = Path(f"/proc/{int(scored.parts['pid'][0])}")
    assert worker.exists()
    service.signal(signal.SIGKILL)
    service.wait()
    wait_for(lambda: not worker.exists(), "the worker to end")


@pytest.mark.parametrize(
    ("reward", "parameters", "expected"),
    [
        ("no_such_module:x", "", "importing no_such_module failed: ModuleNotFoundError"),
        ("my_module:number", "", "expected a function, a callable object or a PureReward, got int"),
        ("my_module:absent", "", "has no attribute 'absent'"),
        ("my_module:scaled", "parameters.factor = -1.0", "parameters.factor: Input should be greater than 0"),
        (
            "my_module:tilted",
            "parameters.factor = 1.0",
            "tilted takes no parameter factor from the run file; it takes none",
        ),
        ("my_module:weighed", "parameters = {factor = 1, ground_truth = 2}", "takes no parameter ground_truth from"),
        ("my_module:weighed", "parameters.offset = 1", "weighed needs factor, which a reward service cannot give"),
    ],
)
async def test_code_that_cannot_be_used_is_refused_at_the_start(
    code: Path, monkeypatch: pytest.MonkeyPatch, reward: str, parameters: str, expected: str
) -> None:
    """The check names the reward and what is wrong; the process that tried to load it has exited."""
    monkeypatch.chdir(code)
    text = f'[define.mine.parts.one]\nreward = "{reward}"\n{parameters}\n'
    user = UserRewards(RewardSettings.model_validate(tomllib.loads(text)), num_workers=1, timeout_s=5.0)
    with pytest.raises(ConfigError, match=reward.partition(":")[2]) as refused:
        await user.check()
    assert expected in str(refused.value)
    await user.close()


def test_the_service_does_not_start_with_code_that_cannot_be_loaded(
    wire: Wire, start_service: StartService, code: Path
) -> None:
    (code / "my_module.py").write_text("1 / 0\n")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        start_service(str(code / "run.toml"), cwd=code)


def test_an_entry_point_is_a_reward_by_its_name(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward of an installed package is listed without an import, and scores under its own name."""
    info = code / "my_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.rewards]\nlonger = my_module:by_length\n")
    monkeypatch.setenv("PYTHONPATH", str(code))
    monkeypatch.syspath_prepend(str(code))
    listed = subprocess.run(
        [sys.executable, "-m", "penstock.reward_service", "rewards"], capture_output=True, text=True, check=True
    ).stdout
    assert "longer          my_module:by_length (entry point of an installed package)" in listed
    assert "printed while it is imported" not in listed

    async def check() -> dict[str, str]:
        user = UserRewards(RewardSettings(name="longer"), num_workers=1, timeout_s=5.0)
        found = await user.check()
        await user.close()
        return found

    assert set(asyncio.run(check())) == {"longer"}
    assert "my_module" not in sys.modules


async def test_a_worker_that_is_killed_is_replaced(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group in progress is an error; the next one gets a new process, which reloads the code."""
    monkeypatch.chdir(code)
    pool = WorkerPool("my_rewards.py:tilted", {}, num_workers=1, timeout_s=20.0)
    group = GroupToScore.model_validate({"completions": ["4"], "ground_truth": "4"})
    _, digest = await pool.score(group)
    (pid,) = pool.pids
    slow = asyncio.create_task(pool.score(GroupToScore.model_validate({"completions": ["hang"]})))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(UserCodeFailed, match="was ended by SIGKILL"):
        await slow
    (code / "my_rewards.py").write_text(MODULE + "# changed\n")
    (score,), changed = await pool.score(group)
    assert score.score == 1.0
    assert changed != digest
    (pid,) = pool.pids
    await pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
