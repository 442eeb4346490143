"""One replica of the reward service, built from its settings and run until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from penstock.protocol import streams
from penstock.protocol.facts import GroupGenerated
from penstock.protocol.files import atomic_write
from penstock.protocol.heartbeats import Activity
from penstock.protocol.metrics.exporter import certificate_ends
from penstock.protocol.metrics.server import metrics_url
from penstock.protocol.traces.traces import Traces
from penstock.protocol.transport import tls
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.reward_service import loop
from penstock.reward_service.announce import Announcer
from penstock.reward_service.api import app
from penstock.reward_service.endpoints.endpoint_queue import EndpointClient, check_health
from penstock.reward_service.endpoints.endpoint_registry import EndpointRegistry, SecretStore
from penstock.reward_service.graders.grader_pool import GraderPool
from penstock.reward_service.heartbeat import HeartbeatWriter
from penstock.reward_service.loop import WorkSlots
from penstock.reward_service.metrics import ServiceMetrics
from penstock.reward_service.pack_progress import ProgressStore
from penstock.reward_service.pack_scoring import RetryPolicy, ScoringContext
from penstock.reward_service.program_tests.grade import SandboxPool
from penstock.reward_service.registry import built_in, definitions
from penstock.reward_service.registry.reward_registry import RewardRegistry
from penstock.reward_service.registry.user_rewards import UserRewards
from penstock.reward_service.rewards import code
from penstock.reward_service.settings import RewardServiceSection, RewardSettings
from penstock.sandbox import canary
from penstock.sandbox.zygote_command import Launch
from penstock.sandbox.zygote_process import Limits
from penstock.serving import target_policy, web_server
from penstock.serving.target_policy import TargetPolicy

log = structlog.get_logger("reward_service")

_S3_DEADLINE_S = 20.0  # then the pack is requeued; a thread that waits longer would delay a stop


async def run(settings: RewardSettings, traces: Traces) -> None:
    section, run_id = settings.reward_service, settings.run.id
    definitions.check_settings(settings.reward)  # before any connection is opened
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as connections:
        bus = connections.enter_context(Bus.connect(settings.nats, name=f"reward-{section.id}"))
        blobs = Blobs(settings.s3, deadline_s=_S3_DEADLINE_S, run_id=run_id)
        await asyncio.to_thread(blobs.check, run_id)
        consumer = streams.generated_consumer(run_id)
        secrets = SecretStore(await bus.key_value(streams.secrets_bucket().bucket))
        progress = ProgressStore(await bus.key_value(streams.scoring_bucket(run_id).bucket))
        offers = await bus.key_value(streams.registry_bucket().bucket)
        live = await bus.key_value(streams.live_bucket(run_id).bucket)
        inbox = await bus.inbox(consumer, GroupGenerated)

        bound = connections.enter_context(tls.listen(section.host, section.port, key="reward_service.port"))
        own_servers = [
            *await target_policy.find_own_servers(settings.nats, settings.s3),
            await target_policy.find_own_api(bound),
        ]
        policy = TargetPolicy(section.allowed_targets, own_servers, key="reward_service.allowed_targets")
        client = await connections.enter_async_context(
            EndpointClient(policy, max_response_bytes=section.max_response_bytes, secrets=secrets)
        )
        registry = EndpointRegistry(offers, secrets, client.follow)
        await registry.refresh()
        grader = GraderPool(section.math_workers, cpu_s=section.math_timeout_s)
        connections.push_async_callback(grader.close)
        patterns = GraderPool(section.pattern_workers, cpu_s=section.pattern_timeout_s, kind="pattern")
        connections.push_async_callback(patterns.close)
        sandbox = await asyncio.to_thread(canary.probe, section.code_sandbox)
        log.info("sandbox", kind=sandbox.kind, result=str(sandbox))
        programs = _sandboxes(sandbox, section, connections)
        notes = {code.NAME: str(sandbox)}
        user = UserRewards(settings.reward, num_workers=section.user_workers, timeout_s=section.user_timeout_s)
        connections.push_async_callback(user.close)
        for name, digest in (await user.check()).items():
            log.info("user reward", name=name, digest=digest)
        graders = built_in.Graders(grader, patterns, programs, all_or_nothing=section.code_score == "all")
        reward_registry = RewardRegistry(
            built_in.scorers(graders), registry, client, notes=notes, define=settings.reward.define,
            own=definitions.own_scorers(settings.reward.define, graders, user), user=user.by_name,
        )  # fmt: skip
        metrics, activity = ServiceMetrics(), Activity()
        heartbeat = HeartbeatWriter(
            bus=bus, live=live, offers=offers, consumer=consumer, registry=registry, reward_registry=reward_registry,
            metrics=metrics, activity=activity, replica=section.id,
        )  # fmt: skip
        context = ScoringContext(
            blobs=blobs, reward_registry=reward_registry, announcer=Announcer(bus, run_id=run_id, source=section.id),
            retry=RetryPolicy(section.endpoint_attempts, section.retry_delay_s, section.patience_s),
            progress=progress, metrics=metrics, activity=activity, traces=traces,
        )  # fmt: skip
        api = app.build(
            app.ApiContext(
                registry=registry,
                reward_registry=reward_registry,
                client=client,
                metrics=metrics,
                activity=activity,
                replica=section.id,
                run_id=run_id,
                nats_down_s=lambda: bus.down_s,
                num_held=lambda: inbox.num_held,
                heartbeat=lambda: heartbeat.newest,
                spans=traces.counts,
                certificates=certificate_ends(settings.nats, settings.s3),
            ),
            access=section.access(),
            hosts=(section.host,),
            max_request_bytes=section.max_request_bytes,
            max_requests_bytes=section.max_requests_bytes,
        )
        heartbeat.metrics_url = metrics_url(section.host, _report_port(bound, section.port_file, section.host))

        activity.restart()
        activity.state = "waiting"
        done = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(web_server.serve(api, bound, done))
            tasks.create_task(heartbeat.run(done))
            tasks.create_task(check_health(registry, client, done))
            slots = WorkSlots(section.concurrency, section.max_packs)
            await loop.run(inbox, context, slots=slots, stop=stop, drain_s=section.drain_s)
            done.set()
    log.info("stopped", replica=section.id)


def _sandboxes(
    sandbox: canary.Probed, section: RewardServiceSection, connections: AsyncExitStack
) -> SandboxPool | None:
    if sandbox.kind is None:
        return None
    limits = Limits(cpu_s=section.code_cpu_s, memory_bytes=section.code_memory_mb * 1024**2)
    pool = SandboxPool(
        Launch(sandbox.kind), section.code_workers, limits, stop_early=section.code_score == "all",
        group_cpu_s=section.code_group_cpu_s,
    )  # fmt: skip
    connections.push_async_callback(pool.close)
    return pool


def _report_port(bound: socket.socket, port_file: Path | None, host: str) -> int:
    port = bound.getsockname()[1]
    log.info("listening", url=f"{tls.scheme(host)}://{host}:{port}")
    if port_file is not None:
        port_file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(port_file, f"{port}\n")
    return port
