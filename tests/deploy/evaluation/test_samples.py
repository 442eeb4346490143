"""The prompts of `penstock eval`: sampled by the model that was published, complete with all their scores or failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.trainer.producer import ScriptedProducer, recite
from tests.weights_source import read_version

from penstock.console.evaluation_results import Outcome
from penstock.console.registry.model_merge import open_model
from penstock.deploy.evaluation.samples import HowToSample, PlannedPrompt, Sampler
from penstock.deploy.evaluation.target import VERSION, publish_folder
from penstock.deploy.quickstart_task import write_data, write_model
from penstock.protocol import streams, subjects
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.facts import DeadLetter, Head, TaskIssued, decode
from penstock.protocol.groups import Sampling
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.groups.pack_reader import PackReader
from penstock.trainer.settings import DataSettings

Sample = Callable[..., str]


class Failing(ScriptedProducer):
    """Dead-letters some groups instead of answering them, as a worker or a reward service does."""

    failing: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()

    def _answer(self, message: TaskIssued) -> None:
        ids = [task.group_id for task in message.tasks]
        if dead := [one for one in ids if one in self.failing]:
            letter = DeadLetter(
                run_id=self._run_id, stage="scoring", subject="x", reason="GraderFailed", detail="exit code 1",
                group_ids=tuple(dead), num_delivered=5,
            )  # fmt: skip
            self._bus.publish(subjects.dead(self._run_id, "scoring"), letter, msg_id=dead[0]).wait()
        rest = tuple(task for task in message.tasks if task.group_id not in self.failing | self.silent)
        if rest:
            super()._answer(message.model_copy(update={"tasks": rest}))


@pytest.fixture
def producer(run_streams: str, nats_settings: NatsSettings, s3_settings: S3Settings) -> Iterator[Failing]:
    producer = Failing(nats_settings, s3_settings, run_streams)
    with producer:
        yield producer


@pytest.fixture
def connections(run_streams: str, bus: Bus, blobs: Blobs) -> Connections:
    return Connections(run_streams, bus, blobs)


@pytest.fixture
def outcomes() -> list[Outcome]:
    return []


@pytest.fixture
def sample(connections: Connections, outcomes: list[Outcome], tmp_path: Path) -> Sample:
    """Samples eight prompts, two samples each, and returns why prompts are missing."""
    write_model(tmp_path / "model", seed=0)
    write_data(tmp_path, seed=0, num_sft=1, num_train=1, num_eval=8)
    prompts = PromptSet(
        [tmp_path / "eval.jsonl"], data=DataSettings(), reward=RewardSettings(name="exact_match"),
        tokenizer=ChatTokenizer.read(tmp_path / "model"),
    )  # fmt: skip
    publish_folder(connections, tmp_path / "model")

    def run(deadline_s: float = 20.0) -> str:
        planned = [PlannedPrompt(number, "sort", prompts[number]) for number in range(len(prompts))]
        how = HowToSample(2, Sampling(max_new_tokens=8), "maze", deadline_s, silent_s=0.3)
        reader = PackReader(connections.blobs.get)
        return Sampler(connections, planned, how, reader, outcomes.extend).run(lambda: None)

    return run


def test_every_prompt_is_complete_with_its_scored_samples(
    sample: Sample, producer: Failing, outcomes: list[Outcome]
) -> None:
    """Two rewards, lengths and finish reasons of each prompt, sampled by version 0."""
    assert sample() == ""
    assert sorted(outcome.prompt for outcome in outcomes) == list(range(8))
    assert {
        (len(outcome.rewards), len(outcome.completions), len(outcome.completion_tokens)) for outcome in outcomes
    } == {(2, 2, 2)}
    assert {(outcome.failed, outcome.reward, outcome.data_source) for outcome in outcomes} == {
        (None, "exact_match", "sort_digits")
    }
    assert set(producer.versions) == {VERSION}


def test_a_dead_lettered_prompt_is_failed_and_has_no_reward(
    sample: Sample, producer: Failing, outcomes: list[Outcome]
) -> None:
    producer.failing = frozenset({"eval.v0.p3", "eval.v0.p5"})
    assert sample() == ""
    failed = {outcome.prompt: outcome for outcome in outcomes if outcome.failed is not None}
    assert sorted(failed) == [3, 5]
    assert (failed[3].failed, failed[3].detail, failed[3].rewards) == ("scoring: GraderFailed", "exit code 1", ())
    assert len(outcomes) == 8


def test_a_group_of_another_version_is_a_failure(sample: Sample, producer: Failing, outcomes: list[Outcome]) -> None:
    producer.author = lambda task, version: recite(task, PolicyVersion(version + 1))
    assert sample() == ""
    assert {outcome.failed for outcome in outcomes} == {"scored: PackError"}
    assert "ignored the pin to version 0" in outcomes[0].detail


def test_prompts_that_never_arrive_are_missing_after_the_deadline(
    sample: Sample, producer: Failing, outcomes: list[Outcome]
) -> None:
    """Neither complete nor failed: the answer says how many, and what is alive."""
    producer.silent = frozenset({"eval.v0.p7"})
    assert sample(deadline_s=1.0).startswith("1 of 8 prompts are missing: nothing arrived for 1 s.")
    assert sorted(outcome.prompt for outcome in outcomes) == list(range(7))


def test_a_published_folder_has_the_tensors_of_its_files(connections: Connections, tmp_path: Path) -> None:
    """The head names version 0, whose tensors are those of the folder, byte by byte."""
    write_model(tmp_path / "model", seed=3)
    root = publish_folder(connections, tmp_path / "model")
    bucket = streams.state_bucket(connections.run_id).bucket
    entry = connections.bus.key_value(bucket).wait().get(streams.HEAD_KEY).wait()
    assert entry is not None
    head = decode(entry.value, Head)
    found = read_version(connections.blobs, connections.run_id, VERSION, head.manifest)
    stored = open_model(tmp_path / "model")
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert found[name].numpy().tobytes() == tensor.raw().tobytes()
    assert len(root) == 64
