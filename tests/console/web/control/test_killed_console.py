"""Real consoles that are killed again and again while their runs wait in the queue."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.console.web.control.api import Api, settings
from tests.servers import wait_for

from penstock.protocol.record import run_folder

CONSOLE = [sys.executable, "-P", "-m", "penstock", "console", "--port", "0", "--json"]
RUNS = ("c", "a", "d", "b")


@pytest.mark.chaos
def test_a_queue_survives_consoles_that_are_killed_at_any_moment(tmp_path: Path) -> None:
    """Every run is started once, in the order of the requests; no console lives long enough to see two of them."""
    api = Api(tmp_path / "runs")
    client = api.client()
    with run_folder.hold_lock(api.folder / "by-hand"):  # the machine is in use: all wait
        for run in RUNS:
            body = {"run": run, "command": "sft", "settings": settings(sft={"steps": 1}), "start": True}
            assert client.post("/v1/runs", json=body).json()["state"] == "queued"
    chance = random.Random(0)
    num_kills = 0
    while any(client.get(f"/v1/runs/{run}").json()["state"] != "failed" for run in RUNS):
        console = subprocess.Popen(
            [*CONSOLE, f"run.dir={api.folder}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path
        )
        assert console.stdout is not None
        assert json.loads(console.stdout.readline())["url"]
        time.sleep(chance.uniform(0.0, 1.0))  # it advances the queue every second
        console.kill()
        console.communicate()
        num_kills += 1
        assert num_kills < 60, {run: client.get(f"/v1/runs/{run}").json() for run in RUNS}
    launches = [json.loads((api.folder / run / "launch.json").read_text()) for run in RUNS]
    assert [launch["start"] for launch in launches] == [1] * len(RUNS)
    assert [launch["started_at"] for launch in launches] == sorted(launch["started_at"] for launch in launches)
    logs = [(api.folder / run / "logs" / "launch.log").read_text() for run in RUNS]
    assert [log.count("model") > 0 for log in logs] == [True] * len(RUNS), logs
    assert num_kills >= 2
    wait_for(lambda: not any(run_folder.is_lock_held(api.folder / run) for run in RUNS), "the end of all runs")
