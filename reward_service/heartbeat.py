"""What this replica says about itself while it lives: a heartbeat each second, and the rewards it offers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

import structlog

from penstock.protocol import rewards_offered
from penstock.protocol.activity import Activity, cpu_seconds
from penstock.protocol.errors import BusUnreachable
from penstock.protocol.facts import Heartbeat, encode
from penstock.protocol.rewards_offered import RewardsOffered
from penstock.protocol.streams import HEARTBEAT_PERIOD_S, ConsumerSpec, heartbeat_key
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.key_value import KeyValue
from penstock.reward_service.endpoints.endpoint_registry import Registry
from penstock.reward_service.metrics import Figures
from penstock.reward_service.registry.reward_registry import RewardRegistry

log = structlog.get_logger("reward_service.vital_signs")

ROLE = "reward"


@dataclass(frozen=True, slots=True)
class HeartbeatWriter:
    """Everything a heartbeat is made of, and the two buckets it goes to."""

    bus: Bus
    live: KeyValue
    offers: KeyValue
    consumer: ConsumerSpec
    registry: Registry
    reward_registry: RewardRegistry
    figures: Figures
    activity: Activity
    replica: str

    async def run(self, done: asyncio.Event) -> None:
        """Beat until ``done``, then take this replica's records away; NATS being away only delays a beat."""
        await self._sweep()
        beat = 0
        while not done.is_set():
            try:
                await self._beat()
                if beat % round(rewards_offered.PERIOD_S / HEARTBEAT_PERIOD_S) == 0:
                    await self.offer()
            except BusUnreachable as err:
                log.warning("no heartbeat", error=str(err))
            beat += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), HEARTBEAT_PERIOD_S)
        with contextlib.suppress(BusUnreachable):
            await self.offers.delete(rewards_offered.key(self.replica))
            await self.live.delete(heartbeat_key(ROLE, self.replica))

    async def _sweep(self) -> None:
        """Delete the records of replicas that were killed long ago."""
        with contextlib.suppress(BusUnreachable):
            for key in rewards_offered.expired_keys(await self.offers.entries(), now=time.time()):
                await self.offers.delete(key)

    async def _beat(self) -> None:
        await self.registry.refresh()
        self.figures.queue = (await self.bus.consumer_state(self.consumer)).num_pending
        busy_s, idle_s = self.activity.totals()
        beat = Heartbeat(
            role=ROLE,
            service_id=self.replica,
            at=time.time(),
            state=f"waiting for {whom}" if (whom := self.bus.waits_for) else self.activity.state,
            busy_s=busy_s,
            idle_s=idle_s,
            cpu_s=cpu_seconds(),
            figures=self.figures.as_dict(),
        )
        await self.live.put(heartbeat_key(ROLE, self.replica), encode(beat))

    async def offer(self) -> None:
        """Renew the record from which the trainer learns which rewards this run can ask for."""
        offer = RewardsOffered(
            run_id=self.consumer.run_id,
            replica=self.replica,
            at=time.time(),
            names=self.reward_registry.names(),
            by_source=self.reward_registry.by_source(),
            definitions={name: one.digest for name, one in self.reward_registry.definitions.items()},
        )
        await self.offers.put(rewards_offered.key(self.replica), encode(offer))
