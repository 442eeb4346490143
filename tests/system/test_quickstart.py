"""The first thing a newcomer types, short: every service, one worker killed, and a report that adds up."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from penstock.protocol.record.run_folder import is_locked
from penstock.trainer.algorithm.stop_checks import MIN_TOKENS
from tests import forked
from tests.console.command import penstock
from tests.packaging.conftest import HostileFolder
from tests.servers import require

STEPS = 12  # packs are still under way when the panel shows the step at which a worker is killed
NUM_HELD_OUT = 100
# The command with a shorter warm-up and fewer held-out prompts; `make wheel-test` and `make bench-quickstart` run it as it is.
COMMAND = f"""
import sys
from dataclasses import replace
from penstock.console.cli.main import main
from penstock.deploy.quickstart_task import TASKS
TASKS["sort"] = replace(TASKS["sort"], sft_batch=48, num_eval={NUM_HELD_OUT})
sys.exit(main())
"""


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """One short quickstart with a SIGKILL in the middle; its JSON line, with the folder of its run.

    Its working directory is full of files with the names of the modules that its processes import.
    """
    require("nats-server")
    require("rclone")
    base = tmp_path_factory.mktemp("quickstart")
    here, folder = HostileFolder(base / "here", base / "imported"), base / "runs"
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, "quickstart", "--json", "--steps", str(STEPS), "--dir", str(folder)],
        cwd=here.path, env={k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PENSTOCK_"))},
        capture_output=True, text=True, timeout=800, check=False,  # the suite's own deadline is 900 s
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    return result | {"folder": folder / "quickstart", "imported": here.imported()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_json_line_contains_the_results(quickstart: dict):
    """All steps ran, also on stale data, with evaluations on the same prompts, and all figures are present."""
    assert quickstart["steps"] == STEPS
    assert 0.0 < quickstart["accuracy_before"] < 1.0
    assert 0.0 < quickstart["accuracy_after"] <= 1.0
    assert quickstart["eval_prompts"] == NUM_HELD_OUT
    assert sum(quickstart["staleness_tokens"].values()) == quickstart["tokens_trained"] > 0
    assert set(quickstart["staleness_tokens"]) <= {"0", "1", "2"}
    assert quickstart["tokens_generated"] >= quickstart["tokens_trained"]
    assert quickstart["versions_published"] == STEPS + 1
    assert set(quickstart["idle_share"]) == {"rollout", "reward", "trainer"}
    assert quickstart["cpu_s"] > 0
    assert quickstart["wall_s"] > 0


@pytest.mark.slow
def test_no_group_is_lost_although_a_worker_was_killed(quickstart: dict):
    """Every issued group was trained, dropped with a reason, or is in flight; none is unaccounted for."""
    groups = quickstart["groups"]
    assert groups["trained"] == 48 * STEPS
    ended = groups["trained"] + sum(groups["dropped"].values())  # dead letters are among the dropped
    assert groups["issued"] == ended + groups["in_flight"]
    assert quickstart["workers"]["worker-0"]["num_lives"] == 2
    assert any("SIGKILL" in incident for incident in quickstart["incidents"])
    assert any("redelivered" in incident for incident in quickstart["incidents"])


@pytest.mark.slow
def test_no_service_imports_from_the_working_directory(quickstart: dict):
    """Servers, reward service, workers, their engines and the trainer run in that folder as anywhere else."""
    assert quickstart["imported"] == ""


@pytest.mark.slow
def test_the_first_step_compares_trainer_and_engine(quickstart: dict):
    """It was sampled by version 0, so that a run starts only if the two agree."""
    rows = map(json.loads, (quickstart["folder"] / "metrics.jsonl").read_text().splitlines())
    first = next(row for row in rows if row["kind"] == "step")
    assert first["mismatch"]["tokens"] == first["tokens_trained"] >= MIN_TOKENS
    assert first["mismatch"]["mean_abs"] < 1e-5
    assert first["mismatch_unseen_steps"] == 0


@pytest.mark.slow
def test_the_report_is_there_to_read_and_to_look_at(quickstart: dict):
    """Markdown, JSON and a picture are in the run's folder, and the report names the next commands."""
    folder = quickstart["folder"]
    text = (folder / "report.md").read_text()
    assert f"{quickstart['accuracy_before']:.3f} → {quickstart['accuracy_after']:.3f}" in text
    assert "penstock chat quickstart" in text
    assert json.loads((folder / "report.json").read_text())["steps"] == STEPS
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")


def holds_best(rows: list[dict]) -> bool:
    return rows[-1]["version"] == STEPS and any(row["kept"]["best"] for row in rows)


def is_a_profile(document: dict) -> bool:
    """Whether the phases are those of all steps, and every service has its CPU seconds by thread."""
    shares = {phase["name"]: phase["share"] for phase in document["phases"]}
    services = document["services"]
    return (
        document["steps"] == STEPS
        and shares["train"] > 0.0
        and sum(shares.values()) == pytest.approx(1.0)
        and {service["role"] for service in services} == {"trainer", "rollout", "reward"}
        and all(0.0 < sum(service["cpu_parts"].values()) <= service["cpu_s"] + 1.0 for service in services)
        and all("engine" in service["cpu_parts"] for service in services if service["role"] == "rollout")
    )


READING = {
    "audit": (["audit", "quickstart", "--json"], lambda out: json.loads(out)["closes"] is True),
    "lineage": (["lineage", "quickstart", "--version", "1"], lambda out: "e0.p" in out),
    "weights": (["weights", "quickstart", "--json"], lambda out: holds_best(json.loads(out))),
    "report": (["runs", "show", "quickstart"], lambda out: "penstock chat quickstart" in out),
    "profile": (["profile", "quickstart", "--json"], lambda out: is_a_profile(json.loads(out))),
    "watch": (["watch", "quickstart", "--json"], lambda out: json.loads(out.splitlines()[-1])["steps"] == STEPS),
}


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_finished_run_is_read_with_one_command(quickstart: dict):
    """Verbs that only read start the stored servers themselves, and release the store afterwards."""
    runs = quickstart["folder"].parent
    for what, (command, holds) in READING.items():
        with forked.children():
            done = penstock(*command, f"run.dir={runs}", cwd=runs)
        assert done.returncode == 0, f"{what}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        assert holds(done.stdout), f"{what}: {done.stdout[-2000:]}"
        assert not is_locked(quickstart["folder"] / "store" / "lock"), f"{what} left servers behind"
