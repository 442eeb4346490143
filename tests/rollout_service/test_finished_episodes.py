"""Episodes that had ended when their worker was killed: continued by the next one, each once, and deleted afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.agents.environments.play import Play, Reply, Row, done
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import Message
from penstock.protocol import blob_keys
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.episode import Episode
from penstock.protocol.errors import BlobStoreUnreachable
from penstock.protocol.groups import ImageRef, RewardRequest, RouterShape, RowImages, Sampling, Task
from penstock.protocol.heartbeats import Activity
from penstock.protocol.images.processor import read_processor
from penstock.protocol.packs import group_pack
from penstock.protocol.token_annotations import ExpertChoices, dtype_of
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.errors import EngineError, WeightsUnverified
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.packs.finished_episodes import ContinuedEpisode, FinishedEpisodes
from penstock.rollout_service.packs.generate_pack import PackGenerator
from penstock.rollout_service.run_images import RunImages
from tests.agents.proxy.agent_model import SMOLLM2, Engine, write_model
from tests.rollout_service.vision_folder import write_vision_folder
from tests.servers import wait_for

SIZE = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), SMOLLM2)


def task_of(routers: RouterShape | None = None, **more: Any) -> Task:
    return Task(
        group_id="r:0:1", prompt_ids=(1,), prompt_text="sun", group_size=SIZE,
        sampling=Sampling(max_new_tokens=16, routers=routers),
        reward=RewardRequest(name="environment"), split="train", environment="mine", issued_version=3,
        messages=json.dumps([{"role": "user", "content": "what is sun"}]), **more,
    )  # fmt: skip


class Slow(TurnEnvironment):
    """Ends its first plays at once; the others never do."""

    name = "slow"

    def __init__(self, num_ending: int) -> None:
        super().__init__()
        self.num_ending, self.num_plays = num_ending, 0

    def play(self, seed: int, row: Row, options: Any) -> Play:
        self.num_plays += 1
        return SlowPlay(row, ends=self.num_plays <= self.num_ending)


class SlowPlay(Play):
    def __init__(self, row: Row, *, ends: bool) -> None:
        self.row, self.ends = row, ends

    def start(self) -> Any:
        return self.row.messages

    async def step(self, answer: Message) -> Reply:
        if not self.ends:
            await asyncio.Event().wait()
        return done(1.0)


async def at_once(*_: object, **__: object) -> None:
    """Do nothing."""


class Worker:
    """What of a worker generates packs, with a store of its own: nothing survives it but objects."""

    def __init__(
        self,
        model: Path,
        blobs: Blobs,
        run_id: str,
        num_ending: int,
        *,
        served: int = 4,
        withdrawn_at: float = 0.0,
        images: RunImages | None = None,
        **settings: Any,
    ) -> None:
        self.metrics, self.pin, self.waited_for = WorkerMetrics(), asyncio.Lock(), []
        sampler = Engine(ChatTokenizer.read(model), seed=num_ending, version=served - 1)
        serving: Any = SimpleNamespace(
            applied={served - 1, served}, version=PolicyVersion(served), check_health=at_once, withdrawn_at=withdrawn_at,
            wait_until_verified=self.wait_until_verified, wait_for_version=at_once, wait_for_ordinary=at_once,
            ordinary_waiting=contextlib.nullcontext, sampler=lambda _: sampler, refuse=at_once, pinned=lambda _: self.pin,
        )  # fmt: skip
        self.episodes = FinishedEpisodes(blobs, serving, self.metrics, run_id=run_id, images=images)
        self.environment = Slow(num_ending).defined(
            "mine", EnvironmentDefinition(type="slow", **{"keep_after_s": 0, "kept_staleness": 2, **settings})
        )
        self.environment.use_model(model, 8192)
        self.environment.use_worker(self.episodes, None)
        self.generator = PackGenerator(
            engine=serving, environments={"mine": self.environment}, weights=serving, servable=serving, gate=serving,
            blobs=blobs, settlement=serving, activity=Activity(), episodes=self.episodes,
        )  # fmt: skip
        self.generator.use_model(model)

    async def wait_until_verified(self, versions: set[int]) -> None:
        self.waited_for.append((versions, self.pin.locked()))

    async def generate(self, num_delivered: int, task: Task | None = None) -> list[Group]:
        fact = SimpleNamespace(tasks=(task or task_of(),), tasks_blob=None, pack_id="p0")
        received: Any = SimpleNamespace(delivery=SimpleNamespace(fact=fact, num_delivered=num_delivered), split="train")
        async with asyncio.timeout(60):
            return await self.generator.generate(received)

    async def is_killed_after(self, num_stored: int) -> None:
        """Generate the pack's first delivery, and vanish when so many episodes are stored."""
        working = asyncio.create_task(self.generate(1))
        await self.has_stored(num_stored)
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working

    async def has_stored(self, num: int) -> None:
        await asyncio.to_thread(wait_for, lambda: self.metrics.episodes_stored >= num or None, f"{num} stored episodes")


