"""What a worker tells the run about weights, and what it hears of the other workers' engines.

An engine that serves other weights than the others, as the same version, is not believed: its worker
raises an alarm and ends, so that nothing more is sampled with them. Its mirror was verified, so a
fresh start from it is the cure.
"""

from __future__ import annotations

import asyncio
import secrets
import time

import structlog

from penstock.protocol import subjects
from penstock.protocol.facts import BlobRef, RunEvent, WeightsApplied, WeightsRefused
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.errors import EngineDisagrees, WeightsUnusable
from penstock.rollout_service.retry import outlast
from penstock.rollout_service.weights.engine_votes import EngineVotes

log = structlog.get_logger("rollout.weights")

_PUBLISH_S = 15.0


class WeightAnnouncements:
    """One worker's facts about weights."""

    def __init__(self, bus: Bus, *, run_id: str, worker_id: str) -> None:
        """Nothing is read before `start`."""
        self._bus = bus
        self.run_id = run_id
        self.worker_id = worker_id
        self._votes = EngineVotes()
        self._said: dict[int, str] = {}  # version -> checksum, in this life: an earlier engine's word is not ours
        self._odd: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Listen to what all workers said of their engines, and go on listening."""
        loop = asyncio.get_running_loop()

        def heard(fact: WeightsApplied) -> None:  # on the bus's thread
            loop.call_soon_threadsafe(self._count, fact)

        subject = subjects.weights_applied(self.run_id)
        await self._bus.tail(f"{self.run_id}-weights", subject, WeightsApplied, heard, from_start=True)

    async def watch(self) -> None:
        """Wait for as long as this worker's engine agrees with the others; raises EngineDisagrees."""
        text = await asyncio.shield(self._odd)
        event = RunEvent(run_id=self.run_id, source=self.worker_id, kind="alarm", at=time.time(), data={"text": text})
        await outlast(
            lambda: self._bus.publish(
                subjects.events(self.run_id, "alarm"), event, msg_id=secrets.token_hex(16), deadline_s=_PUBLISH_S
            ),
            "NATS to raise an alarm",
        )
        raise EngineDisagrees(f"{text}; this worker ends, start it again with a fresh engine")

    async def applied(self, fact: WeightsApplied) -> None:
        """Say that the engine serves a version."""
        self._said[fact.version] = fact.checksum
        subject, msg_id = subjects.weights_applied(self.run_id), f"a:{fact.worker_id}:{secrets.token_hex(8)}"
        await outlast(
            lambda: self._bus.publish(subject, fact, msg_id=msg_id, deadline_s=_PUBLISH_S),
            f"NATS to say that version {fact.version} is applied",
        )

    async def refused(
        self, version: PolicyVersion, manifest: BlobRef, err: WeightsUnusable, *, serving: PolicyVersion | None
    ) -> None:
        """Say that a version cannot be used on this host; the trainer answers with an anchor."""
        fact = WeightsRefused(
            run_id=self.run_id,
            worker_id=self.worker_id,
            version=version,
            manifest=manifest,
            serving=serving,
            reason=str(err),
        )
        subject, msg_id = subjects.weights_refused(self.run_id), secrets.token_hex(16)
        await outlast(
            lambda: self._bus.publish(subject, fact, msg_id=msg_id, deadline_s=_PUBLISH_S),
            f"NATS to say that version {version} is refused",
        )

    def _count(self, fact: WeightsApplied) -> None:
        found = self._votes.add(fact)
        if found is None:
            return
        log.error("engines disagree", policy_version=found.version, odd=found.odd, expected=found.expected)
        said = self._said.get(found.version, found.expected)
        if self.worker_id in found.odd and said != found.expected and not self._odd.done():
            self._odd.set_result(str(found))
