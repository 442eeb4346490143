"""A Python process that trains with `penstock.Client` is killed: its run ends in order and can be continued."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import penstock
from penstock.protocol.record import run_folder
from tests.servers import wait_for

CALLER = """
import sys, penstock
rows = [{"prompt": f"sort {n}1", "ground_truth": f"1{n}"} for n in range(2, 10)]

def num_letters(completions, **columns):
    return [float(len(text)) for text in completions]

run = penstock.Client(runs=sys.argv[1]).train(
    model="quickstart", data={"train": rows, "max_prompt_tokens": 32}, reward=num_letters, run_id="killed", workers=1,
    rollout={"groups_per_step": 2, "group_size": 2, "max_new_tokens": 8}, trainer={"steps": 100000},
)
print("started", flush=True)
run.wait()
"""


@pytest.mark.chaos
def test_a_run_whose_python_is_killed_writes_a_checkpoint_and_leaves_no_process(tmp_path: Path) -> None:
    """Its account closes; the reward of that process is gone with it, and the next one continues from the checkpoint."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", CALLER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "started\n"
        folder = tmp_path / "killed"
        wait_for(lambda: steps_of(folder) >= 3, "three steps")
        below = psutil.Process(caller.pid).children(recursive=True)
        caller.kill()
    wait_for(lambda: not run_folder.is_lock_held(folder), "the run's processes to end")
    wait_for(lambda: not any(is_going_on(one) for one in below), "the end of every process that was started")
    assert len(below) > 4
    reached = steps_of(folder)
    [newest] = sorted((folder / "checkpoints").glob("step*[0-9]"))[-1:]
    assert int(newest.name.removeprefix("step")) == reached
    command = [sys.executable, "-P", "-m", "penstock", "audit", "killed", "--json", f"run.dir={tmp_path}"]
    audited = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert json.loads(audited.stdout.splitlines()[-1])["closes"], audited.stdout

    with penstock.Client(runs=tmp_path) as client:
        assert client.run("killed").state == "stopped"
        run = client.train(
            model="quickstart", data={"train": str(next((folder / "data").glob("*.jsonl"))), "max_prompt_tokens": 32},
            reward=num_letters, run_id="killed", workers=1, rollout={"groups_per_step": 2, "group_size": 2, "max_new_tokens": 8},
            trainer={"steps": reached + 2},
        )  # fmt: skip
        assert run.wait(180.0).state == "finished"
        assert run.metrics()["step"].tolist() == list(range(1, reached + 3))


def num_letters(completions: list[str], **columns: object) -> list[float]:
    return [float(len(text)) for text in completions]


def steps_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return max((row["step"] for row in map(json.loads, lines) if row["kind"] == "step"), default=0)


def is_going_on(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
