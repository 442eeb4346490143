"""Runs of the trainer as processes, on the quickstart's task and real streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.trainer.learner.forks import Command
from tests.trainer.producer import Answer, Author, Sampler, ScriptedProducer, recite, write_run_file

from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.versions import PolicyVersion


@dataclass
class Run:
    """A run on the quickstart's model and data in a folder; who makes it kills its processes in the end."""

    folder: Path
    id: str
    nats: NatsSettings
    s3: S3Settings
    sessions: list[Command]

    def write(self, *, steps: int, **more: dict[str, Any]) -> Run:
        sections: dict[str, dict[str, Any]] = {
            "run": {"id": self.id, "dir": str(self.folder / "runs"), "seed": 3},
            "model": {"path": str(self.folder / "model")},
            "data": {"train": [str(self.folder / "train.jsonl")], "max_prompt_tokens": 64},
            "rollout": {"group_size": 4, "groups_per_step": 4, "max_new_tokens": 8, "max_staleness": 2},
            # recited completions were not sampled from the policy: their log-probabilities are arbitrary
            "trainer": {"steps": steps, "lr": 1e-3, "micro_batch_tokens": 512, "max_mismatch": "None"},
        }
        for name, values in more.items():
            sections[name] = {**sections.get(name, {}), **values}
        write_run_file(self.file, nats=self.nats, s3=self.s3, sections=sections)
        return self

    @property
    def file(self) -> Path:
        return self.folder / f"{self.id}.toml"

    @property
    def home(self) -> Path:
        return self.folder / "runs" / self.id

    def start(self, *overrides: str, num_ranks: int = 1) -> Command:
        self.sessions.append(Command(self.folder, "train", str(self.file), *overrides, num_ranks=num_ranks))
        return self.sessions[-1]

    def replay(self, *options: str, num_ranks: int = 1) -> dict[str, Any]:
        return json.loads(self.start_replay(*options, num_ranks=num_ranks).wait().splitlines()[-1])

    def start_replay(self, *options: str, num_ranks: int = 1) -> Command:
        command = Command(self.folder, "replay", self.id, str(self.file), "--json", *options, num_ranks=num_ranks)
        self.sessions.append(command)
        return command

    def producer(self, author: Author = recite) -> ScriptedProducer:
        return ScriptedProducer(self.nats, self.s3, self.id, author)

    @contextmanager
    def sampler(
        self, change: Callable[[Answer, PolicyVersion], Answer] = lambda answer, _: answer
    ) -> Iterator[ScriptedProducer]:
        """Answer with samples of the published weights, each changed by ``change``."""
        with self.producer() as producer:
            sample = Sampler(producer, self.folder / "model")
            producer.author = lambda task, version: change(sample(task, version), version)
            yield producer

    def steps(self, kind: str = "step") -> list[dict[str, Any]]:
        return metrics(self.folder, self.id, kind)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.home / "trainer.json").read_text())

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.home / "model" / "model.safetensors")


def metrics(folder: Path, run_id: str, kind: str = "step") -> list[dict[str, Any]]:
    path = folder / "runs" / run_id / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""  # its last line may be half written
    rows = [json.loads(line) for line in whole.splitlines()]
    return [row for row in rows if row["kind"] == kind]
