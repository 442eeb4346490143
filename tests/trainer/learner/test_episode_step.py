"""Episodes of several rows through the whole ring; the weights after the step are those of a computation by hand.

Worker (`PackGenerator`, `PackAnnouncer`), NATS, S3, the reward service's scoring, `Collector`, planner, `Learner` and
`Policy` are the real ones. The optimizer is plain SGD, so that a step is one line by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.episodes import make_row
from tests.groups import make_task
from tests.servers import wait_for
from tests.trainer.learner.tiny import OneProcess, PlainTrainable
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from penstock.deploy.quickstart_task import write_model
from penstock.protocol import streams, subjects, trace_context
from penstock.protocol.config.run_file import load
from penstock.protocol.episode import Episode
from penstock.protocol.facts import GroupGenerated, TaskIssued
from penstock.protocol.groups import Sampling, Task
from penstock.protocol.heartbeats import Activity
from penstock.protocol.packs.task_promise import TaskPromise
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.delivery import Delivery
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.reward_service.announce import Announcer
from penstock.reward_service.metrics import ServiceMetrics
from penstock.reward_service.pack_progress import PackProgress, ProgressStore
from penstock.reward_service.pack_scoring import Pack, RetryPolicy, ScoringContext, score_pack
from penstock.reward_service.registry.built_in import BuiltInScorer
from penstock.reward_service.registry.reward_registry import RewardRegistry
from penstock.reward_service.rewards import environment as given
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.environments.environment import Environment, Sampler
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.packs.generate_pack import PackGenerator
from penstock.rollout_service.packs.pack_loops import ReceivedPack
from penstock.rollout_service.packs.settlement import PackAnnouncer
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.connections import Connections
from penstock.trainer.groups.batcher import Batcher, staleness_tokens
from penstock.trainer.groups.collect import Collector
from penstock.trainer.groups.dispatch import RunGroups
from penstock.trainer.learner.learner import Learner
from penstock.trainer.learner.logprobs import CompletionScorer
from penstock.trainer.learner.planning import Planner, learn
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.settings import RolloutSettings, TrainerSettings

LR = 0.5
TOOL = [9, 10]


class Lookup(Environment):
    """Ask, get an answer, say it. Members 0 and 2 go back behind their first turn, so that they have two rows."""

    name = "lookup"

    async def rollout(self, tasks: Sequence[Task], sampler: Sampler) -> list[list[Episode]]:
        return [[await self._play(task, number, sampler) for number in range(task.group_size)] for task in tasks]

    async def _play(self, task: Task, number: int, sampler: Sampler) -> Episode:
        prompt = list(task.prompt_ids)
        first = await self._say(sampler, prompt, task.sampling)
        second = await self._say(sampler, [*prompt, *first.token_ids, *TOOL], task.sampling)
        rows = [
            self._row(
                [(0, prompt), (1, first.token_ids), (0, TOOL), (1, second.token_ids)], [first, second], 0, text="x"
            )
        ]
        if number % 2 == 0:
            shared = [*prompt, *first.token_ids]
            third = await self._say(sampler, [*shared, 11], task.sampling)
            pieces = [(0, [*shared, 11]), (1, third.token_ids)]
            rows.append(self._row(pieces, [third], 2, parent=0, prefix_len=len(shared)))
        return Episode(
            f"{task.group_id}#{number}", task.group_id, number, self.name, "1", 7, "done", tuple(rows),
            reward=float(number < 2), reward_parts=(("found", float(number < 2)),),
        )  # fmt: skip

    @staticmethod
    async def _say(sampler: Sampler, prompt: list[int], sampling: Sampling) -> Completion:
        [[said]] = await sampler.generate([prompt], sampling, 1)
        return said

    @staticmethod
    def _row(pieces: Any, said: list[Completion], first_turn: int, **more: Any) -> Any:
        row = make_row(pieces, first_turn=first_turn, **more)
        logprobs = [value for one in said for value in one.logprobs]
        row.trajectory.behaviour_logprobs[row.trajectory.loss_mask] = logprobs
        return row


class FromModel:
    """Samples three tokens from a model, all of version 0."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._random = model, torch.Generator().manual_seed(1)

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int) -> list[list[Completion]]:
        return [[self._one(list(prompt)) for _ in range(n)] for prompt in prompts]

    @torch.no_grad()
    def _one(self, ids: list[int]) -> Completion:
        sampled, logprobs = [], []
        for _ in range(3):
            scores = torch.log_softmax(self._model(torch.tensor([ids + sampled])).logits[0, -1].float(), -1)
            token = int(torch.multinomial(scores.exp(), 1, generator=self._random))
            sampled.append(token)
            logprobs.append(float(scores[token]))
        return Completion(sampled, logprobs, (VersionRun(PolicyVersion(0), 0, 3),), "length", "x")