def stored(blobs: Blobs, run_id: str) -> dict[str, Episode]:
    keys = [stat.key for stat in blobs.list(blob_keys.all_finished_episodes_prefix(run_id))]
    return {key: group_pack.decode(blobs.get_unverified(key))[0].episodes[0] for key in sorted(keys)}


async def test_the_next_worker_plays_only_what_had_not_ended(model: Path, blobs: Blobs, run_id: str) -> None:
    """Three of four had ended: they are in the group as they were sampled, each once, and their objects are deleted."""
    await Worker(model, blobs, run_id, 3).is_killed_after(3)
    ended = stored(blobs, run_id)
    assert [one.index for one in ended.values()] == [0, 1, 2]
    worker = Worker(model, blobs, run_id, SIZE, served=5)  # it never loaded version 3
    (group,) = await worker.generate(2)
    assert (worker.environment.num_plays, worker.metrics.episodes_continued) == (1, 3)  # pyright: ignore[reportAttributeAccessIssue]
    assert [episode.index for episode in group.episodes] == list(range(SIZE))
    assert [isinstance(episode, ContinuedEpisode) for episode in group.episodes] == [True, True, True, False]
    for before, after in zip(ended.values(), group.episodes, strict=False):
        assert (before.episode_id, before.seed, before.reward, before.messages) == (
            after.episode_id, after.seed, after.reward, after.messages,
        )  # fmt: skip
        for row, same in zip(before.rows, after.rows, strict=True):
            assert np.array_equal(row.trajectory.token_ids, same.trajectory.token_ids)
            assert np.array_equal(row.trajectory.behaviour_logprobs, same.trajectory.behaviour_logprobs)
            assert (row.trajectory.version_runs, row.turns) == (same.trajectory.version_runs, same.turns)
    (read,) = group_pack.decode(group_pack.encode([group]))
    assert len(read.episodes) == SIZE
    assert len(stored(blobs, run_id)) == SIZE  # until the pack is announced
    await worker.generator.announced([group])
    assert stored(blobs, run_id) == {}


async def test_a_first_delivery_and_another_attempt_read_nothing(model: Path, blobs: Blobs, run_id: str) -> None:
    """What is stored belongs to one attempt at one group; a pack that was never delivered has none."""
    await Worker(model, blobs, run_id, 3).is_killed_after(3)
    for delivery, task in ((1, task_of()), (2, task_of(attempt=1))):
        worker = Worker(model, blobs, run_id, SIZE)
        await worker.generate(delivery, task)
        assert (worker.environment.num_plays, worker.metrics.episodes_continued) == (SIZE, 0)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("served", "task", "settings"),
    [
        (9, {}, {}),  # too old to be trained with what is played now
        (5, {}, {"kept_staleness": 0}),
        (4, {"pinned_version": 9}, {}),  # an evaluation of one version
        (4, {"seed": 7}, {}),  # another world
        (4, {"routers": RouterShape(num_layers=1, num_experts=8, top_k=2)}, {}),  # whose experts nobody knows
    ],
)
async def test_episodes_that_do_not_fit_are_played_again(
    model: Path, blobs: Blobs, run_id: str, served: int, task: dict, settings: dict
) -> None:
    await Worker(model, blobs, run_id, 3).is_killed_after(3)
    worker = Worker(model, blobs, run_id, SIZE, served=served, **settings)
    wanted = task_of(**task)
    await worker.episodes.load([wanted], vocab_size=440, max_staleness={"mine": worker.environment.kept_staleness})
    left = [one for one in worker.episodes.take(wanted) if worker.environment._continues(wanted, one)]
    assert left == []


