"""`penstock train --local` on a model folder and a verl-format Parquet, and going on from its checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.deploy import quickstart_task
from tests.servers import require

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_file(tmp_path: Path, run_id: str) -> Path:
    """A run on sums in verl's format, scored by the math reward."""
    require("nats-server")
    require("rclone")
    quickstart_task.write_model(tmp_path / "model", seed=0)
    for name, rows in (("train", range(40)), ("test", range(40, 44))):
        pq.write_table(pa.Table.from_pylist([_verl_row(n, name) for n in rows]), tmp_path / f"{name}.parquet")
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        run = {{ id = "{run_id}", dir = "{tmp_path}/runs" }}
        model = {{ path = "{tmp_path}/model" }}
        data = {{ train = "{tmp_path}/train.parquet", eval = "{tmp_path}/test.parquet", max_prompt_tokens = 64 }}
        rollout = {{ groups_per_step = 4, group_size = 2, max_new_tokens = 12 }}
        reward = {{ name = "math" }}
        trainer = {{ steps = 3, lr = 1e-4, checkpoint_every = 2 }}
        """
    )
    return path


def _verl_row(number: int, split: str) -> dict:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"what is {number} + {number}?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"split": split, "index": number},
    }


def _train(run_file: Path, *overrides: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "train", str(run_file), "--local", "--workers", "1", "--json", *overrides],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_verl_parquet_is_trained_to_the_end_and_resumed(run_file: Path, tmp_path: Path, run_id: str):
    """Three steps with the math reward, then three more from the checkpoint: each step happens once, in order.

    The last three are ReMax's: worker, reward service and trainer carry a greedy baseline in every group.
    """
    assert _train(run_file)["steps"] == 3
    assert _train(run_file, "trainer.steps=6", "algorithm.name=remax")["steps"] == 6
    folder = tmp_path / "runs" / run_id
    log = (folder / "logs" / "trainer.log").read_text()
    assert log.count("async_grpo: grpo advantages, ppo_clip") == 1
    assert log.count("remax: remax advantages, ppo_clip") == 1
    assert 'algorithm.name = \\"remax\\", was \\"async_grpo\\"' in log
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    steps = [event for event in events if event["kind"] == "step"]
    assert [event.get("baseline_mean") for event in steps] == [None] * 3 + [0.0] * 3
    assert {event["num_prompts"] for event in events if event["kind"] == "eval"} == {4}
    totals = json.loads((folder / "trainer.json").read_text())
    assert totals["groups"]["trained"] == 6 * 4
    assert (folder / "model" / "model.safetensors").exists()
    assert "6 steps" in (folder / "report.md").read_text()
