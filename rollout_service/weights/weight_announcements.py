"""What a worker announces to the run about weights, and what it reads of the other workers' engines.

An engine that serves other weights than the verified files is not used: its worker raises an alarm and exits, so that
nothing more is sampled with them. What others announce is only a reason to look: `WeightFollower` then has the engine load the
files again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import structlog

from penstock.protocol import subjects
from penstock.protocol.facts import BlobRef, RunEvent, WeightsApplied, WeightsRefused
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.errors import WeightsUnusable
from penstock.rollout_service.retry import retry
from penstock.rollout_service.weights.engine_votes import Disagreement, EngineVotes

log = structlog.get_logger("rollout.weight_announcements")

_PUBLISH_S = 15.0


class WeightAnnouncements:
    """One worker's facts about weights."""

    def __init__(self, bus: Bus, *, run_id: str, worker_id: str) -> None:
        """Prepare; nothing is read before `start`."""
        self._bus = bus
        self.run_id = run_id
        self.worker_id = worker_id
        self._votes = EngineVotes()
        # (version, layout) -> checksum, of this process alone: not of an earlier engine, nor of another writer under this id
        self._announced: dict[tuple[int, str], str] = {}
        self._disagreement: Disagreement | None = None
        self.on_disagreement: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Subscribe to the checksums that all workers announce, from the start of the stream."""
        loop = asyncio.get_running_loop()

        def on_applied(fact: WeightsApplied) -> None:  # on the bus's thread
            loop.call_soon_threadsafe(self._compare, fact)

        subject = subjects.weights_applied(self.run_id)
        await self._bus.tail(f"{self.run_id}-weights", subject, WeightsApplied, on_applied, from_start=True)

    def take_disagreement(self) -> Disagreement | None:
        """Return the last disagreement with what this process announced, once; None when there was none since."""
        found, self._disagreement = self._disagreement, None
        return found

    async def raise_alarm(self, text: str) -> None:
        """Publish an alarm."""
        event = RunEvent(run_id=self.run_id, source=self.worker_id, kind="alarm", at=time.time(), data={"text": text})
        await retry(
            lambda: self._bus.publish(
                subjects.events(self.run_id, "alarm"), event, msg_id=secrets.token_hex(16), deadline_s=_PUBLISH_S
            ),
            "publish the alarm",
        )

    async def announce_applied(self, fact: WeightsApplied, *, is_verified: bool = False) -> None:
        """Publish that the engine serves a version; ``is_verified``: its checksum was compared with the manifest."""
        if not is_verified:
            self._announced[fact.version, fact.layout] = fact.checksum
        subject, msg_id = subjects.weights_applied(self.run_id), f"a:{fact.worker_id}:{secrets.token_hex(8)}"
        await retry(
            lambda: self._bus.publish(subject, fact, msg_id=msg_id, deadline_s=_PUBLISH_S),
            f"announce that version {fact.version} is applied",
        )

    async def announce_refused(
        self, version: PolicyVersion, manifest: BlobRef, err: WeightsUnusable, *, serving: PolicyVersion | None
    ) -> None:
        """Publish that a version cannot be used on this host; the trainer answers with a full snapshot."""
        fact = WeightsRefused(
            run_id=self.run_id,
            worker_id=self.worker_id,
            version=version,
            manifest=manifest,
            serving=serving,
            reason=str(err),
        )
        subject, msg_id = subjects.weights_refused(self.run_id), secrets.token_hex(16)
        await retry(
            lambda: self._bus.publish(subject, fact, msg_id=msg_id, deadline_s=_PUBLISH_S),
            f"announce that version {version} is refused",
        )

    def _compare(self, fact: WeightsApplied) -> None:
        found = self._votes.add(fact)
        if found is None:
            return
        log.error("engines disagree", policy_version=found.version, minority=found.minority, expected=found.expected)
        announced = self._announced.get((found.version, found.layout))
        if announced is not None and (announced != found.expected or found.is_tie):
            self._disagreement = found
            self.on_disagreement()