EXPERTS, OTHERS = (RouterShape(num_layers=1, num_experts=8, top_k=k) for k in (2, 1))


def experts_of(row: Trajectory, shape: RouterShape = EXPERTS) -> dict[str, Any]:
    ids = np.zeros((len(row.token_ids) - 1, shape.num_layers, shape.top_k), dtype_of(shape))
    return {"experts": ExpertChoices(shape, ids + np.arange(shape.top_k, dtype=ids.dtype))}


def image_of(_: Trajectory, processor: str) -> dict[str, Any]:
    ref = ImageRef(position=0, num_tokens=1, grid_thw=(1, 2, 2), sha256="0" * 64, size_bytes=1)
    return {"images": RowImages(processor=processor, refs=(ref,))}


@pytest.mark.parametrize(
    ("wanted", "said", "is_continued"),
    [
        (None, None, True),
        (None, experts_of, False),  # the others of its group will have none
        (EXPERTS, None, False),
        (EXPERTS, experts_of, True),
        (OTHERS, experts_of, False),
    ],
)
async def test_only_episodes_with_the_experts_that_are_wanted_are_continued(
    model: Path, blobs: Blobs, run_id: str, wanted: RouterShape | None, said: Any, is_continued: bool
) -> None:
    """All rows of a group name the experts of the same layers, or none of them does: the group would be refused as a whole."""
    assert await is_continued_with(model, blobs, run_id, said, task_of(wanted)) == is_continued


async def test_only_episodes_with_images_of_the_workers_own_processor_are_continued(
    model: Path, blobs: Blobs, run_id: str, tmp_path: Path
) -> None:
    images, own = RunImages(blobs, run_id), read_processor(write_vision_folder(tmp_path / "vision"))
    assert own is not None
    of_text = RunImages(blobs, run_id)
    images.use_model(tmp_path / "vision")
    of_text.use_model(model)
    for number, (processor, reads, is_continued) in enumerate([
        (own.sha256, images, True), ("1" * 64, images, False), (own.sha256, None, False), (own.sha256, of_text, False)
    ]):  # fmt: skip
        task = task_of().model_copy(update={"group_id": f"r:0:{number}"})
        found = await is_continued_with(
            model, blobs, run_id, lambda row, name=processor: image_of(row, name), task, images=reads
        )
        assert found == is_continued


async def is_continued_with(
    model: Path, blobs: Blobs, run_id: str, said: Any, task: Task, images: RunImages | None = None
) -> bool:
    """Store an episode of a task whose rows say this beside their tokens, and ask the next worker for it."""
    first = Worker(model, blobs, run_id, SIZE, keep_after_s=100)
    ((ended, *_),) = [
        group.episodes for group in await first.generate(1, task_of().model_copy(update={"group_id": task.group_id}))
    ]
    if said is not None:
        rows = [replace(row, trajectory=replace(row.trajectory, **said(row.trajectory))) for row in ended.rows]
        ended = replace(ended, rows=tuple(rows))
    await first.episodes.keep(task, ended, begun_at=1.0)
    assert first.metrics.episodes_stored == 1
    worker = Worker(model, blobs, run_id, SIZE, images=images)
    await worker.episodes.load([task], vocab_size=440, max_staleness={"mine": 2})
    return bool(worker.episodes.take(task))


async def test_a_greedy_baseline_is_continued_apart_from_its_group(model: Path, blobs: Blobs, run_id: str) -> None:
    worker = Worker(model, blobs, run_id, SIZE + 1)
    (group,) = await worker.generate(1, task_of(with_baseline=True))
    assert [episode.is_baseline for episode in group.episodes] == [False] * SIZE + [True]
    again = Worker(model, blobs, run_id, 0)
    (same,) = await again.generate(2, task_of(with_baseline=True))
    assert again.metrics.episodes_continued == SIZE + 1
    before, after = (
        [episode.rows[0].trajectory.token_ids.tolist() for episode in made.episodes] for made in (group, same)
    )
    assert before == after
    assert [(episode.index, episode.is_baseline) for episode in same.episodes] == [
        (n, n == SIZE) for n in range(SIZE + 1)
    ]


