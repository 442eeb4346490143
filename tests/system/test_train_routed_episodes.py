"""Episodes of a tiny mixture of experts, trained with the experts that the engine chose, audited and replayed; ``make test-more NAME=experts``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.contracts.tiny_model import MIXTURE, build_model
from tests.servers import require
from tests.system.test_train_images import penstock

STEPS, GROUPS, SIZE = 4, 2, 4
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
    (tmp_path / "run.toml").write_text(
        f"""
        run = {{ id = "{run_id}", dir = "{tmp_path}/runs" }}
        model = {{ path = "{tmp_path}/model", dtype = "float32" }}
        trainer = {{ steps = {STEPS}, lr = 3e-3, checkpoint_every = 2, router_replay = true }}
        data = {{ train = "{tmp_path}/train.jsonl", max_prompt_tokens = 64 }}
        rollout = {{ groups_per_step = {GROUPS}, group_size = {SIZE}, max_new_tokens = 8, max_staleness = 1, environment = "asks" }}
        reward = {{ name = "environment" }}
        [worker]
        environments = ["{tmp_path}/ask.py:ASK"]
        [environment.define.asks]
        type = "ask"
        """
    )
    words = ("train", "run.toml", "--local", "--workers", "1", "--json")
    assert json.loads(penstock(tmp_path, *words).splitlines()[-1])["steps"] == STEPS
    events = map(json.loads, (tmp_path / "runs" / run_id / "metrics.jsonl").read_text().splitlines())
    steps = [event for event in events if event["kind"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert steps[0]["mismatch"]["max_abs"] < 1e-4
    assert steps[0]["rerouted_fraction"] == 0.0
    assert max(event["rerouted_fraction"] for event in steps) > 0.0, "some tokens had other experts in the engine"
    penstock(tmp_path, "audit", run_id, f"run.dir={tmp_path}/runs")
    verdict = json.loads(penstock(tmp_path, "replay", run_id, f"run.dir={tmp_path}/runs", "--json").splitlines()[-1])
    assert (verdict["difference"], verdict["findings"], verdict["num_steps"]) == (None, [], STEPS)
