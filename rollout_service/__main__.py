"""``python -m penstock.rollout_service [run.toml] [section.key=value]``: settings → connections → `loop.run`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import structlog

from penstock.protocol import streams
from penstock.protocol.config import run_file
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.facts import TaskIssued
from penstock.protocol.groups import Split
from penstock.protocol.heartbeats import Activity
from penstock.protocol.logs import configure
from penstock.protocol.metrics.exporter import certificate_ends
from penstock.protocol.metrics.gpu import GpuSampler, visible_gpus
from penstock.protocol.shared_device import SharedDevices
from penstock.protocol.traces.traces import Traces, recording
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.inbox import Inbox
from penstock.protocol.weights.shared_segments import SharedSegments
from penstock.rollout_service import heartbeat, loop
from penstock.rollout_service.device_turns import EngineTurns
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.engines.engine_kind import EngineSite, create_engine
from penstock.rollout_service.environments.environment import Environment, ServerRegistry, load_environments
from penstock.rollout_service.heartbeat import HeartbeatWriter
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.packs.finished_episodes import FinishedEpisodes
from penstock.rollout_service.packs.generate_pack import PackGenerator
from penstock.rollout_service.packs.pack_loops import TaskSource
from penstock.rollout_service.packs.settlement import PackAnnouncer, Settlement
from penstock.rollout_service.run_images import RunImages
from penstock.rollout_service.settings import RolloutSettings
from penstock.rollout_service.teachers.teacher import Teacher
from penstock.rollout_service.weights.cache_folder import MemoryFolder
from penstock.rollout_service.weights.mirror import Mirror
from penstock.rollout_service.weights.servable_versions import ServableVersions, VersionGate
from penstock.rollout_service.weights.weight_announcements import WeightAnnouncements
from penstock.rollout_service.weights.weight_follower import WeightFollower
from penstock.rollout_service.weights.weight_swap import SwapSemaphore, WeightSwap
from penstock.serving import target_policy

_END_S = 20.0  # for threads and folders, when everything else has ended
_BLOB_DEADLINE_S = 15.0  # then a warning names S3, and the worker keeps waiting


def main() -> int:
    configure("rollout")
    log = structlog.get_logger("rollout")
    problems, code = list[BaseException](), 1
    runner = asyncio.Runner()  # which waits for its threads when it is closed, as the interpreter does
    try:
        files, overrides = run_file.split_arguments(sys.argv[1:])
        settings = run_file.load(RolloutSettings, files=files, overrides=overrides, environ=os.environ).settings
        runner.run(_serve(settings))
        code = 0
    except* PenstockError as failures:
        problems += _flatten(failures)
    finally:
        _end_within(_END_S, code)
    if not code and sys.stderr.isatty():
        again = shlex.join(["penstock", "rollout", *sys.argv[1:]])
        sys.stderr.write(
            f"stopped on request; what it held is finished or queued again. Start it again with: {again}\n"
        )
    for problem in problems:
        log.error("worker stopped by an error", kind=type(problem).__name__, error=str(problem))
    runner.close()
    return code


def _end_within(deadline_s: float, code: int) -> None:
    """End the process with this code then, if a thread still waits for a disk or a server that is slow or does not answer."""

    def end() -> None:
        structlog.get_logger("rollout").warning(
            "weights that were being downloaded or copied are left half written, and are repaired or removed at the next start; where no "
            "link is slow, check the disk of worker.cache_dir and the object store",
            waited_s=deadline_s,
        )
        os._exit(code)

    ending = threading.Timer(deadline_s, end)
    ending.daemon = True
    ending.start()


def _flatten(group: BaseExceptionGroup[PenstockError]) -> Iterator[BaseException]:
    for exception in group.exceptions:
        if isinstance(exception, BaseExceptionGroup):
            yield from _flatten(exception)
        else:
            yield exception


async def _serve(settings: RolloutSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    run_id, worker_id = settings.run.id, settings.worker.id
    structlog.contextvars.bind_contextvars(run_id=run_id, worker_id=worker_id)
    blobs = Blobs(settings.s3, deadline_s=_BLOB_DEADLINE_S, run_id=run_id)
    with (
        recording(os.environ, "rollout", service_id=worker_id, run_id=run_id) as traces,
        Bus.connect(settings.nats, name=f"rollout-{worker_id}") as bus,
        GpuSampler() as gpus,
        contextlib.ExitStack() as stack,
    ):
        await asyncio.to_thread(blobs.check, run_id)
        in_memory = MemoryFolder(settings.cache_dir)
        in_memory.clear_abandoned(keep_own=settings.may_use_memory)
        memory, shared = in_memory if settings.may_use_memory else None, SharedSegments(run_id)
        mirror = Mirror(blobs, settings.cache_dir, run_id, settings.worker.trusted_keys(), memory, shared)
        devices = _shared_devices(settings)
        engine = _engine(settings, devices)
        try:
            await engine.prepare()
            if settings.worker.share_downloads:
                shared.join()
            if settings.worker.peer_port is not None and shared.is_joined:
                from penstock.rollout_service.weights.peers import Peers  # noqa: PLC0415  its server is needed only here

                stack.enter_context(contextlib.closing(Peers(bus, shared, run_id, settings.worker.peer_port)))
            worker = await _wire(settings, bus, blobs, mirror, engine, stop, traces, gpus, devices, shared)
            with heartbeat.serving(
                settings.metrics,
                run_id,
                worker_id,
                worker.heartbeat,
                traces.counts,
                folders=mirror.folders,
                certificates=certificate_ends(settings.nats, settings.s3),
            ):
                gc.freeze()  # not scanning what is imported by now saves a tenth of a pack's CPU time
                await loop.run(worker, stop)
        finally:
            await engine.stop()
            with contextlib.suppress(TimeoutError):  # another worker's start clears what is left
                async with asyncio.timeout(_END_S):
                    await asyncio.to_thread(mirror.close)
            if devices is not None:
                devices.close()


async def _wire(  # noqa: PLR0913, PLR0917  the parts that it joins
    settings: RolloutSettings,
    bus: Bus,
    blobs: Blobs,
    mirror: Mirror,
    engine: Engine,
    stop: asyncio.Event,
    traces: Traces,
    gpus: GpuSampler,
    devices: SharedDevices | None,
    shared: SharedSegments,
) -> loop.Worker:
    ids = {"run_id": settings.run.id, "worker_id": settings.worker.id}
    metrics, activity, gate, servable = WorkerMetrics(), Activity(), VersionGate(), ServableVersions(engine)
    turns = EngineTurns(devices, metrics, deadline_s=settings.placement.turn_deadline_s)
    tasks = await _tasks(settings, bus, engine, stop, lambda: heartbeat.period_s)
    weights = _weights(settings, bus, mirror, engine, servable, gate, metrics, turns)
    settlement = _settlement(settings, bus, metrics, traces)
    images = RunImages(blobs, settings.run.id)
    episodes = FinishedEpisodes(blobs, engine, metrics, run_id=settings.run.id, images=images)
    environments = await _environments(settings, episodes, images)
    packs = PackGenerator(
        engine=engine, environments=environments, weights=weights, servable=servable, gate=gate, blobs=blobs, settlement=settlement,
        activity=activity, episodes=episodes, teacher=Teacher.of(settings.teacher), images=images,
    )  # fmt: skip
    figures = partial(_figures, metrics, tasks, gpus, shared)
    heartbeat = HeartbeatWriter(
        bus=bus, engine=engine, activity=activity, figures=figures, needs_version=lambda: mirror.oldest_needed,
        has_turn=lambda: turns.is_held, **ids,
    )  # fmt: skip
    return loop.Worker(
        engine=engine, registry=await _registry(bus, environments.values()), weights=weights, tasks=tasks, packs=packs,
        announcer=PackAnnouncer(bus=bus, blobs=blobs, activity=activity, metrics=metrics, **ids, traces=traces), settlement=settlement,
        heartbeat=heartbeat, activity=activity, turns=turns, packs_in_flight=settings.worker.packs_in_flight,
        finish_s=settings.worker.finish_s, start_deadline_s=settings.worker.start_deadline_s,
    )  # fmt: skip


def _figures(metrics: WorkerMetrics, tasks: TaskSource, gpus: GpuSampler, shared: SharedSegments) -> dict[str, float]:
    return {**metrics.snapshot(), "packs_held": float(tasks.num_held), **gpus.figures(), **shared.figures()}


async def _tasks(
    settings: RolloutSettings, bus: Bus, engine: Engine, stop: asyncio.Event, period_s: Callable[[], float]
) -> TaskSource:
    inboxes: dict[Split, Inbox[TaskIssued]] = {
        split: await bus.inbox(streams.tasks_consumer(settings.run.id, split), TaskIssued)
        for split in settings.worker.roles
    }
    return TaskSource(inboxes, engine, stop, period_s=period_s)


def _settlement(settings: RolloutSettings, bus: Bus, metrics: WorkerMetrics, traces: Traces) -> Settlement:
    return Settlement(
        bus, metrics, run_id=settings.run.id, worker_id=settings.worker.id, task_attempts=settings.worker.task_attempts,
        retry_delay_s=settings.worker.retry_delay_s, traces=traces,
    )  # fmt: skip


def _weights(
    settings: RolloutSettings, bus: Bus, mirror: Mirror, engine: Engine, servable: ServableVersions, gate: VersionGate,
    metrics: WorkerMetrics, turns: EngineTurns,
) -> WeightFollower:  # fmt: skip
    run_id, worker = settings.run.id, settings.worker
    announcements = WeightAnnouncements(bus, run_id=run_id, worker_id=worker.id)
    swap = WeightSwap(
        engine=engine, servable=servable,
        semaphore=SwapSemaphore(bus, run_id=run_id, worker_id=worker.id, max_share=worker.max_paused_share), announcements=announcements,
        metrics=metrics, check_every=worker.check_weights_every, update_mode=worker.update_mode, turns=turns,
        long_mode=worker.kind.long_mode if worker.kind.long_mode in worker.kind.update_modes else "drain",
    )  # fmt: skip
    return WeightFollower(
        bus=bus, mirror=mirror, engine=engine, servable=servable, gate=gate, announcements=announcements, swap=swap, run_id=run_id,
    )  # fmt: skip


async def _environments(
    settings: RolloutSettings, episodes: FinishedEpisodes, images: RunImages
) -> dict[str, Environment]:
    environments = load_environments(settings.worker.environments, settings.environment.define)
    servers = await target_policy.find_own_servers(settings.nats, settings.s3) if settings.environment.define else ()
    most = settings.worker.max_episodes
    running = asyncio.Semaphore(most) if most else None
    for environment in environments.values():
        if settings.environment.define:
            environment.never_call(servers)
        environment.use_worker(episodes, running)
        environment.use_images(images)
    return environments


async def _registry(bus: Bus, environments: Iterable[Environment]) -> ServerRegistry | None:
    registered = [environment for environment in environments if environment.registered]
    if not registered:
        return None
    registry = registered[0].new_registry(await bus.key_value(streams.environments_bucket().bucket))
    for registrant in registered:
        registrant.use_registry(registry)
    return registry


def _shared_devices(settings: RolloutSettings) -> SharedDevices | None:
    """Claim the GPUs on which this worker's engines and the trainer take turns; raises ConfigError and DeviceTaken."""
    placement = settings.placement
    if not placement.takes_turns:
        return None
    devices = placement.devices or tuple(gpu.uuid for gpu in visible_gpus(os.environ))
    if not devices:
        raise ConfigError(
            'placement.shared = "turns": no GPU is known to this worker; set placement.devices to the UUIDs that `nvidia-smi -L` lists'
        )
    return SharedDevices(devices, placement.lock_folder, role="engine", run_id=settings.run.id).__enter__()


def _engine(settings: RolloutSettings, devices: SharedDevices | None) -> Engine:
    worker = settings.worker
    site = EngineSite(
        urls=worker.engine_urls,
        api_key=worker.engine_api_key(),
        cache_dir=settings.cache_dir,
        request_deadline_s=worker.request_deadline_s,
        start_deadline_s=worker.start_deadline_s,
        environ=os.environ,
        inherited=devices.inherited if devices is not None else (),
    )
    return create_engine(worker.kind, settings.engine_options, site)


if __name__ == "__main__":
    sys.exit(main())
