"""Evaluations: pinned to one version, counted only when complete, while training continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.servers import wait_for
from tests.trainer.producer import Answer, Author, ScriptedProducer, recite

from penstock.deploy.quickstart_task import write_data, write_model
from penstock.protocol import blob_keys, streams, subjects
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.connection import NatsSettings, S3Settings
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.protocol.facts import DeadLetter, Heartbeat, TaskIssued
from penstock.protocol.groups import Sampling, Task
from penstock.protocol.packs.task_promise import TaskSettings
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.connections import Connections
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data_settings import EvalSettings, EvalSource
from penstock.trainer.errors import EvaluationFailed
from penstock.trainer.evaluation.eval_result import (
    EvalResult,
    EvaluatedSource,
    Evaluation,
    LostEvaluation,
    SuccessRules,
    pass_at_k,
)
from penstock.trainer.evaluation.evaluate import Evaluator
from penstock.trainer.evaluation.evaluation_schedule import EvaluationSchedule
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.weight_buckets import ModelWeights, Snapshot, copy_to_buckets
from penstock.trainer.settings import DataSettings

V3, V4 = PolicyVersion(3), PolicyVersion(4)
HELD_OUT = [f"eval.v3.p{index}" for index in range(70)]


class Scene:
    """An evaluator with held-out prompts, a publisher, and a producer that answers."""

    def __init__(
        self,
        connections: Connections,
        folder: Path,
        producer: ScriptedProducer,
        others: Callable[[PromptSet, EvalSettings], list[EvaluatedSource]] = lambda *_: [],
    ) -> None:
        write_model(folder / "model", seed=0)
        write_data(folder, seed=0, num_sft=1, num_train=1, num_eval=70)
        prompts = PromptSet(
            [folder / "eval.jsonl"], data=DataSettings(), reward=RewardSettings(name="exact_match"),
            tokenizer=ChatTokenizer.read(folder / "model"),
        )  # fmt: skip
        self.connections = connections
        self.producer = producer
        self.results: list[EvalResult] = []
        self.lost: list[LostEvaluation] = []
        self.at_end: list[tuple[set[PolicyVersion], int]] = []  # pinned versions, groups that are not closed
        self.groups = RunGroups()
        self.publisher = Publisher(connections, model_folder=folder / "model")
        settings = EvalSettings(samples=2, temperature=0.5, environment="maze")
        self.sources = [
            EvaluatedSource("eval", prompts, settings, Sampling(max_new_tokens=8, temperature=0.5)),
            *others(prompts, settings),
        ]
        self.evaluator = Evaluator(
            connections, sources=self.sources, publisher=self.publisher, deadline_s=20.0,
            on_end=self.add, groups=self.groups, success=SuccessRules({"exact_match": 1.0}), silent_s=0.3,
        )  # fmt: skip

    def add(self, end: EvalResult | LostEvaluation) -> None:
        if isinstance(end, LostEvaluation):
            self.lost.append(end)
        else:
            self.at_end.append((self.publisher.pinned(), self.groups.held_out.num_outstanding))
            self.results.append(end)

    def publish(self, version: PolicyVersion, *, wait: bool = False) -> None:
        weights = ModelWeights(copy_to_buckets({"a": torch.zeros(2)}))
        self.publisher.submit(Snapshot(version, 3, weights, "float32", must_publish=True))
        if wait:
            self.publisher.wait_until_published(version, 180.0)

    def start(self) -> None:
        self.publish(V3)
        self.evaluator.start(V3, 3)

    @property
    def evaluation(self) -> Evaluation:
        return self.evaluator._evaluations[V3, "eval"]


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, bus: Bus, blobs: Blobs, run_streams: str, nats_settings: NatsSettings,
    s3_settings: S3Settings, tmp_path: Path,
) -> Iterator[Scene]:  # fmt: skip
    with ScriptedProducer(nats_settings, s3_settings, run_streams) as producer:
        scene = Scene(Connections(run_streams, bus, blobs), tmp_path, producer, *getattr(request, "param", ()))
        with scene.evaluator:
            yield scene
        scene.publisher.close()


def hard(prompts: PromptSet, settings: EvalSettings) -> list[EvaluatedSource]:
    own = settings.model_copy(update={"samples": 4, "num_prompts": 4})
    return [EvaluatedSource("hard", prompts, own, Sampling(max_new_tokens=4, temperature=1.0))]


# a second source of the first four prompts, four samples each
two_sources = pytest.mark.parametrize("scene", [(hard,)], indirect=True, ids=["two sources"])


def half_right(task: Task, version: PolicyVersion) -> Answer:
    group, _ = recite(task, version)
    return group, (1.0, 0.0) if int(task.group_id.rsplit("p", 1)[1]) % 2 else (0.0, 0.5)


def test_an_evaluation_is_sampled_by_its_version_and_summarised(scene: Scene) -> None:
    """Every prompt is sampled by the pinned version although a newer one is published; accuracy counts full rewards."""
    scene.producer.author = half_right
    scene.evaluator.start(V3, 3)  # not published yet: nothing is issued before
    scene.publish(V3, wait=True)
    scene.publish(V4)
    scene.evaluator.wait(V3)
    wait_for(lambda: scene.results, "the result")
    result = scene.results[0]
    assert set(scene.producer.versions) == {3}
    assert (result.version, result.step, result.num_prompts, result.num_samples) == (3, 3, 70, 2)
    assert result.accuracy == pytest.approx(0.25)
    assert result.reward_mean == pytest.approx(0.375)
    assert result.pass_at == {1: pytest.approx(0.25), 2: pytest.approx(0.5)}
    assert result.score == ("exact_match ≥ 1", result.accuracy)
    assert replace(result, accuracy=None).score == ("mean reward", result.reward_mean)
    assert scene.at_end == [({3, 4}, 70)]  # a trainer killed while it records the best version evaluates it again
    entries = scene.groups.take_entries()
    assert {group.pack for group in entries.evaluated} == set(range(len(entries.closed_packs)))
    assert all(scene.connections.blobs.get(pack) for pack in entries.closed_packs)


def test_a_prompt_is_read_once_for_its_task(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its images, which the message needs too: to decode them again would double the work of issuing."""
    read: list[int] = []
    plain = PromptSet.__getitem__
    monkeypatch.setattr(PromptSet, "__getitem__", lambda self, index: read.append(index) or plain(self, index))
    scene.producer.limit = 0  # nothing comes back, which is held against its prompt
    scene.start()
    wait_for(lambda: scene.evaluation.is_issued, "the tasks")
    assert sorted(read) == list(range(70))


