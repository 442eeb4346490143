"""The task of SkyPilot: its shell, run by bash with a stand-in for `penstock`, and its fields."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.console import launch
from penstock.console.cli.main import app
from penstock.protocol.config.run_file import load
from penstock.trainer.settings import TrainerSettings

ROOT = Path(__file__).parents[3]
TASK: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "skypilot" / "penstock.yaml").read_text())
SERVERS = {"PENSTOCK_NATS__URL": "tls://n:4222", "PENSTOCK_S3__ENDPOINT": "https://s:9000"}
IPS = "10.0.0.1\n10.0.0.2"


def run(folder: Path, **environ: str) -> tuple[int, str, list[str]]:
    """Exit code, stderr and the arguments that `penstock` got, with what SkyPilot exports."""
    (folder / "bin").mkdir()
    stand_in = folder / "bin" / "penstock"
    stand_in.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > arguments\n')
    stand_in.chmod(0o755)
    exported = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"}
    given = {
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "HOME": os.environ.get("HOME", "/"),
        **TASK["envs"],
        **exported,
        **environ,
    }
    done = subprocess.run(
        ["bash", "-c", TASK["run"]], cwd=folder, env=given, capture_output=True, text=True, check=False, timeout=20
    )
    written = folder / "arguments"
    return done.returncode, done.stderr, written.read_text().splitlines() if written.exists() else []


def test_one_node_trains_with_its_checkpoints_in_the_object_store(tmp_path: Path) -> None:
    assert run(tmp_path, **SERVERS) == (0, "", ["train", "run.toml", "trainer.store_checkpoints=true"])


def test_several_nodes_meet_at_the_first(tmp_path: Path) -> None:
    code, _, words = run(tmp_path, SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_RANK="1", SKYPILOT_NODE_IPS=IPS, **SERVERS)
    assert code == 0
    bound = app.parse_args(words)[1]
    assert launch.find_nodes(bound.kwargs["nodes"], {}) == launch.Nodes(2, 1, f"10.0.0.1:{launch.RENDEZVOUS_PORT}")
    assert bound.args == ("run.toml", "trainer.store_checkpoints=true")


def test_a_worker_is_the_same_task(tmp_path: Path) -> None:
    assert run(tmp_path, ROLE="rollout", RUN_FILE="other.toml", **SERVERS) == (0, "", ["rollout", "other.toml"])


@pytest.mark.parametrize("missing", SERVERS)
def test_addresses_that_are_not_given_are_named(tmp_path: Path, missing: str) -> None:
    code, error, words = run(tmp_path, **SERVERS | {missing: ""})
    assert (code, words) == (2, [])
    assert f"--env {missing}" in error


def test_its_variables_are_settings_and_its_extras_exist() -> None:
    """Each is accepted by the trainer's settings; secrets have no value in the file."""
    environ = {name: value for name, value in {**TASK["envs"], **SERVERS}.items() if name.startswith("PENSTOCK_")}
    loaded = load(
        TrainerSettings, overrides=["model.path=model"], environ=environ | dict.fromkeys(TASK["secrets"], "x")
    )
    assert loaded.settings.nats.user == "trainer"
    assert set(TASK["secrets"].values()) == {None}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = TASK["setup"].partition("[")[2].partition("]")[0].split(",")
    assert set(wanted) <= set(extras)
    known = {"name", "num_nodes", "resources", "workdir", "envs", "secrets", "setup", "run"}
    assert set(TASK) == known
