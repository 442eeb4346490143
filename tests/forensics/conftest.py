"""A finished run, shared by the tests that read its stored data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.console.command import penstock
from tests.servers import wait_for
from tests.trainer.learner.forks import Command
from tests.trainer.producer import Answer, ScriptedProducer, recite, write_run_file

from penstock.deploy.bootstrap import bootstrap, delete_run
from penstock.deploy.certificates import signing_key
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.deploy.quickstart_task import write_data, write_model
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.groups import Task
from penstock.protocol.record.checkpoint_state import committed
from penstock.protocol.record.stored_record import StoredRecord
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion

RUN = "replayed"


@dataclass
class StoredRun:
    folder: Path
    blobs: Blobs
    run_file: Path
    nats: NatsSettings
    s3: S3Settings

    @property
    def home(self) -> Path:
        return self.folder / "runs" / RUN

    @property
    def record(self) -> StoredRecord:
        return StoredRecord.read(RUN, committed(self.home / "checkpoints")[-1][1].record, self.blobs.get)

    def replay(self, *options: str, expected: int = 0) -> dict:
        output = Command(self.folder, "replay", RUN, str(self.run_file), "--json", *options).wait(expected)
        return json.loads(output)

    def console(self, verb: str, *options: str, run: str = RUN, expected: int = 0) -> str:
        done = penstock(verb, run, str(self.run_file), *options, cwd=self.folder)
        assert done.returncode == expected, done.stderr
        return done.stdout if expected == 0 else done.stderr

    def refusal(self, *options: str, expected: int) -> str:
        """Run a replay that must fail; return its stderr."""
        command = Command(self.folder, "replay", RUN, str(self.run_file), "--json", *options)
        assert command.wait(expected) == ""
        return command.err


class SparseReciter:
    """Recites, but the seventh group with a signal waits for version 2: the batch of step 2 has to use groups again."""

    def __init__(self, producer: ScriptedProducer) -> None:
        self._producer = producer
        self._num_with_signal = 0

    def __call__(self, task: Task, version: PolicyVersion) -> Answer:
        group, rewards = recite(task, version)
        self._num_with_signal += len(set(rewards)) > 1
        if self._num_with_signal == 7:
            wait_for(lambda: self._producer.head() >= 2, "version 2 of the run", 300.0)
        return group, rewards


@pytest.fixture(scope="session")
def run(nats_server: NatsServer, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredRun]:
    """Nine steps in three sessions: the first is killed two steps after its checkpoint, the third has other settings.

    It makes four optimizer steps on each batch. One before it, with the same settings, was killed after two of the first four.
    """
    folder = tmp_path_factory.mktemp("replay")
    write_model(folder / "model", seed=0)
    write_data(folder, seed=0, num_sft=8, num_train=200, num_eval=8)
    run_file = write_run_file(
        folder / "run.toml", nats=nats_server.settings, s3=s3_server.settings,
        sections={
            "run": {"id": RUN, "dir": str(folder / "runs"), "seed": 3},
            "model": {"path": str(folder / "model")},
            "data": {"train": [str(folder / "train.jsonl")], "max_prompt_tokens": 64},
            "rollout": {"group_size": 4, "groups_per_step": 4, "groups_per_message": 2, "max_new_tokens": 8},
            "algorithm": {"name": "ppo", "dynamic_sampling": True, "max_trained_count": 2, "reward_norm": "running"},
            "critic": {"lr": 1e-3, "updates": 2, "head_start_steps": 1},
            "trainer": {
                "steps": 7, "lr": 1e-3, "schedule": "linear", "weight_decay": 0.01, "micro_batch_tokens": 256,
                "checkpoint_every": 3, "max_mismatch": "None", "signing_key_file": str(signing_key(folder / "keys")[0]),
            },
        },
    )  # fmt: skip
    blobs = Blobs(s3_server.settings)
    with Bus.connect(nats_server.settings, name="test") as bus:
        bootstrap(bus, blobs, RUN)
        with ScriptedProducer(nats_server.settings, s3_server.settings, RUN) as producer:
            producer.author = SparseReciter(producer)
            Command(folder, "train", str(run_file), "trainer.kill_at=stepped:5").wait(-9)
            Command(folder, "train", str(run_file)).wait()
            changed = ("trainer.steps=9", "algorithm.clip_high=0.4", "algorithm.epochs=2", "algorithm.minibatches=2")
            Command(folder, "train", str(run_file), *changed, "trainer.kill_at=updated:2").wait(-9)
            Command(folder, "train", str(run_file), *changed).wait()
        yield StoredRun(folder, blobs, run_file, nats_server.settings, s3_server.settings)
        delete_run(bus, RUN)
