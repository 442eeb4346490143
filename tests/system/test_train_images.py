"""A tiny model that reads images, trained from end to end on a CPU, and replayed; ``make test-more NAME=images``."""

from __future__ import annotations

import hashlib
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

ENVIRONMENT = """
import io, random
from PIL import Image
from penstock import Message, Play, Reply, TurnEnvironment, done


def png(seed):
    sink = io.BytesIO()
    Image.new("RGB", (24, 32), tuple(random.Random(seed).choices(range(256), k=3))).save(sink, "PNG")
    return sink.getvalue()


class LookPlay(Play):
    def __init__(self, seed):
        self.seed, self.turn = seed, 0

    def start(self):
        return [Message.of_parts("user", "what is this?", png(self.seed))]

    def step(self, answer):
        self.turn += 1
        if self.turn == 2:
            return done(float(len(answer.content) % 5))
        return Reply((Message.of_parts("user", png(self.seed + 1), "and this?"),), float(len(answer.content) % 3))


class Look(TurnEnvironment):
    name = "look"

    def play(self, seed, row, options):
        return LookPlay(seed)


LOOK = Look()
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
                "images": [{"bytes": image, "path": None} for image in images],
                "reward_model": {"style": "rule", "ground_truth": "x"},
            }
        )
    return made


def train(folder: Path, run_id: str, sections: str) -> None:
    run_file = f"{run_id}.toml"
    (folder / run_file).write_text(
        f"""
        run = {{ id = "{run_id}", dir = "{folder}/runs" }}
        model = {{ path = "{folder}/model", dtype = "float32" }}
        trainer = {{ steps = {STEPS}, lr = 1e-3, checkpoint_every = 2 }}
        {sections}
        """
    )
    words = ("train", run_file, "--local", "--workers", "1", "--serve", "lengths.py", "--json")
    assert json.loads(penstock(folder, *words).splitlines()[-1])["steps"] == STEPS
    totals = json.loads((folder / "runs" / run_id / "trainer.json").read_text())
    assert totals["groups"]["trained"] == STEPS * GROUPS
    events = map(json.loads, (folder / "runs" / run_id / "metrics.jsonl").read_text().splitlines())
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    mismatch = steps[0]["mismatch"]  # of tokens that the weights in training sampled
    assert mismatch["max_abs"] < 1e-4, "engine and trainer compute the same prompts, pictures included"
    stored = list((folder / "runs" / run_id / "store").rglob(f"{run_id}/images/*"))
    assert len(stored) > 1, "pictures were shown, and each is stored under its hash"
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in stored)
    penstock(folder, "audit", run_id, f"run.dir={folder}/runs")
    verdict = json.loads(penstock(folder, "replay", run_id, f"run.dir={folder}/runs", "--json").splitlines()[-1])
    assert verdict["difference"] is None
    assert (verdict["findings"], verdict["num_steps"]) == ([], STEPS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny model that reads images, and a reward."""
    if "PENSTOCK_TEST_IMAGES" not in os.environ:
        pytest.skip("minutes of CPU time: make test-more NAME=images sets PENSTOCK_TEST_IMAGES")
    require("nats-server")
    require("rclone")
    build_vision_model(tmp_path / "model")
    (tmp_path / "lengths.py").write_text(REWARD)
    return tmp_path


@pytest.mark.timeout(900)
def test_rows_with_images_are_trained_and_replayed(folder: Path, run_id: str) -> None:
    pq.write_table(pa.Table.from_pylist(rows()), folder / "train.parquet")
    sections = f"""
        data = {{ train = "{folder}/train.parquet", max_prompt_tokens = 256 }}
        rollout = {{ groups_per_step = {GROUPS}, group_size = {SIZE}, max_new_tokens = 8, max_staleness = 1 }}
        reward = {{ name = "lengths" }}
        """
    train(folder, run_id, sections)


@pytest.mark.timeout(900)
def test_episodes_that_show_images_are_trained_and_replayed(folder: Path, run_id: str) -> None:
    (folder / "look.py").write_text(ENVIRONMENT)
    (folder / "train.jsonl").write_text(f"{json.dumps({'prompt': 'look'})}\n" * 8)
    sections = f"""
        data = {{ train = "{folder}/train.jsonl", max_prompt_tokens = 64 }}
        rollout = {{ groups_per_step = {GROUPS}, group_size = {SIZE}, max_new_tokens = 8, max_staleness = 1, environment = "looks" }}
        reward = {{ name = "environment" }}
        [worker]
        environments = ["{folder}/look.py:LOOK"]
        [environment.define.looks]
        type = "look"
        """
    train(folder, run_id, sections)
