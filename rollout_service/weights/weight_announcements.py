"""Versions that the trainer has published, as far as this worker knows, and what the workers announce about them.

A version is published when the head names it or a newer one: the trainer that holds the run moves the head first and announces then. An
announcement beyond the head waits for it, and none replaces a manifest that the head named.

Every worker reads the same facts from the weights stream in the same order, so all see the same disagreement of checksums without further
messages. Any login of a worker can publish under any worker's id: a disagreement is a reason to have the engine load the verified files again
(`weight_follower.py`), and never proves that an engine is wrong. An engine that serves other weights than the verified files is not used:
its worker raises an alarm and exits.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from penstock.protocol import subjects
from penstock.protocol.facts import Fact, RunEvent, WeightsApplied, WeightsRefused
from penstock.protocol.groups import BlobRef
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.rollout_service.errors import WeightsUnusable
from penstock.rollout_service.retry import retry

MAX_VERSIONS = 256  # how far back an evaluation may pin
_MAX_VERSIONS = 64  # a version is compared while workers apply it; older ones are forgotten
_MAX_WORKERS = 2_000  # that are compared for one version: each report compares all of them
_MAX_VOTES = 20_000  # of all versions
_MAX_CHARS = 256  # of a checksum or a layout; what is longer is none, and would be kept for each worker
log = structlog.get_logger("rollout.weight_announcements")
_PUBLISH_S = 15.0


class PublishedVersions:
    """Versions and their manifests, in the order they were published. For one event loop."""

    def __init__(self) -> None:
        self._manifests: dict[PolicyVersion, BlobRef] = {}
        self._named: set[PolicyVersion] = set()  # those of them whose manifest the head named
        self._announced: dict[PolicyVersion, BlobRef] = {}  # beyond the head
        self._head: PolicyVersion | None = None
        self._refused: dict[PolicyVersion, BlobRef] = {}
        self._refusal = asyncio.Event()  # replaced at every refusal

    def __contains__(self, version: object) -> bool:
        return version in self._manifests

    def __len__(self) -> int:
        return len(self._manifests)

    def manifest(self, version: PolicyVersion) -> BlobRef:
        return self._manifests[version]

    def add(self, version: PolicyVersion, manifest: BlobRef) -> bool:
        """Add the version that the head names; returns False when it was known with this manifest."""
        if is_newer(version, self._head):
            self._head = version
        is_new = self._add(version, manifest)
        self._named.add(version)
        for announced in [candidate for candidate in self._announced if not is_newer(candidate, self._head)]:
            self.announce(announced, self._announced.pop(announced))
        return is_new

    def announce(self, version: PolicyVersion, manifest: BlobRef) -> bool:
        """Take an announcement; returns True when the head should be read, because it is beyond what the head named."""
        if self._head is None or is_newer(version, self._head):
            self._announced[version] = manifest
            if len(self._announced) > MAX_VERSIONS:
                del self._announced[next(iter(self._announced))]
            return True
        if version not in self._named:
            self._add(version, manifest)
        return False

    def add_announced(self) -> None:
        """Add what was announced beyond the head, where the head cannot be read."""
        for version, manifest in self._announced.items():
            self._add(version, manifest)
        self._announced.clear()

    def _add(self, version: PolicyVersion, manifest: BlobRef) -> bool:
        if self._manifests.get(version) == manifest:
            return False
        self._manifests[version] = manifest
        while len(self._manifests) > MAX_VERSIONS:
            oldest = next(iter(self._manifests))
            del self._manifests[oldest]
            self._named.discard(oldest)
        return True

    def newest(self) -> PolicyVersion | None:
        """Return the newest version that was not refused; None when there is none.

        A refused version that is published again with another manifest counts.
        """
        newest = None
        for version, manifest in self._manifests.items():
            if self._refused.get(version) != manifest and is_newer(version, newest):
                newest = version
        return newest

    def refuse(self, version: PolicyVersion, manifest: BlobRef) -> None:
        self._refused[version] = manifest
        self._refusal.set()
        self._refusal = asyncio.Event()

    async def wait_until_refused(self, version: PolicyVersion) -> None:
        while version not in self._refused:
            await self._refusal.wait()


@dataclass(frozen=True, slots=True)
class Disagreement:
    version: PolicyVersion
    layout: str  # of their checksums
    minority: tuple[str, ...]  # ids of the workers whose engine differs
    expected: str  # the checksum of the majority
    is_tie: bool = False  # as many have another checksum: either may be wrong

    def __str__(self) -> str:
        if len(self.minority) == 1:
            who = f"the engine of worker {self.minority[0]} serves"
        else:
            who = f"the engines of workers {', '.join(self.minority)} serve"
        return f"{who} other weights than the others as version {self.version}"


class EngineVotes:
    def __init__(self) -> None:
        self._votes: dict[tuple[int, str], dict[str, str]] = {}  # (version, layout) -> worker -> checksum

    def add(self, fact: WeightsApplied) -> Disagreement | None:
        """Add one engine's checksum; returns the disagreement about its version and layout, if there is one.

        The less frequent checksums are the minority; of equally frequent ones, those that were reported later.
        """
        if max(len(fact.checksum), len(fact.layout)) > _MAX_CHARS:
            return None
        key = (fact.version, fact.layout)
        votes = self._votes.setdefault(key, {})
        if votes.pop(fact.worker_id, None) is None and len(votes) >= _MAX_WORKERS:
            return None
        # A worker that applies a version again replaces its vote, and votes last.
        votes[fact.worker_id] = fact.checksum
        while len(self._votes) > _MAX_VERSIONS or (
            len(self._votes) > 1 and sum(map(len, self._votes.values())) > _MAX_VOTES
        ):
            del self._votes[next(iter(self._votes))]
        counts = Counter(votes.values())
        if len(counts) == 1:
            return None
        (expected, most), (_, second) = counts.most_common(2)  # of equal counts, the one that was reported first
        minority = tuple(worker for worker, checksum in votes.items() if checksum != expected)
        return Disagreement(PolicyVersion(fact.version), fact.layout, minority, expected, most == second)


class WeightAnnouncements:
    def __init__(self, bus: Bus, *, run_id: str, worker_id: str) -> None:
        self._bus = bus
        self.run_id = run_id
        self.worker_id = worker_id
        self._votes = EngineVotes()
        # (version, layout) -> checksum, of this process alone: not of an earlier engine, nor of another writer under this id
        self._announced: dict[tuple[int, str], str] = {}
        self._disagreement: Disagreement | None = None
        self.on_disagreement: Callable[[], None] = lambda: None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def on_applied(fact: WeightsApplied) -> None:  # on the bus's thread
            loop.call_soon_threadsafe(self._compare, fact)

        subject = subjects.weights_applied(self.run_id)
        await self._bus.tail(f"{self.run_id}-weights", subject, WeightsApplied, on_applied, from_start=True)

    def take_disagreement(self) -> Disagreement | None:
        """Return the last disagreement with what this process announced, once; None when there was none since."""
        disagreement, self._disagreement = self._disagreement, None
        return disagreement

    async def raise_alarm(self, text: str) -> None:
        event = RunEvent(run_id=self.run_id, source=self.worker_id, kind="alarm", at=time.time(), data={"text": text})
        await self._publish(subjects.events(self.run_id, "alarm"), event, "publish the alarm")

    async def _publish(self, subject: str, fact: Fact, what: str) -> None:
        msg_id = secrets.token_hex(16)
        await retry(lambda: self._bus.publish(subject, fact, msg_id=msg_id, deadline_s=_PUBLISH_S), what)

    async def announce_applied(self, fact: WeightsApplied, *, is_verified: bool = False) -> None:
        if not is_verified:
            self._announced[fact.version, fact.layout] = fact.checksum
        await self._publish(
            subjects.weights_applied(self.run_id), fact, f"announce that version {fact.version} is applied"
        )

    async def announce_refused(
        self, version: PolicyVersion, manifest: BlobRef, err: WeightsUnusable, *, serving: PolicyVersion | None
    ) -> None:
        ids = {"run_id": self.run_id, "worker_id": self.worker_id}
        fact = WeightsRefused(**ids, version=version, manifest=manifest, serving=serving, reason=str(err))
        await self._publish(subjects.weights_refused(self.run_id), fact, f"announce that version {version} is refused")

    def _compare(self, fact: WeightsApplied) -> None:
        disagreement = self._votes.add(fact)
        if disagreement is None:
            return
        log.error("engines disagree", problem=str(disagreement), expected=disagreement.expected)
        announced = self._announced.get((disagreement.version, disagreement.layout))
        if announced is not None and (announced != disagreement.expected or disagreement.is_tie):
            self._disagreement = disagreement
            self.on_disagreement()
