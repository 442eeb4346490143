"""Groups → one Parquet object in S3 → one `GroupGenerated`, in that order."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

import structlog

from penstock.protocol import blob_keys, group_pack, subjects, trace_context
from penstock.protocol.activity import Activity
from penstock.protocol.facts import BlobRef, GroupGenerated
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import oldest
from penstock.rollout_service.metrics import Figures
from penstock.rollout_service.packs.task_source import Order
from penstock.rollout_service.retry import outlast

log = structlog.get_logger("rollout.pack")

_PUBLISH_S = 15.0


class PackAnnouncer:
    """Stores and announces packs."""

    def __init__(
        self, *, bus: Bus, blobs: Blobs, activity: Activity, figures: Figures, run_id: str, worker_id: str
    ) -> None:
        """Hold the two doors."""
        self._bus = bus
        self._blobs = blobs
        self._activity = activity
        self._figures = figures
        self._run_id = run_id
        self._worker_id = worker_id

    async def announce(self, order: Order, groups: Sequence[Group]) -> None:
        """Store the groups and announce them; waits while S3 or NATS is away or the stream is full.

        The message id is the pack's: a pack that was generated twice, because a worker died before
        it could acknowledge, is announced once.
        """
        if not groups:
            return
        with self._activity.working("storing"):
            pack = await self._store(order.pack_id, groups)
            fact = GroupGenerated(
                run_id=self._run_id,
                pack_id=order.pack_id,
                worker_id=self._worker_id,
                pack=pack,
                groups=tuple(group.summary(row_group) for row_group, group in enumerate(groups)),
            )
            subject = subjects.generated(self._run_id, order.split)
            traceparent = trace_context.child(order.delivery.traceparent)
            await outlast(
                lambda: self._bus.publish(
                    subject, fact, msg_id=f"g:{order.pack_id}", deadline_s=_PUBLISH_S, traceparent=traceparent
                ),
                f"NATS to announce {order.pack_id}",
            )
        num_tokens = sum(sum(group.completion_tokens) for group in fact.groups)
        self._figures.packs_announced += 1
        self._figures.groups_generated += len(groups)
        self._figures.tokens_generated += num_tokens
        log.info(
            "pack announced",
            pack_id=order.pack_id,
            split=order.split,
            num_groups=len(groups),
            num_tokens=num_tokens,
            oldest_policy_version=min(group.oldest_version for group in fact.groups),
            attempt=order.delivery.num_delivered,
        )

    async def _store(self, pack_id: str, groups: Sequence[Group]) -> BlobRef:
        runs = [run for group in groups for row in group.trajectories for run in row.version_runs]
        key = blob_keys.group_pack(self._run_id, oldest(runs), pack_id, secrets.token_hex(6))
        data: bytes | None = None

        def store() -> BlobRef:
            nonlocal data
            data = data or group_pack.encode(groups)
            return self._blobs.put(key, data)

        return await outlast(lambda: asyncio.to_thread(store), f"S3 to store {pack_id}")
