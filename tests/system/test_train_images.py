"""A tiny model that reads images, trained from end to end on a CPU, and replayed; ``make test-more NAME=images``."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pictures import picture, picture_bytes
from tests.servers import require
from tests.small_run import check_run, train_local, write_run_file
from tests.vision_model import build_vision_model

STEPS, GROUPS = 3, 2
ROLLOUT = {"groups_per_step": GROUPS, "group_size": 4, "max_new_tokens": 8, "max_staleness": 1}
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


def train(folder: Path, run_id: str, **sections: Mapping[str, Any]) -> None:
    run_file = write_run_file(
        folder,
        run_id,
        model={"dtype": "float32"},
        trainer={"steps": STEPS, "lr": 1e-3, "checkpoint_every": 2},
        **sections,
    )
    assert train_local(run_file, "--serve", "lengths.py")["steps"] == STEPS
    steps = check_run(folder / "runs", run_id, num_steps=STEPS, num_groups=STEPS * GROUPS)
    mismatch = steps[0]["mismatch"]  # of tokens that the weights in training sampled
    assert mismatch["max_abs"] < 1e-4, "engine and trainer compute the same prompts, pictures included"
    stored = list((folder / "runs" / run_id / "store").rglob(f"{run_id}/images/*"))
    assert len(stored) > 1, "pictures were shown, and each is stored under its hash"
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in stored)


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
    data = {"train": str(folder / "train.parquet"), "max_prompt_tokens": 256}
    train(folder, run_id, data=data, rollout=ROLLOUT, reward={"name": "lengths"})


@pytest.mark.timeout(900)
def test_episodes_that_show_images_are_trained_and_replayed(folder: Path, run_id: str) -> None:
    (folder / "look.py").write_text(ENVIRONMENT)
    (folder / "train.jsonl").write_text(f"{json.dumps({'prompt': 'look'})}\n" * 8)
    train(
        folder,
        run_id,
        data={"train": str(folder / "train.jsonl"), "max_prompt_tokens": 64},
        rollout={**ROLLOUT, "environment": "looks"},
        reward={"name": "environment"},
        worker={"environments": [f"{folder}/look.py:LOOK"]},
        environment={"define": {"looks": {"type": "look"}}},
    )
