"""Trainings on given answers as jobs of the API: real processes of `penstock sft` and `dpo`, paused, resumed, queued and stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.console.web.control.api import Api

from penstock.console.tools import runs
from penstock.console.web.jobs import queue
from penstock.console.web.launchers.local import Local, LocalOptions
from penstock.deploy import quickstart_task
from penstock.protocol.record import run_folder

_DEADLINE_S = 180.0
MANY = 100_000  # steps: more than there is time for
STEPS = 100  # more than are made while the next job is checked, on a busy machine too


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with the quickstart's tiny model, examples and preferences."""
    quickstart_task.write_model(tmp_path / "model", seed=0)
    quickstart_task.write_data(tmp_path, seed=0, num_sft=16, num_train=1, num_eval=1)
    pairs = [{"prompt": f"sort {n}1", "chosen": f"1{n}", "rejected": f"{n}1"} for n in range(2, 10)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return tmp_path


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """An app whose runs have one thread, as on a machine that they share; what a failed test leaves is killed."""
    (tmp_path / "runs").mkdir()
    found = Api(tmp_path / "runs", environ={**os.environ, "OMP_NUM_THREADS": "1"})
    yield found
    for folder in queue.folders(found.folder):
        Local().stop(folder, LocalOptions(), "", force=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_of_given_answers_trains_pauses_resumes_and_holds_the_queue(api: Api, inputs: Path) -> None:
    """State, figures and settings are those of the process; the next job starts when it ends, and can be stopped."""
    client = api.client()

    def post(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = client.post(f"/v1/runs{path}", json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def state(run: str) -> str:
        queue.advance(api.context)
        found = client.get(f"/v1/runs/{run}").json()
        assert found["state"] != "failed", found
        return found["state"]

    sft = {
        "name": "warm up", "algorithm": "sft", "model_path": str(inputs / "model"), "train_data_path": str(inputs / "sft.jsonl"),
        "eval_data_path": str(inputs / "sft.jsonl"), "batch_size": 4,
        "settings": {"sft": {"steps": STEPS, "eval_every": 25}, "data": {"shuffle": False}}, "start": True,
    }  # fmt: skip
    dpo = {"data": str(inputs / "pairs.jsonl"), "steps": MANY, "batch_size": 4}
    preferences = {
        "run": "preferences",
        "command": "dpo",
        "settings": {"model": {"path": str(inputs / "model")}, "dpo": dpo},
    }
    assert post("", sft)["state"] == "running"
    assert post("", {**preferences, "start": True})["state"] == "queued"

    folder = api.folder / "warm-up"
    wait(lambda: (runs.describe(folder).step or 0) >= 3, "three steps")
    assert run_folder.is_lock_held(folder)
    assert post("/warm-up/pause")["state"] == "pausing"
    wait(lambda: state("warm-up") == "paused", "the pause")
    paused_at = runs.describe(folder).step
    assert paused_at is not None
    assert paused_at < STEPS
    assert list((folder / "sft-training" / "checkpoints").glob("step*"))
    wait(lambda: state("preferences") == "running", "the next of the queue")
    assert post("/warm-up/resume")["state"] == "queued"

    wait(lambda: (runs.describe(api.folder / "preferences").step or 0) >= 2, "two steps on preferences")
    assert client.delete("/v1/runs/preferences").status_code == 409
    assert post("/preferences/stop")["state"] == "stopping"
    wait(lambda: state("preferences") == "stopped", "the stop")
    wait(lambda: state("warm-up") == "finished", "the result")
    assert (folder / "sft" / "config.json").is_file()
    figures = client.get("/v1/runs/warm-up/metrics").json()
    assert figures["steps"] == list(range(1, STEPS + 1))
    written = [json.loads(line) for line in (folder / "sft-training" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in written if line["kind"] == "step"]
    assert figures["figures"]["loss"]["mean"] == pytest.approx(losses, rel=1e-5)
    eval_loss = [line["eval_loss"] for line in written if line["kind"] == "eval"]
    assert [value for value in figures["figures"]["eval_loss"]["mean"] if value is not None] == pytest.approx(
        eval_loss, rel=1e-5
    )
    listed = {one["run"]: one for one in client.get("/v1/runs").json()}
    assert (listed["warm-up"]["state"], listed["warm-up"]["step"]) == ("finished", STEPS)
    assert listed["warm-up"]["eval_loss"] == eval_loss[-1]
    assert listed["warm-up"]["curve"]
    summary = client.get("/v1/runs/warm-up/summary").json()
    assert (summary["state"], summary["problem"]) == ("finished", "")
    config = client.get("/v1/runs/warm-up/config").json()
    assert (config["source"], config["settings"]["sft"]["steps"]) == ("planned", STEPS)

    assert client.delete("/v1/runs/preferences").status_code == 204
    assert not (api.folder / "preferences").exists()


def wait(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come within {_DEADLINE_S:.0f} s"
        time.sleep(0.05)