class Issued:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = {task.group_id: task for task in tasks}
        self.dropped: list[Any] = []

    def promise(self, group_id: str) -> TaskPromise:
        return TaskPromise.of(self.tasks[group_id])

    def accept(self, group_id: str, *, is_preferred: bool = False) -> None:
        """Every group is wanted."""

    def pause(self, is_paused: bool) -> None:
        """Nothing is issued."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.dropped.append((name, given))


def _model(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def _generate(bus: Bus, blobs: Blobs, run_id: str, tasks: Sequence[Task], sampler: FromModel) -> None:
    fact = TaskIssued(run_id=run_id, pack_id="p0", tasks=tuple(tasks))
    await bus.publish(subjects.tasks(run_id, "train"), fact, msg_id="p0", traceparent=trace_context.new_trace())
    received = ReceivedPack("train", await _next(bus, streams.tasks_consumer(run_id, "train"), TaskIssued))

    async def at_once(*_: object) -> None:
        pass

    nothing: Any = SimpleNamespace(
        applied={0}, withdrawn_at=0.0, wait_until_verified=at_once, wait_for_version=at_once,
        wait_for_ordinary=at_once, ordinary_waiting=contextlib.nullcontext, sampler=lambda _: sampler,
    )  # fmt: skip
    generator = PackGenerator(
        engine=nothing, environments={"lookup": Lookup()}, weights=nothing, servable=nothing, gate=nothing,
        blobs=blobs, settlement=nothing, activity=Activity(), episodes=nothing,
    )  # fmt: skip
    groups = await generator.generate(received)
    announcer = PackAnnouncer(
        bus=bus, blobs=blobs, activity=Activity(), metrics=WorkerMetrics(), run_id=run_id, worker_id="w0"
    )
    await announcer.announce(received, groups)
    await received.delivery.ack()


async def _score(bus: Bus, blobs: Blobs, run_id: str) -> None:
    delivery = await _next(bus, streams.generated_consumer(run_id), GroupGenerated)
    nothing: Any = None
    scorer = BuiltInScorer("environment", lambda group: given.judge(group.given))
    context = ScoringContext(
        blobs, RewardRegistry({"environment": scorer}, nothing, nothing),
        Announcer(bus, run_id=run_id, source="r0"), RetryPolicy(3, 0.1, 1.0),
        ProgressStore(await bus.key_value(streams.scoring_bucket(run_id).bucket)), ServiceMetrics(), Activity(),
    )  # fmt: skip
    await score_pack(Pack(delivery, PackProgress()), context, lambda: None)


async def _next(bus: Bus, consumer: Any, kind: Any) -> Delivery[Any]:
    inbox, found = await bus.inbox(consumer, kind), []
    wait_for(lambda: found.extend(inbox.fetch(1, 0.5).wait()) or found, "a message")
    return found[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", seed=0)
    return tmp_path / "model"


def _settings(folder: Path, *overrides: str) -> TrainerSettings:
    common = ["trainer.micro_batch_tokens=60", "data.max_prompt_tokens=40", "rollout.max_new_tokens=3"]
    return load(TrainerSettings, overrides=[f"model.path={folder}", *common, *overrides]).settings


def _learner(settings: TrainerSettings, model: nn.Module, blobs: Any = None) -> tuple[Planner, Learner]:
    dims: Any = OneProcess()
    scorer = CompletionScorer(model, 1.0)
    trainable: Any = PlainTrainable(scorer, sgd_lr=LR)
    learner = Learner(Policy(trainable, scorer, dims), dims, blobs, build_objective(settings.algorithm))
    return Planner(settings, learner, {}), learner


def _turns(group: ReadyGroup) -> Iterator[tuple[int, Any, Any]]:
    for number, episode in enumerate(group.group.episodes):
        for row in episode.rows:
            yield from ((number, row, turn) for turn in row.turns)


def _by_hand(model: nn.Module, batch: Sequence[ReadyGroup], weigh: Callable[[int, int, int], float]) -> Tensor:
    """Return the sum over all turns of ``weigh(group, episode, turn)`` times the log-probability of each of its tokens.

    ``-A log p`` has the gradient of ``-A r`` at r = 1, where nothing is clipped.
    """
    total = torch.zeros(())
    for number, group in enumerate(batch):
        for episode, row, turn in _turns(group):
            ids = torch.tensor(row.trajectory.token_ids.tolist())
            scores = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
            for place in range(turn.start, turn.end):
                total = total + weigh(number, episode, turn.number) * scores[place - 1, ids[place]]
    return total


def _stepped(model: nn.Module, objective: Tensor) -> dict[str, Tensor]:
    objective.backward()
    return {name: (p + LR * p.grad).detach() for name, p in model.named_parameters() if p.grad is not None}


async def test_a_step_on_episodes_of_several_rows_equals_a_computation_by_hand(
    bus: Bus, blobs: Blobs, run_streams: str, folder: Path
) -> None:
    """Rewards 1, 1, 0, 0 in 2, 1, 2, 1 rows: baseline .5; every episode weighs the same, every token counts once."""
    tasks = [
        make_task(
            f"e0.p{n}.a0", prompt_ids=[5, 6, 7 + n], group_size=4, max_new_tokens=3, reward_name="environment"
        ).model_copy(update={"environment": "lookup"})
        for n in range(2)
    ]
    await _generate(bus, blobs, run_streams, tasks, FromModel(_model(folder)))
    await _score(bus, blobs, run_streams)
    issued: Any = Issued(tasks)
    groups = RunGroups()
    groups.train.issue(issued.tasks)
    batcher = Batcher(groups.train, issued, RolloutSettings(groups_per_step=2, max_staleness=0), AlgorithmSettings())
    connections = Connections(run_streams, bus, blobs)
    with Collector(connections, groups=groups, batcher=batcher, issuer=issued, deadline_s=20.0) as collector:
        batch = collector.collect(PolicyVersion(0))
    assert issued.dropped == []
    assert [group.scored.rewards for group in batch] == [(1.0, 1.0, 0.0, 0.0)] * 2
    assert batch[0].scored.parts == {"found": (1.0, 1.0, 0.0, 0.0)}
    assert [group.scored.generated.rows for group in batch] == [(2, 1, 2, 1)] * 2
    assert batch[0].scored.generated.completion_tokens == (9, 6, 9, 6)
    assert staleness_tokens(batch, PolicyVersion(0)) == {0: 60}

    settings = _settings(
        folder, "algorithm.name=grpo", "algorithm.normalise_by_std=false", "algorithm.aggregation=seq-mean-token-mean"
    )
    trained = _model(folder)
    done = learn(*_learner(settings, trained), batch, 0)
    assert done.metrics.sums["tokens"] == 60
    assert len(done.plan.rows) == 12

    by_hand = _model(folder)
    lengths = [9, 6, 9, 6]
    expected = _stepped(by_hand, _by_hand(by_hand, batch, lambda _, e, __: (0.5 if e < 2 else -0.5) / (8 * lengths[e])))
    for name, parameter in trained.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=2e-6)
    moved = {name: (p - dict(_model(folder).named_parameters())[name]).abs().max() for name, p in expected.items()}
    assert max(moved.values()) > 1e-3
