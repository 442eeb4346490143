"""The notebook of the examples runs cell by cell, and the run that it made is what the client's handle says."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from tests.deploy.live_processes import processes_of
from tests.servers import require

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "examples" / "python" / "sft_then_grpo.ipynb"
SMALL = {
    "sft_steps": 3,
    "sft_batch": 8,
    "steps": 3,
    "groups_per_step": 4,
    "group_size": 4,
    "num_held_out": 8,
    "workers": 1,
}


def code_cells() -> Iterator[tuple[str, list[str]]]:
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"]), cell["metadata"].get("tags", [])


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the notebook has defined, run with small sizes."""
    require("nats-server")
    require("rclone")
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(tmp_path_factory.mktemp("notebook")):
        for number, (source, tags) in enumerate(code_cells()):
            exec(compile(source, f"<cell {number}>", "exec"), names)
            if "parameters" in tags:
                assert names.keys() >= SMALL.keys()
                names.update(SMALL)
    return names


@pytest.mark.timeout(600)
def test_the_recipe_trains_on_examples_and_then_with_the_reward(notebook: dict[str, Any]) -> None:
    """SFT and GRPO take their steps; the run starts from what SFT wrote; every group that was scored came to the function."""
    sft, run = notebook["sft"], notebook["run"]
    assert isinstance(run, penstock.Run)
    assert (sft.state, run.state) == ("finished", "finished")
    assert sft.metrics()["step"].tolist() == [1, 2, 3]
    assert run.metrics()["step"].tolist() == [1, 2, 3]
    assert run.step == 3
    assert f'model.path = "{sft.model}"' in (run.folder / "run.toml").read_text()
    trained = run.metrics()["groups.trained"][-1] * SMALL["group_size"]
    assert notebook["seen"]["completions"] >= trained == 48


def test_figures_are_those_of_the_run_folder(notebook: dict[str, Any]) -> None:
    """Each array has what metrics.jsonl has; summary and report are the run's."""
    run = notebook["run"]
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward_mean"] for row in rows if row["kind"] == "step"]
    np.testing.assert_array_equal(notebook["metrics"]["reward_mean"], rewards)
    assert run.metrics("eval")["step"].tolist() == sorted(row["step"] for row in rows if row["kind"] == "eval")
    assert run.summary()["steps"] == 3
    assert run.report.read_text().startswith("#")


def test_events_came_through_nats_to_the_last_one(notebook: dict[str, Any]) -> None:
    """The notebook saw kinds that no file has, every step once, and then the end; of the ended run the steps remain."""
    kinds = notebook["kinds"]
    assert {"state", "weights", "step", "eval"} <= set(kinds)
    assert kinds.count("step") == 3
    assert kinds[-1] == "state"
    assert [event.data["step"] for event in notebook["run"].events() if event.kind == "step"] == [1, 2, 3]


def test_checkpoint_versions_and_model_are_files(notebook: dict[str, Any], tmp_path: Path) -> None:
    """A version is written as a model folder after the run, whose servers are started for it; the model has answered."""
    run = notebook["run"]
    assert run.checkpoint().name.endswith("3")
    assert (run.model / "config.json").exists()
    assert list(run.export(tmp_path / "v3", version=3).glob("*.safetensors"))
    assert isinstance(notebook["answer"], str)


def test_nothing_is_left_when_the_client_is_closed(notebook: dict[str, Any]) -> None:
    """No process of the run or the training is left, nor what served the reward."""
    for folder in (notebook["run"].folder, notebook["sft"].folder):
        assert processes_of(folder) == []
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("reward-")]