def test_an_answer_of_another_version_is_refused(scene: Scene) -> None:
    """A worker that ignores the pin makes the evaluation fail with that reason; no result is reported."""
    scene.producer.author = lambda task, version: recite(task, PolicyVersion(version - 1))
    scene.start()
    with pytest.raises(EvaluationFailed, match=r"sampled by versions 2 to 2; the worker ignored the pin"):
        scene.evaluator.wait(V3)
    assert not scene.results
    assert [(lost.version, lost.step) for lost in scene.lost] == [(3, 3)]
    assert "ignored the pin" in scene.lost[0].reason


def test_a_forged_group_of_another_version_does_not_end_an_evaluation(scene: Scene) -> None:
    scene.producer.limit = 0
    scene.start()
    scene.publisher.wait_until_published(V3, 180.0)
    task = scene.evaluator._task(scene.evaluation, 0, scene.sources[0].prompts[0])
    message = TaskIssued(run_id=scene.connections.run_id, pack_id="forged", tasks=(task,))
    scene.producer.announce(scene.producer.store(message, [recite(task, PolicyVersion(2))], V3), msg_id="forged")
    wait_for(lambda: scene.evaluation.dead_lettered, "the dead letter")
    scene.producer.limit = None
    scene.evaluator.wait(V3)
    assert [(result.version, result.num_prompts) for result in scene.results] == [(3, 70)]
    assert not scene.lost


def _easier(task: Task, version: PolicyVersion) -> Answer:
    group, _ = recite(task, version)
    return replace(group, reward=group.reward.model_copy(update={"ground_truth": '"1"'})), (1.0, 1.0)


def _one_completion(task: Task, version: PolicyVersion) -> Answer:
    group, _ = recite(task, version)
    return replace(group, trajectories=group.trajectories[:1]), (1.0,)


