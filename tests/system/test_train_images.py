"""A tiny model that reads images, trained from end to end on a CPU, and replayed; ``make test-images``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pictures import picture, picture_bytes
from tests.servers import require
from tests.vision_model import build_vision_model

ROOT = Path(__file__).parents[2]
STEPS, GROUPS, SIZE = 3, 2, 4
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 5)
"""


def penstock(folder: Path, *words: str) -> str:
    """Run a command to its end; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words], cwd=folder, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def rows() -> list[dict[str, Any]]:
    """Questions about pictures, as verl writes them; some show two, and one shows none."""
    made = []
    for number in range(12):
        images = [picture_bytes(picture(24 + 8 * n, 24, seed=number + n)) for n in range((1, 2, 1, 0)[number % 4])]
        content = f"{'<image>' * len(images)}what is this?"
        made.append(
            {
                "data_source": "pictures",
                "prompt": [{"role": "user", "content": content}],
                "images": [{"bytes": one, "path": None} for one in images],
                "reward_model": {"style": "rule", "ground_truth": "x"},
            }
        )
    return made


@pytest.mark.skipif(
    "PENSTOCK_TEST_IMAGES" not in os.environ, reason="a minute of CPU time: make test-images sets PENSTOCK_TEST_IMAGES"
)
@pytest.mark.timeout(900)
def test_a_model_that_reads_images_is_trained_and_replayed(tmp_path: Path, run_id: str) -> None:
    """Three steps whose rows have images; the audit finds every group, and the replay the hash of every version."""
    require("nats-server")
    require("rclone")
    build_vision_model(tmp_path / "model")
    pq.write_table(pa.Table.from_pylist(rows()), tmp_path / "train.parquet")
    (tmp_path / "lengths.py").write_text(REWARD)
    (tmp_path / "run.toml").write_text(
        f"""
        run = {{ id = "{run_id}", dir = "{tmp_path}/runs" }}
        model = {{ path = "{tmp_path}/model", dtype = "float32" }}
        data = {{ train = "{tmp_path}/train.parquet", max_prompt_tokens = 256 }}
        rollout = {{ groups_per_step = {GROUPS}, group_size = {SIZE}, max_new_tokens = 8, max_staleness = 1 }}
        reward = {{ name = "lengths" }}
        trainer = {{ steps = {STEPS}, lr = 1e-3, checkpoint_every = 2 }}
        """
    )
    words = ("train", "run.toml", "--local", "--workers", "1", "--serve", "lengths.py", "--json")
    assert json.loads(penstock(tmp_path, *words).splitlines()[-1])["steps"] == STEPS
    folder = tmp_path / "runs" / run_id
    totals = json.loads((folder / "trainer.json").read_text())
    assert totals["groups"]["trained"] == STEPS * GROUPS
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    mismatch = steps[0]["mismatch"]  # of tokens that the weights in training sampled
    assert mismatch["max_abs"] < 1e-4, "engine and trainer compute the same prompts, pictures included"
    penstock(tmp_path, "audit", run_id, f"run.dir={tmp_path}/runs")
    verdict = json.loads(penstock(tmp_path, "replay", run_id, f"run.dir={tmp_path}/runs", "--json").splitlines()[-1])
    assert verdict["difference"] is None
    assert (verdict["findings"], verdict["num_steps"]) == ([], STEPS)
