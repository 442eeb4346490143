"""The rollout worker's loops: take a pack → generate → store and announce → acknowledge.

| loop     | consumes                 | waits for                         | unblocked by             |
|----------|--------------------------|-----------------------------------|--------------------------|
| work     | TaskIssued (eval, train) | a pack; an engine that is ready   | the trainer; the engine  |
| weights  | head, WeightsPublished   | a newer version                   | the trainer publishing   |
| engine   | the engine's process     | its exit                          | a failure of the engine  |
| turns    | a GPU of the trainer too | the trainer to want or free it    | the trainer              |
| registry | environment servers      | a second, where they are used     | time                     |

If one of them fails, all are cancelled and the process exits with the error.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial

import structlog

from penstock.protocol.heartbeats import Activity
from penstock.rollout_service.device_turns import EngineTurns
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.environments.environment import ServerRegistry
from penstock.rollout_service.heartbeat import HeartbeatWriter
from penstock.rollout_service.packs.generate_pack import PackGenerator
from penstock.rollout_service.packs.pack_loops import PackLoops, ReceivedPack, TaskSource
from penstock.rollout_service.packs.settlement import PackAnnouncer, Settlement
from penstock.rollout_service.weights.weight_follower import WeightFollower

log = structlog.get_logger("rollout.loop")


@dataclass(frozen=True, slots=True)
class Worker:
    engine: Engine
    registry: ServerRegistry | None  # of environment servers; None: no environment needs it
    weights: WeightFollower
    tasks: TaskSource
    packs: PackGenerator
    announcer: PackAnnouncer
    settlement: Settlement
    heartbeat: HeartbeatWriter
    activity: Activity
    turns: EngineTurns
    packs_in_flight: int  # 0: as many as the engine makes use of
    start_deadline_s: float  # for a teacher to answer
    finish_s: float  # time for the packs in flight after ``stop`` is set


async def run(worker: Worker, stop: asyncio.Event) -> None:
    """Work until ``stop`` is set, then finish the packs in flight, or requeue them after ``finish_s``."""
    following = contextlib.nullcontext() if worker.registry is None else worker.registry.following()
    async with following, asyncio.TaskGroup() as tasks:
        heartbeat = tasks.create_task(worker.heartbeat.run())
        working = tasks.create_task(_start_and_work(worker))
        await stop.wait()
        log.info("stopping", packs_held=worker.tasks.num_held)
        await asyncio.wait([working], timeout=0.0 if worker.engine.version is None else worker.finish_s)
        working.cancel()
        heartbeat.cancel()
    await worker.packs.close()
    await worker.heartbeat.say_exited()
    await worker.tasks.close()


async def _start_and_work(worker: Worker) -> None:
    first = await worker.weights.start()
    with worker.activity.working("preparing the environments"):  # a corpus that is indexed takes minutes
        await asyncio.to_thread(worker.packs.use_model, first.model_folder)
    await worker.packs.check_teacher(first.model_folder, start_deadline_s=worker.start_deadline_s)
    worker.activity.restart()
    log.info("working", policy_version=first.version)
    async with asyncio.TaskGroup() as tasks:
        turns = worker.turns.run(worker.weights.swap.release, worker.weights.resume)
        watching = [tasks.create_task(work) for work in (worker.weights.run(), worker.engine.run(), turns)]
        await PackLoops(worker.tasks, worker.engine, partial(_work, worker), worker.packs_in_flight).run()
        for task in watching:
            task.cancel()


async def _work(worker: Worker, received: ReceivedPack) -> None:
    async with worker.settlement.settling(received):
        groups = await worker.packs.generate(received)
        await worker.announcer.announce(received, groups)
        await worker.packs.announced(groups)