@pytest.mark.parametrize(
    ("author", "reason"),
    [(_easier, "what it is to be scored by is not"), (_one_completion, "1 trajectories, its task")],
)
def test_an_answer_to_another_task_is_refused(scene: Scene, author: Author, reason: str) -> None:
    """An evaluation fails by a pack that is not of its tasks, which is kept as a dead letter; no accuracy is reported."""
    letters: list[DeadLetter] = []
    connections = scene.connections
    subject = subjects.dead(connections.run_id, "scored")
    connections.bus.tail(f"{connections.run_id}-dead", subject, DeadLetter, letters.append).wait()
    scene.producer.author = author
    scene.start()
    with pytest.raises(EvaluationFailed, match=reason):
        scene.evaluator.wait(V3)
    assert not scene.results
    wait_for(lambda: letters, "the dead letter")
    assert letters[0].reason == "PackError"


def test_an_evaluation_in_progress_at_a_crash_continues_in_the_next_session(scene: Scene) -> None:
    """Its version is older than the checkpoint's and still stored: its result has its own step, and it is unpinned."""
    for version in (V3, V4):
        scene.publish(version, wait=True)
        scene.publisher.unpin(version)
    scene.groups.held_out.issue(HELD_OUT)  # by the session before
    published = subjects.weights_published(scene.connections.run_id)
    no_weights = Heartbeat(role="rollout", service_id="x", at=0.0, state="generating")
    scene.connections.bus.publish(published, no_weights, msg_id="x").wait()  # and something that is no announcement
    assert not scene.evaluator.resume(V4, now=V4, step=4)
    assert scene.publisher.pinned() == {V3}
    scene.evaluator.wait_for_all()
    assert [(result.version, result.step, result.num_prompts) for result in scene.results] == [(3, 3, 70)]
    assert not scene.lost
    assert not scene.publisher.pinned()
    assert not scene.groups.held_out.num_outstanding


def test_groups_of_an_earlier_sessions_evaluation_are_held_against_its_settings(scene: Scene) -> None:
    scene.evaluator._settings_before = (TaskSettings(2, 8, "maze"), TaskSettings(3, 8, "maze"))
    scene.publish(V3, wait=True)
    scene.groups.held_out.issue(HELD_OUT)
    scene.producer.author = _one_completion
    scene.evaluator.start(V3, 3)
    with pytest.raises(EvaluationFailed, match="1 trajectories, its task asked for 2"):
        scene.evaluator.wait(V3)
    assert not scene.results


def test_the_weights_of_the_checkpoint_are_evaluated_under_their_new_number(scene: Scene) -> None:
    """Published again as another version, they are evaluated as that version: nothing is lost."""
    scene.groups.held_out.issue(HELD_OUT)
    assert scene.evaluator.resume(V3, now=V4, step=3)
    assert not scene.groups.held_out.num_outstanding
    assert not scene.lost


@pytest.mark.parametrize(
    ("is_stored", "num_groups", "reason"), [(False, 70, "no longer stored"), (True, 69, "with 69 groups in flight")]
)
def test_an_evaluation_that_cannot_continue_is_reported(
    scene: Scene, is_stored: bool, num_groups: int, reason: str
) -> None:
    """Without its weights, or with only some of its groups, it is lost with the reason; its groups are closed."""
    scene.publish(V3, wait=True)
    if not is_stored:
        prefix = blob_keys.weights_prefix(scene.connections.run_id, V3)
        scene.connections.blobs.delete([stat.key for stat in scene.connections.blobs.list(prefix)])
    scene.groups.held_out.issue(HELD_OUT[:num_groups])
    assert not scene.evaluator.resume(V4, now=V4, step=4)
    (lost,) = scene.lost
    assert (lost.version, lost.step) == (3, 3 if is_stored else None)
    assert reason in lost.reason
    assert not scene.groups.held_out.num_outstanding


def _say_dead(scene: Scene, *group_ids: str) -> None:
    run_id, bus = scene.connections.run_id, scene.connections.bus
    letter = DeadLetter(
        run_id=run_id, stage="tasks", subject="x", reason="VersionGone", detail="no weights of 3", group_ids=group_ids,
        num_delivered=3,
    )  # fmt: skip
    bus.publish(subjects.dead(run_id, "tasks"), letter, msg_id="d").wait()


