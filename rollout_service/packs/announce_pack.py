"""Store a pack's groups as one Parquet object in S3, then announce them as one `GroupGenerated`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

import structlog

from penstock.protocol import blob_keys, subjects, trace_context
from penstock.protocol.facts import BlobRef, GroupGenerated
from penstock.protocol.heartbeats import Activity
from penstock.protocol.packs import group_pack
from penstock.protocol.traces.traces import NO_TRACES, Traces, Value
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import oldest
from penstock.rollout_service.metrics import WorkerMetrics
from penstock.rollout_service.packs.task_source import ReceivedPack
from penstock.rollout_service.retry import retry

log = structlog.get_logger("rollout.announce_pack")

_PUBLISH_S = 15.0


class PackAnnouncer:
    def __init__(
        self,
        *,
        bus: Bus,
        blobs: Blobs,
        activity: Activity,
        metrics: WorkerMetrics,
        run_id: str,
        worker_id: str,
        traces: Traces = NO_TRACES,
    ) -> None:
        self._traces = traces
        self._bus = bus
        self._blobs = blobs
        self._activity = activity
        self._metrics = metrics
        self._run_id = run_id
        self._worker_id = worker_id

    async def announce(self, received: ReceivedPack, groups: Sequence[Group]) -> None:
        """Store the groups and announce them; wait while S3 or NATS is unreachable or the stream is full.

        The message id is that of the pack and of the task's trace: a pack that was generated twice, because a worker was
        killed before it acknowledged the task, is announced once.
        """
        if not groups:
            return
        generated_at = time.time()
        with self._activity.working("storing"):
            pack = await self._store(received.pack_id, groups)
            fact = GroupGenerated(
                run_id=self._run_id,
                pack_id=received.pack_id,
                worker_id=self._worker_id,
                pack=pack,
                groups=tuple(group.summary(row_group) for row_group, group in enumerate(groups)),
            )
            subject = subjects.generated(self._run_id, received.split)
            traceparent = trace_context.child(received.delivery.traceparent)
            msg_id = f"g:{received.pack_id}:{trace_context.trace_id(received.delivery.traceparent)}"
            await retry(
                lambda: self._bus.publish(subject, fact, msg_id=msg_id, deadline_s=_PUBLISH_S, traceparent=traceparent),
                f"announce pack {received.pack_id}",
            )
        self._trace(received, fact, generated_at)
        num_tokens = sum(sum(group.completion_tokens) for group in fact.groups)
        self._metrics.packs_announced += 1
        self._metrics.groups_generated += len(groups)
        self._metrics.tokens_generated += num_tokens
        abandoned = [one for group in groups for one in group.abandoned]
        self._metrics.completions_abandoned += len(abandoned)
        self._metrics.tokens_abandoned += sum(one.num_tokens for one in abandoned)
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
        for group in fact.groups if self._traces.is_on else ():
            context = self._traces.group(received.delivery.traceparent, group.group_id)
            attributes: dict[str, Value] = {
                "group_id": group.group_id,
                "pack_id": fact.pack_id,
                "worker_id": self._worker_id,
                "num_delivered": received.delivery.num_delivered,
                "oldest_version": group.oldest_version,
                "newest_version": group.newest_version,
                "completion_tokens": sum(group.completion_tokens),
            }
            self._traces.record_in_group("generate", context, received.received_at, attributes, ended=generated_at)
            self._traces.record_in_group("announce", context, generated_at, attributes)

    async def _store(self, pack_id: str, groups: Sequence[Group]) -> BlobRef:
        runs = [run for group in groups for row in group.trajectories for run in row.version_runs]
        key = blob_keys.group_pack(self._run_id, oldest(runs), pack_id, secrets.token_hex(6))
        data: bytes | None = None

        def store() -> BlobRef:
            nonlocal data
            data = data or group_pack.encode(groups)
            return self._blobs.put(key, data)

        return await retry(lambda: asyncio.to_thread(store), f"store pack {pack_id}")
