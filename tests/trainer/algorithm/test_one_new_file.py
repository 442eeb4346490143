"""The options and presets of a new file are keys of [algorithm]: shown by writing files into a copy of the package.

`tests/test_extension_costs.py` has a file of each kind, without options.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES = {
    "losses/tilted.py": '''
"""A ratio to a power."""
from __future__ import annotations
from pydantic import Field
from penstock.trainer.algorithm.losses.interface import LossTerms, Options, Tokens, none_of, policy_loss

class TiltedOptions(Options):
    """Options of `tilted`."""
    tilt: float = Field(default=0.5, gt=0.0, description="Exponent of the ratio.")

@policy_loss(options=TiltedOptions, source="arXiv 0000.00000", presets={
    "tilted_grpo": {"advantage": "grpo", "loss": "tilted", "tilt": 0.25, "aggregation": "token-mean"}})
def tilted(tokens: Tokens, *, tilt: float) -> LossTerms:
    """Raise the ratio to a power."""
    ratio = tokens.log_ratio.exp()
    return LossTerms(-tokens.advantages * ratio**tilt, ratio.detach(), none_of(ratio), none_of(ratio))
''',
    "filters/short.py": '''
"""Short answers."""
from __future__ import annotations
from pydantic import Field
from penstock.trainer.algorithm.filters.interface import Candidate, Options, trajectory_filter

class ShortOptions(Options):
    """Options of `short`."""
    least_tokens: int = Field(default=0, description="Answers of fewer tokens are left out.")

@trajectory_filter(options=ShortOptions, source="none", reason="short", switch="least_tokens", reads_advantage=False)
def short(candidate: Candidate, *, least_tokens: int) -> bool:
    """Leave out short answers."""
    return candidate.num_tokens < least_tokens
''',
    "corrections/half.py": '''
"""A constant weight."""
from __future__ import annotations
from pydantic import Field
from penstock.trainer.algorithm.corrections.interface import Drift, Options, correction

class HalfOptions(Options):
    """Options of `half`."""
    half_weight: float = Field(default=0.5, description="Weight of every token.")

@correction(options=HalfOptions, source="none")
def half(drift: Drift, *, half_weight: float):
    """Weigh every token alike."""
    return drift.mismatch.new_full(drift.mismatch.shape, half_weight)
''',
}  # fmt: skip

USE = """
import json, sys
from penstock.protocol.config.run_file import format_config, load
from penstock.trainer.settings import TrainerSettings

given = ["model.path=m", "algorithm.name=tilted_grpo", "algorithm.normalise_by_std=false", "algorithm.least_tokens=2",
         'algorithm.corrections=["half"]', "algorithm.half_weight=0.25"]
loaded = load(TrainerSettings, overrides=given)
settings = loaded.settings.algorithm
shown = format_config(loaded)
without_torch = "torch" not in sys.modules
import torch
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.algorithm.credit import Scored, credit_rule

credit = credit_rule(settings, longest=9)([Scored([1.0, 0.5], [1, 2], [False, False])])
ones = torch.ones(2)
batch = MicroBatch(torch.zeros(1, 2).long(), ones.long(), ones.long(), -ones, ones, ones, torch.zeros(2).long(),
                   torch.zeros(2), torch.zeros(2), 1)
outcome = build_objective(settings)((-ones + 0.8).requires_grad_(), batch)
print(json.dumps({"shown": shown, "advantages": credit.advantages, "skipped": credit.skipped,
                  "weights": credit.weights, "loss": float(outcome.loss.detach()), "without_torch": without_torch,
                  "rejected": float(outcome.sums["rejected_half"])}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the trainer consists of, with three files more and nothing else changed."""
    root = tmp_path_factory.mktemp("copy")
    package = root / "penstock"
    for name in ("protocol", "trainer"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "src" / "penstock" / "__init__.py", package)
    shutil.copy(ROOT / "docs" / "algorithms.md", root)
    (root / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "algorithm_reference.py", root / "docs")
    for name, text in FILES.items():
        path = package / "trainer" / "algorithm" / name
        assert not path.exists()
        path.write_text(text.lstrip())
    return root


def run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_one_file_is_a_choice_of_settings_objective_and_credit(copy: Path) -> None:
    """Its options are keys with default and origin, its preset is a name, its function computes; torch only then."""
    done = run(copy, "-c", USE)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["without_torch"]
    shown = dict(line.split("  #")[0].split(" = ", 1) for line in found["shown"].splitlines() if " = " in line)
    shown = {key: value.strip() for key, value in shown.items()}
    assert shown["algorithm.loss"] == '"tilted"'
    assert shown["algorithm.tilt"] == "0.25"
    assert any(
        line.startswith("algorithm.tilt ") and line.endswith("# preset tilted_grpo")
        for line in found["shown"].splitlines()
    )
    assert found["advantages"] == [0.25, -0.25]
    assert found["skipped"] == {"short": 1}
    assert found["weights"][0] == 0.0
    ratio = 2.718281828**0.8
    assert found["loss"] == pytest.approx(0.25 * -2 * ratio**0.25, rel=1e-5)
    assert found["rejected"] == 0


def test_the_check_of_the_page_names_what_is_missing(copy: Path) -> None:
    """The tables of the page are renewed by the command; until then the check fails and lists the new rows."""
    command = ("-m", "docs.algorithm_reference", "algorithms.md")
    before = run(copy, *command, "--check")
    assert before.returncode == 1
    for name in ("tilted", "short", "half", "tilt", "least_tokens", "half_weight"):
        assert f"| `{name}` |" in before.stderr
    assert run(copy, *command).returncode == 0
    assert run(copy, *command, "--check").returncode == 0
