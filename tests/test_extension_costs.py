"""An extension costs one file: put into a copy of the packages, each kind is found by its name, and settings accept it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# A file of each kind by its path in the repository, with the registry that has to find it under the name "added".
FILES = {
    ("trainer/algorithm/losses/added.py", "penstock.trainer.algorithm.chosen_parts:LOSSES"): """
from penstock.trainer.algorithm.losses.interface import LossTerms, Tokens, none_of, policy_loss

@policy_loss(source="the likelihood of every token, weighted by its advantage")
def added(tokens: Tokens) -> LossTerms:
    ratio = tokens.log_ratio.exp()
    return LossTerms(-tokens.advantages * ratio, ratio.detach(), none_of(ratio), none_of(ratio))
""",
    ("trainer/algorithm/estimators/added.py", "penstock.trainer.algorithm.chosen_parts:ESTIMATORS"): """
import torch

from penstock.trainer.algorithm.estimators.interface import Outcomes, advantage_estimator

@advantage_estimator(source="half of the reward")
def added(outcomes: Outcomes) -> torch.Tensor:
    return outcomes.rewards / 2
""",
    ("trainer/algorithm/corrections/added.py", "penstock.trainer.algorithm.chosen_parts:CORRECTIONS"): """
import torch

from penstock.trainer.algorithm.corrections.interface import Drift, correction

@correction(source="tokens that became less likely")
def added(drift: Drift) -> torch.Tensor:
    return drift.to_behaviour < 0
""",
    ("trainer/algorithm/filters/added.py", "penstock.trainer.algorithm.chosen_parts:FILTERS"): """
from penstock.trainer.algorithm.filters.interface import Candidate, trajectory_filter

@trajectory_filter(source="trajectories with the full reward", reason="easy")
def added(candidate: Candidate) -> bool:
    return candidate.reward == 1.0
""",
    ("trainer/algorithm/group_filters/added.py", "penstock.trainer.algorithm.chosen_parts:GROUP_FILTERS"): """
from penstock.trainer.algorithm.group_filters.interface import GroupCandidate, group_filter

@group_filter(source="groups in which every completion was cut", reason="all_cut")
def added(group: GroupCandidate) -> bool:
    return set(group.finish_reasons) == {"length"}
""",
    ("trainer/data/row_formats/added.py", "penstock.trainer.row_format:ROW_FORMATS"): """
from penstock.trainer.row_format import RowFormat

ADDED = RowFormat(name="added", columns="task, solution", required=("task",), prompt="task", ground_truth="solution")
""",
    ("reward_service/rewards/added.py", "penstock.reward_service.registry.built_in:REWARDS"): """
from typing import Any

from penstock.reward_service.rewards.reward import PureReward
from penstock.reward_service.rewards.reward import Verdict

def judge(completions: tuple[str, ...], truth: Any) -> list[Verdict]:
    return [Verdict(float(text.isupper())) for text in completions]

REWARD = PureReward(name="added", description="1 when every letter is a capital", judge=judge, success=1.0)
""",
    ("rollout_service/engines/added.py", "penstock.rollout_service.engines.engine_kind:ENGINES"): """
from penstock.rollout_service.engines.engine_kind import EngineKind

def connect(url: str, *, api_key: str, request_deadline_s: float):
    raise NotImplementedError

KIND = EngineKind(name="added", connect=connect)
""",
    ("agents/environments/games/added.py", "penstock.rollout_service.environments.environment:ENVIRONMENTS"): """
from penstock.agents.environments.games.calculator import Calculator

class Added(Calculator):
    name = "added"

ADDED = Added()
""",
    ("agents/environments/tools/built_in/added.py", "penstock.agents.environments.tools.tool:TOOLS"): """
from penstock.agents.environments.tools.built_in.calculator import CalculatorTool

class Added(CalculatorTool):
    name = "added"

ADDED = Added()
""",
    ("agents/proxy/answer_formats/added.py", "penstock.agents.proxy.answer_formats.answer_format:ANSWER_FORMATS"): """
from penstock.agents.proxy.answer_formats.answer_format import AnswerFormat, ParsedAnswer

class Added(AnswerFormat):
    name = "added"

    def parse(self, text: str) -> ParsedAnswer:
        return ParsedAnswer(text)

ADDED = Added()
""",
    ("rollout_service/teachers/added.py", "penstock.rollout_service.teachers.teacher:TEACHERS"): """
from penstock.rollout_service.teachers.teacher import TeacherKind

def connect(url: str, *, api_key: str):
    raise NotImplementedError

KIND = TeacherKind("added", connect)
""",
    ("console/tracking/writers/added.py", "penstock.console.tracking.interface:TRACKERS"): """
from penstock.console.tracking.interface import TrackerKind

def connect(destination):
    raise NotImplementedError

KIND = TrackerKind("added", "json", "nothing", connect)
""",
    ("console/web/launchers/added.py", "penstock.console.web.launchers.launcher:LAUNCHERS"): """
from penstock.console.web.launchers.local import Local

class Added(Local):
    name = "added"

ADDED = Added()
""",
}  # fmt: skip

PROGRAM = """
import importlib, json, sys

from penstock.protocol.config.run_file import load
from penstock.trainer.settings import TrainerSettings

found = {}
for place in sys.argv[1:]:
    module, _, name = place.partition(":")
    found[place] = getattr(importlib.import_module(module), name).find("added").name
algorithm = ["algorithm.loss=added", "algorithm.advantage=added", 'algorithm.filters=["added"]', 'algorithm.group_filters=["added"]', 'algorithm.corrections=["added"]']
load(TrainerSettings, overrides=["model.path=model", "data.format=added", *algorithm])
print(json.dumps(found))
"""


def test_each_kind_of_extension_is_one_file(tmp_path: Path) -> None:
    """Nothing else is edited: the registries of the copy find the files, and the settings of the trainer accept their names."""
    package = tmp_path / "penstock"
    shutil.copytree(ROOT / "src" / "penstock", package, ignore=shutil.ignore_patterns("*.pyc.*"))  # being written
    for (path, _), source in FILES.items():
        assert not (package / path).exists()
        (package / path).write_text(f'"""An extension that a test adds."""\n{source}')
    places = [place for _, place in FILES]
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, *places],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == dict.fromkeys(places, "added")