async def test_an_object_that_is_no_episode_is_left_out(model: Path, blobs: Blobs, run_id: str) -> None:
    """Altered, of another group, of another place, not a pack: each is played again, and deleted with the rest."""
    await Worker(model, blobs, run_id, 3).is_killed_after(3)
    prefix = blob_keys.finished_episodes_prefix(run_id, "r:0:1", 0)
    first, second, _ = stored(blobs, run_id)
    good = blobs.get_unverified(first)
    sha256 = first.rpartition("sampled.0.")[2]
    blobs.put(f"{prefix}sampled.3.{sha256}", good)  # its content is of place 0
    blobs.put(f"{prefix}sampled.3.{'0' * 64}.parquet", good)  # not its sha256
    blobs.put(f"{prefix}notes.txt", b"?")
    blobs.delete([second])
    await Worker(model, blobs, run_id, SIZE).generate(1, task_of().model_copy(update={"group_id": "r:0:2"}))
    elsewhere = blob_keys.finished_episodes_prefix(run_id, "r:0:2", 0)
    foreign = next(stat.key for stat in blobs.list(elsewhere) if "sampled.1." in stat.key)
    blobs.put(prefix + foreign.removeprefix(elsewhere), blobs.get_unverified(foreign))
    worker = Worker(model, blobs, run_id, SIZE)
    (group,) = await worker.generate(2)
    assert (worker.environment.num_plays, worker.metrics.episodes_continued) == (2, 2)  # pyright: ignore[reportAttributeAccessIssue]
    assert [episode.index for episode in group.episodes] == list(range(SIZE))
    await worker.generator.announced([group])
    assert not list(blobs.list(prefix))


async def test_a_store_that_fails_costs_nothing_but_protection(model: Path, run_id: str) -> None:
    """The group is generated; each episode that could not be stored, or read, is counted or played."""

    class Gone:
        def put(self, *_: object) -> Any:
            raise BlobStoreUnreachable("no answer")

        list = put

    worker = Worker(model, Gone(), run_id, SIZE)  # pyright: ignore[reportArgumentType]
    (group,) = await worker.generate(2)
    assert len(group.episodes) == SIZE
    assert (worker.metrics.episodes_not_stored, worker.metrics.episodes_stored) == (SIZE, 0)
    await worker.generator.announced([group])


async def test_what_a_withdrawn_version_may_have_sampled_is_neither_stored_nor_announced(
    model: Path, blobs: Blobs, run_id: str
) -> None:
    """Though it has loaded a version of the same number since. A version is withdrawn once no other is pinned: its copy is waited for after."""
    worker = Worker(model, blobs, run_id, SIZE, withdrawn_at=math.inf)
    with pytest.raises(WeightsUnverified, match="r:0:1: a version that may have sampled it was withdrawn"):
        await worker.generate(1, task_of(pinned_version=3))
    assert (stored(blobs, run_id), worker.waited_for) == ({}, [({3, 4}, False)])


async def test_quick_episodes_are_not_stored_and_a_failure_keeps_the_slow_ones(
    model: Path, blobs: Blobs, run_id: str
) -> None:
    """Storing costs more than playing a quick one again; after a failure of the engine the same worker goes on."""
    quick = Worker(model, blobs, run_id, SIZE, keep_after_s=100)
    await quick.generate(1)
    assert (quick.metrics.episodes_stored, stored(blobs, run_id)) == (0, {})
    worker = Worker(model, blobs, run_id, SIZE)
    made = worker.environment.attempt

    async def attempt(site: Any, begun: Any, sampler: Any) -> Any:
        if begun.name.endswith(".3") and not worker.metrics.episodes_continued:
            await worker.has_stored(3)
            raise EngineError("the engine is gone")
        return await made(site, begun, sampler)

    worker.environment.attempt = attempt  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(EngineError):
        await worker.generate(1)
    (group,) = await worker.generate(2)
    assert (worker.metrics.episodes_continued, len(group.episodes)) == (3, SIZE)
