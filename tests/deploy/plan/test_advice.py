"""What `penstock plan` proposes is applied: it fits, and is not slower by the plan, nor by a simulated run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from benchmarks.asynchrony import Job, Mode, run_mode, write_run
from tests.deploy.placement.hosts import model_of
from tests.rigs.simulated_engine import SimulatedOptions

from penstock.console.cli.main import run

RUN_FILE = """
run.id = "demo"
data.train = "train.jsonl"
rollout = { groups_per_step = 8, group_size = 4, max_new_tokens = 400, max_staleness = 0 }
"""


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def rate(plan: dict[str, Any], bound: int) -> float:
    return next(row["tokens_per_s"] for row in plan["waits"] if row["max_staleness"] == bound)


@pytest.mark.parametrize(
    "faults",
    [(), ("worker.packs_in_flight=1", "rollout.max_staleness=2"), ("worker.packs_in_flight=1",)],
    ids=["synchronous", "few packs", "both"],
)
def test_what_is_proposed_fits_and_is_not_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], faults: tuple[str, ...]
) -> None:
    """Each proposal with each setting that makes the rank fit, on the plan of the changed run file."""
    (tmp_path / "run.toml").write_text(RUN_FILE)
    model = f"model.path={model_of(tmp_path, '0.6B')}"
    words = [f"{tmp_path}/run.toml", *faults, model, "--gpu-kind", "H100", "--rank-memory", "9GB"]
    code, before = planned(capsys, *words)
    assert code == 1
    bound = 2 if "rollout.max_staleness=2" in faults else 0
    assert before["proposes"]
    words += before["memory"]["fits_with"][0]["settings"]  # which may cost time
    _, fitting = planned(capsys, *words)
    assert fitting["proposes"]
    for proposed in fitting["proposes"]:
        code, after = planned(capsys, *words, *proposed["settings"])
        assert code == 0, "it fits"
        changed = rate(after, proposed["waits"]["max_staleness"])
        assert changed > rate(fitting, bound), proposed["settings"]
        assert changed >= 0.95 * proposed["waits"]["tokens_per_s"]


@pytest.mark.skipif("PENSTOCK_TEST_ADVICE" not in os.environ, reason="a minute of CPU time: make test-more NAME=advice")
def test_a_real_run_is_faster_with_what_is_proposed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real services around engines and steps that only take time: a synchronous run, and the same with the proposal."""
    engine = SimulatedOptions(slots=16, median_tokens=16, longest_tokens=256)
    job, mode = Job(2, engine, groups_per_engine=3, measured=4), Mode("synchronous", 0)
    (tmp_path / "written").mkdir()
    run_file = write_run(tmp_path / "written", job.for_mode(mode), mode)
    pace = engine.pace
    figures = {
        "workers": 2, "slots": pace.slots, "engine-rate": pace.tokens_per_s, "lone-rate": 1.0 / pace.step_s_alone,
        "trainer-rate": 1.0 / job.token_s, "median": 16, "load": engine.load_s, "publish": 0.1, "score": 0.1,
    }  # fmt: skip
    words = [word for name, value in figures.items() for word in (f"--{name}", str(value))]
    _, plan = planned(capsys, str(run_file), *words)
    settings = plan["proposes"][-1]["settings"]
    assert any(setting.startswith("rollout.max_staleness=") for setting in settings)
    rates = {}
    for name, changes in (("as it is", []), ("proposed", settings)):
        (tmp_path / name).mkdir()
        rates[name] = run_mode(tmp_path / name, job, mode, changes).tokens_per_s
    assert rates["proposed"] > rates["as it is"], (settings, rates)
