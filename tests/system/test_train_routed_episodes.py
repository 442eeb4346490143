"""Episodes of a tiny mixture of experts, trained with the experts that the engine chose, audited and replayed; ``make test-more NAME=experts``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.contracts.tiny_model import MIXTURE, build_model
from tests.servers import require
from tests.small_run import check_run, train_local, write_run_file

STEPS, GROUPS = 4, 2
ENVIRONMENT = """
from penstock import Message, Play, Reply, TurnEnvironment, done


class AskPlay(Play):
    def __init__(self, seed):
        self.seed, self.turn = seed, 0

    def start(self):
        return [Message("user", f"what is {self.seed % 10} + 1?")]

    def step(self, answer):
        self.turn += 1
        if self.turn == 3:
            return done(float(len(answer.content) % 5))
        return Reply((Message("user", "hello " * self.turn + "and now?"),), float(len(answer.content) % 3))


class Ask(TurnEnvironment):
    name = "ask"

    def play(self, seed, row, options):
        return AskPlay(seed)


ASK = Ask()
"""


@pytest.mark.timeout(900)
def test_episodes_of_experts_are_trained_and_replayed(tmp_path: Path, run_id: str) -> None:
    """Engine and trainer agree while they have the same weights, experts differ once they do not, and every version has its hash again."""
    if "PENSTOCK_TEST_EXPERTS" not in os.environ:
        pytest.skip("a minute of CPU time: make test-more NAME=experts sets PENSTOCK_TEST_EXPERTS")
    require("nats-server")
    require("rclone")
    build_model(tmp_path / "model", "qwen3_moe", **MIXTURE)
    (tmp_path / "ask.py").write_text(ENVIRONMENT)
    (tmp_path / "train.jsonl").write_text(f"{json.dumps({'prompt': 'ask'})}\n" * 8)
    run_file = write_run_file(
        tmp_path,
        run_id,
        model={"dtype": "float32"},
        trainer={"steps": STEPS, "lr": 3e-3, "checkpoint_every": 2, "router_replay": True},
        data={"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 64},
        rollout={
            "groups_per_step": GROUPS,
            "group_size": 4,
            "max_new_tokens": 8,
            "max_staleness": 1,
            "environment": "asks",
        },
        reward={"name": "environment"},
        worker={"environments": [f"{tmp_path}/ask.py:ASK"]},
        environment={"define": {"asks": {"type": "ask"}}},
    )
    assert train_local(run_file)["steps"] == STEPS
    steps = check_run(tmp_path / "runs", run_id, num_steps=STEPS, num_groups=STEPS * GROUPS)
    assert steps[0]["mismatch"]["max_abs"] < 1e-4
    assert steps[0]["rerouted_fraction"] == 0.0
    assert max(step["rerouted_fraction"] for step in steps) > 0.0, "some tokens had other experts in the engine"
