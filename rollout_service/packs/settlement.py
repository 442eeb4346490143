"""Settle a pack's delivery: announce its groups and acknowledge it, requeue it, or dead-letter it with a reason.

This is the one place with a policy about failures. After a failure of the engine the pack is redelivered, to any
worker, until it has been delivered ``task_attempts`` times. A pack that no further attempt can generate is dead-
lettered at once. The groups of a pack are one Parquet object in S3, announced as one `GroupGenerated`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import KW_ONLY, dataclass

import structlog

from penstock.protocol import blob_keys, subjects, trace_context
from penstock.protocol.errors import BlobCorrupt, BlobDenied, BlobMissing, BusUnreachable, PackError, WireError
from penstock.protocol.facts import DeadLetter, GroupGenerated, RunEvent, TaskIssued, encode
from penstock.protocol.groups import BlobRef, Task
from penstock.protocol.heartbeats import Activity
from penstock.protocol.packs import group_pack
from penstock.protocol.traces.traces import NO_TRACES, Traces, Value
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import oldest
from penstock.rollout_service.errors import EngineError, TaskRefused, WeightsUnverified
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.packs.pack_loops import ReceivedPack
from penstock.rollout_service.retry import retry

log = structlog.get_logger("rollout.settlement")

STAGE = "tasks"
MAX_RETRY_DELAY_S = 30.0
_PUBLISH_S = 15.0


@dataclass(eq=False)
class Settlement:
    bus: Bus
    metrics: WorkerMetrics
    _: KW_ONLY
    run_id: str
    worker_id: str
    task_attempts: int
    retry_delay_s: float
    traces: Traces = NO_TRACES

    @contextlib.asynccontextmanager
    async def settling(self, received: ReceivedPack) -> AsyncIterator[None]:
        delivery = received.delivery
        if delivery.num_delivered > 1:
            self._report_redelivery(received)
        try:
            yield
        except TaskRefused as err:
            await self._dead_letter(received, err.reason, str(err))
        except (BlobDenied, EngineError, PackError) as err:
            await self._requeue_or_dead_letter(received, err)
        except (BlobMissing, BlobCorrupt, WireError) as err:
            await self._dead_letter(received, type(err).__name__, str(err))
        except asyncio.CancelledError:
            await self._end_delivery(delivery.give_back(0.0), received, "requeue")
            raise
        else:
            await self._end_delivery(delivery.ack(), received, "acknowledge")

    def _report_redelivery(self, received: ReceivedPack) -> None:
        """Report in the run's events that a pack was redelivered: its last worker was killed, or requeued it.

        The event is not waited for: losing one costs a line on the live page.
        """
        num_groups = len(received.delivery.fact.tasks)
        what = f"{num_groups} group{'s' if num_groups != 1 else ''}" if num_groups else f"pack {received.pack_id}"
        event = RunEvent(
            run_id=self.run_id,
            source=self.worker_id,
            kind="log",
            at=time.time(),
            data={
                "text": f"{what} redelivered (delivery {received.delivery.num_delivered}), now with {self.worker_id}",
                "pack_id": received.pack_id,
                "num_groups": num_groups,
                "num_delivered": received.delivery.num_delivered,
            },
        )
        log.info("pack redelivered", pack_id=received.pack_id, num_delivered=received.delivery.num_delivered)
        self.bus.publish(
            subjects.events(self.run_id, "log"), event, msg_id=secrets.token_hex(16), deadline_s=_PUBLISH_S
        )

    async def refuse(self, received: ReceivedPack, tasks: Sequence[Task], reason: TaskRefused) -> None:
        """Dead-letter single tasks of a pack; the rest of the pack is generated."""
        detail = str(reason)
        log.error("tasks refused", pack_id=received.pack_id, num_groups=len(tasks), reason=reason.reason, detail=detail)
        letter = DeadLetter(
            run_id=self.run_id,
            stage=STAGE,
            subject=subjects.tasks(self.run_id, received.split),
            reason=reason.reason,
            detail=detail[:2000],
            group_ids=tuple(task.group_id for task in tasks),
            num_delivered=received.delivery.num_delivered,
            payload=encode(TaskIssued(run_id=self.run_id, pack_id=received.pack_id, tasks=tuple(tasks))),
        )
        trace_id = trace_context.trace_id(received.delivery.traceparent)
        msg_id = f"{STAGE}:{received.pack_id}:{tasks[0].group_id}:{reason.reason}:{trace_id}"
        await retry(
            lambda: self.bus.publish(subjects.dead(self.run_id, STAGE), letter, msg_id=msg_id, deadline_s=_PUBLISH_S),
            f"dead-letter tasks of pack {received.pack_id}",
        )
        self.metrics.groups_dead_lettered += len(tasks)
        self._trace(received, tasks, reason.reason, "dead-lettered")

    async def _requeue_or_dead_letter(self, received: ReceivedPack, err: Exception) -> None:
        attempt = received.delivery.num_delivered
        if attempt >= self.task_attempts:
            await self._dead_letter(
                received, type(err).__name__, f"failed in each of {attempt} deliveries, the last time: {err}"
            )
            return
        delay_s = min(self.retry_delay_s * 2 ** (attempt - 1), MAX_RETRY_DELAY_S)
        self._trace(received, received.delivery.fact.tasks, type(err).__name__, "requeued")
        self.metrics.packs_given_back += 1
        self.metrics.packs_distrusted += isinstance(err, WeightsUnverified)
        log.warning("pack requeued", pack_id=received.pack_id, attempt=attempt, delay_s=delay_s, error=str(err))
        await self._end_delivery(received.delivery.give_back(delay_s), received, "requeue")

    async def _dead_letter(self, received: ReceivedPack, reason: str, detail: str) -> None:
        log.error("pack dead-lettered", pack_id=received.pack_id, reason=reason, detail=detail)
        self._trace(received, received.delivery.fact.tasks, reason, "dead-lettered")
        self.metrics.groups_dead_lettered += max(1, len(received.delivery.fact.tasks))
        await self._end_delivery(received.delivery.dead_letter(reason, detail), received, "dead-letter")

    def _trace(self, received: ReceivedPack, tasks: Sequence[Task], error: str, outcome: str) -> None:
        """Record that groups were not generated; of a pack whose tasks are an object that was not read, nothing."""
        for task in tasks if self.traces.is_on else ():
            context = self.traces.group(received.delivery.traceparent, task.group_id)
            attributes = _attributes(received, task.group_id, self.worker_id) | {"outcome": outcome}
            self.traces.record_in_group("generate", context, received.received_at, attributes, error=error)

    async def _end_delivery(self, ending: Awaitable[None], received: ReceivedPack, action: str) -> None:
        """Wait for NATS to confirm the end of a delivery.

        While NATS is unreachable for too long the pack is redelivered, and its duplicates are recognised by their ids.
        """
        try:
            await ending
        except BusUnreachable as err:
            log.warning(
                "NATS unreachable, the pack will be redelivered",
                action=action,
                pack_id=received.pack_id,
                error=str(err),
            )


def _attributes(received: ReceivedPack, group_id: str, worker_id: str) -> dict[str, Value]:
    """Return the attributes of each span of a group."""
    num_delivered = received.delivery.num_delivered
    return {"group_id": group_id, "pack_id": received.pack_id, "worker_id": worker_id, "num_delivered": num_delivered}


@dataclass(eq=False, kw_only=True)
class PackAnnouncer:
    bus: Bus
    blobs: Blobs
    activity: Activity
    metrics: WorkerMetrics
    run_id: str
    worker_id: str
    traces: Traces = NO_TRACES

    async def announce(self, received: ReceivedPack, groups: Sequence[Group]) -> None:
        """Store the groups and announce them; wait while S3 or NATS is unreachable or the stream is full.

        The message id is that of the pack and of the task's trace: a pack that was generated twice, since a worker was
        killed before it acknowledged the task, is announced once.
        """
        if not groups:
            return
        generated_at = time.time()
        with self.activity.working("storing"):
            pack = await self._store(received.pack_id, groups)
            fact = GroupGenerated(
                run_id=self.run_id,
                pack_id=received.pack_id,
                worker_id=self.worker_id,
                pack=pack,
                groups=tuple(group.summary(row_group) for row_group, group in enumerate(groups)),
            )
            subject = subjects.generated(self.run_id, received.split)
            traceparent = trace_context.child(received.delivery.traceparent)
            msg_id = f"g:{received.pack_id}:{trace_context.trace_id(received.delivery.traceparent)}"
            await retry(
                lambda: self.bus.publish(subject, fact, msg_id=msg_id, deadline_s=_PUBLISH_S, traceparent=traceparent),
                f"announce pack {received.pack_id}",
            )
        self._trace(received, fact, generated_at)
        num_tokens = sum(sum(group.completion_tokens) for group in fact.groups)
        self.metrics.packs_announced += 1
        self.metrics.groups_generated += len(groups)
        self.metrics.tokens_generated += num_tokens
        abandoned = [completion for group in groups for completion in group.abandoned]
        self.metrics.completions_abandoned += len(abandoned)
        self.metrics.tokens_abandoned += sum(completion.num_tokens for completion in abandoned)
        log.info(
            "pack announced",
            pack_id=received.pack_id,
            split=received.split,
            num_groups=len(groups),
            num_tokens=num_tokens,
            oldest_policy_version=min(group.oldest_version for group in fact.groups),
            attempt=received.delivery.num_delivered,
        )

    def _trace(self, received: ReceivedPack, fact: GroupGenerated, generated_at: float) -> None:
        for group in fact.groups if self.traces.is_on else ():
            context = self.traces.group(received.delivery.traceparent, group.group_id)
            attributes = _attributes(received, group.group_id, self.worker_id) | {
                "oldest_version": group.oldest_version,
                "newest_version": group.newest_version,
                "completion_tokens": sum(group.completion_tokens),
            }
            self.traces.record_in_group("generate", context, received.received_at, attributes, ended=generated_at)
            self.traces.record_in_group("announce", context, generated_at, attributes)

    async def _store(self, pack_id: str, groups: Sequence[Group]) -> BlobRef:
        runs = [run for group in groups for row in group.trajectories for run in row.version_runs]
        key = blob_keys.group_pack(self.run_id, oldest(runs), pack_id, secrets.token_hex(6))
        data: bytes | None = None

        def store() -> BlobRef:
            nonlocal data
            data = data or group_pack.encode(groups)
            return self.blobs.put(key, data)

        return await retry(lambda: asyncio.to_thread(store), f"store pack {pack_id}")