def test_dead_lettered_groups_make_the_evaluation_fail(scene: Scene) -> None:
    scene.producer.limit = 0
    scene.start()
    bus, taken = scene.connections.bus, 0
    tasks = bus.inbox(streams.tasks_consumer(scene.connections.run_id, "eval"), TaskIssued).wait()
    while taken < 70:  # a worker that dead-letters its tasks has taken them out of the queue
        for delivery in tasks.fetch(16, 1.0).wait():
            taken += len(delivery.fact.tasks)
            delivery.ack().wait()
    _say_dead(scene, *HELD_OUT)
    with pytest.raises(EvaluationFailed, match=r"70 of 70 groups were dead-lettered, .*VersionGone: no weights of 3"):
        scene.evaluator.wait(V3)
    wait_for(lambda: scene.evaluator.num_failed == 1, "the failure to be counted")


def test_a_dead_letter_of_a_group_that_is_on_its_way_is_not_believed(scene: Scene) -> None:
    """Any service may write one; the groups that it names are waited for while tasks are in the queue."""
    scene.producer.limit = 0
    scene.start()
    scene.publisher.wait_until_published(V3, 180.0)
    wait_for(lambda: scene.evaluation.is_issued, "the tasks")
    _say_dead(scene, *HELD_OUT)
    wait_for(lambda: scene.evaluation.dead_lettered, "the dead letter")
    time.sleep(1.0)  # longer than `silent_s`
    scene.producer.limit = None
    scene.evaluator.wait(V3)
    assert [result.num_prompts for result in scene.results] == [70]
    assert not scene.lost


def test_pass_at_k_is_unbiased() -> None:
    """pass@k from n samples with c correct is the share of k-subsets with at least one correct."""
    assert pass_at_k(4, 0, 2) == 0.0
    assert pass_at_k(4, 1, 1) == pytest.approx(0.25)
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_at_k(4, 3, 4) == 1.0


@two_sources
def test_every_source_has_its_own_prompts_samples_and_result(scene: Scene) -> None:
    scene.start()
    scene.evaluator.wait(V3)
    found = {result.split: (result.version, result.num_prompts, result.num_samples) for result in scene.results}
    assert found == {"eval": (3, 70, 2), "hard": (3, 4, 4)}
    assert [pinned for pinned, _ in scene.at_end] == [{3}, {3}]
    assert not scene.publisher.pinned()
    assert not scene.groups.held_out.num_outstanding


@two_sources
def test_only_the_sources_that_are_due_are_evaluated(scene: Scene) -> None:
    settings = EvalSettings(every=4, source={"hard": EvalSource(data=[Path("x")], every=6)})
    schedule = EvaluationSchedule(scene.evaluator, settings, ["eval", "hard"], num_steps=13)
    due = {step: schedule._due(step) for step in range(14) if schedule.is_due(step)}
    assert due == {
        0: ["eval", "hard"],
        4: ["eval"],
        6: ["hard"],
        8: ["eval"],
        12: ["eval", "hard"],
        13: ["eval", "hard"],
    }
    scene.publish(V3)
    schedule.start(V3, 6)
    schedule.wait_for_newest(lambda: False)
    assert [result.split for result in scene.results] == ["hard"]


@two_sources
def test_only_the_unfinished_source_of_a_version_is_continued(scene: Scene) -> None:
    """Its groups were in flight when the trainer exited; the other source, due at that step, was over."""
    scene.publish(V3, wait=True)
    scene.groups.held_out.issue([f"eval.v3.p{number}" for number in range(70, 74)])
    settings = EvalSettings(every=5, source={"hard": EvalSource(data=[Path("x")], every=4)})
    schedule = EvaluationSchedule(scene.evaluator, settings, ["eval", "hard"], num_steps=13)
    assert schedule.resume(V3, now=V3, step=5)
    schedule.start(V3, 5)  # of the sources only the other one is due at step 5
    schedule.wait_for_newest(lambda: False)
    assert [result.split for result in scene.results] == ["hard"]
    assert not scene.lost
