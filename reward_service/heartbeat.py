"""The heartbeat of this replica each second, and its record of the rewards it offers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

import structlog

from penstock.protocol import heartbeats, rewards_offered
from penstock.protocol.errors import BusUnreachable, MissingStream
from penstock.protocol.facts import Heartbeat, encode
from penstock.protocol.heartbeats import Activity, cpu_seconds, thread_cpu_seconds
from penstock.protocol.rewards_offered import RewardsOffered
from penstock.protocol.streams import ConsumerSpec, heartbeat_key
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.reward_service.endpoints.endpoint_registry import EndpointRegistry
from penstock.reward_service.metrics import ServiceMetrics
from penstock.reward_service.registry.reward_registry import RewardRegistry

log = structlog.get_logger("reward_service.heartbeat")

ROLE = "reward"


@dataclass(slots=True)
class HeartbeatWriter:
    bus: Bus
    live: KeyValue
    offers: KeyValue
    consumer: ConsumerSpec
    registry: EndpointRegistry
    reward_registry: RewardRegistry
    metrics: ServiceMetrics
    activity: Activity
    replica: str
    metrics_url: str | None = None
    newest: Heartbeat | None = None

    async def run(self, done: asyncio.Event) -> None:
        """Write until ``done``, then delete this replica's records; while NATS is unreachable, skip."""
        with contextlib.suppress(BusUnreachable):
            for key in rewards_offered.expired_keys(await self.offers.entries(aged=True)):
                await self.offers.delete(key)
        beat = 0
        while not done.is_set():
            try:
                await self._beat()
                if beat % round(rewards_offered.PERIOD_S / heartbeats.PERIOD_S) == 0:
                    await self.offer()
            except BusUnreachable as err:
                log.warning("NATS unreachable: heartbeat skipped", error=str(err))
            beat += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), heartbeats.PERIOD_S)
        with contextlib.suppress(BusUnreachable):
            await self.offers.delete(rewards_offered.key(self.replica))
            await self.live.delete(heartbeat_key(ROLE, self.replica))

    async def _beat(self) -> None:
        await self.registry.refresh()
        self.metrics.queue = (await self.bus.consumer_state(self.consumer)).num_pending
        busy_s, idle_s = self.activity.totals()
        beat = Heartbeat(
            role=ROLE,
            service_id=self.replica,
            at=time.time(),
            state=f"waiting for {awaited}" if (awaited := self.bus.waits_for) else self.activity.state,
            busy_s=busy_s,
            idle_s=idle_s,
            cpu_s=cpu_seconds(),
            figures={**self.metrics.as_dict(), **thread_cpu_seconds()},  # the stored field has the older name
            period_s=heartbeats.PERIOD_S,
            metrics_url=self.metrics_url,
        )
        self.newest = beat
        expiry_s = heartbeats.expires_after_s(heartbeats.PERIOD_S)
        try:
            await self.live.put(heartbeat_key(ROLE, self.replica), encode(beat), ttl_s=expiry_s)
        except MissingStream as err:  # the bucket is missing while it is made again
            log.warning("no bucket of heartbeats: heartbeat skipped", error=str(err))

    async def offer(self) -> None:
        offer = RewardsOffered(
            run_id=self.consumer.run_id, replica=self.replica, at=time.time(), names=self.reward_registry.names(),
            by_source=self.reward_registry.by_source(),
            definitions={name: definition.digest for name, definition in self.reward_registry.definitions.items()},
            success=self.reward_registry.success(),
        )  # fmt: skip
        await self.offers.put(rewards_offered.key(self.replica), encode(offer))
