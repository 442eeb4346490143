"""How a pack ends: acknowledged, given back to come again, or among the dead letters with its reason.

This is the one place with a policy about failures. The engine's failures are nobody's fault but the
engine's: the pack comes again, to this worker or another, until it has been delivered
``task_attempts`` times. What no attempt can ever mend goes to the dead letters at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Sequence

import structlog

from penstock.protocol import subjects
from penstock.protocol.errors import BlobCorrupt, BlobMissing, BusUnreachable, PackError, WireError
from penstock.protocol.facts import DeadLetter, RunEvent, Task, TaskIssued, encode
from penstock.protocol.transport.bus import Bus
from penstock.rollout_service.errors import EngineDistrusted, EngineError, TaskRefused
from penstock.rollout_service.metrics import Figures
from penstock.rollout_service.packs.task_source import Order
from penstock.rollout_service.retry import outlast

log = structlog.get_logger("rollout.pack")

STAGE = "tasks"
MAX_RETRY_DELAY_S = 30.0
_PUBLISH_S = 15.0


class Settlement:
    """Ends deliveries."""

    def __init__(
        self, bus: Bus, figures: Figures, *, run_id: str, worker_id: str, task_attempts: int, retry_delay_s: float
    ) -> None:
        """``task_attempts`` deliveries, the first included; the delay doubles with each."""
        self._bus = bus
        self._figures = figures
        self._run_id = run_id
        self._worker_id = worker_id
        self._task_attempts = task_attempts
        self._retry_delay_s = retry_delay_s

    @contextlib.asynccontextmanager
    async def of(self, order: Order) -> AsyncIterator[None]:
        """Settle the pack according to how the block ends."""
        delivery = order.delivery
        if delivery.num_delivered > 1:
            self._note_return(order)
        try:
            yield
        except TaskRefused as err:
            await self._bury(order, err.reason, str(err))
        except (BlobMissing, BlobCorrupt, WireError) as err:
            await self._bury(order, type(err).__name__, str(err))
        except (EngineError, PackError) as err:
            await self._retry_or_bury(order, err)
        except asyncio.CancelledError:
            await self._tell(delivery.give_back(0.0), order, "give back")
            raise
        else:
            await self._tell(delivery.ack(), order, "acknowledge")

    def _note_return(self, order: Order) -> None:
        """Say in the run's events that a pack came again: its last holder died, or gave it back.

        Nobody waits for it: an event that is lost costs a line in a panel.
        """
        num_groups = len(order.delivery.fact.tasks)
        what = f"{num_groups} group{'s' if num_groups != 1 else ''}" if num_groups else f"pack {order.pack_id}"
        event = RunEvent(
            run_id=self._run_id,
            source=self._worker_id,
            kind="log",
            at=time.time(),
            data={
                "text": f"{what} came again (delivery {order.delivery.num_delivered}), now with {self._worker_id}",
                "pack_id": order.pack_id,
                "num_groups": num_groups,
                "num_delivered": order.delivery.num_delivered,
            },
        )
        log.info("pack came again", pack_id=order.pack_id, num_delivered=order.delivery.num_delivered)
        self._bus.publish(
            subjects.events(self._run_id, "log"), event, msg_id=secrets.token_hex(16), deadline_s=_PUBLISH_S
        )

    async def refuse(self, order: Order, tasks: Sequence[Task], reason: TaskRefused) -> None:
        """Write single tasks of a pack to the dead letters; the rest of the pack goes on."""
        detail = str(reason)
        log.error("tasks refused", pack_id=order.pack_id, num_groups=len(tasks), reason=reason.reason, detail=detail)
        letter = DeadLetter(
            run_id=self._run_id,
            stage=STAGE,
            subject=subjects.tasks(self._run_id, order.split),
            reason=reason.reason,
            detail=detail[:2000],
            group_ids=tuple(task.group_id for task in tasks),
            num_delivered=order.delivery.num_delivered,
            payload=encode(TaskIssued(run_id=self._run_id, pack_id=order.pack_id, tasks=tuple(tasks))),
        )
        await outlast(
            lambda: self._bus.publish(
                subjects.dead(self._run_id, STAGE),
                letter,
                msg_id=f"{STAGE}:{order.pack_id}:{tasks[0].group_id}:{reason.reason}",
                deadline_s=_PUBLISH_S,
            ),
            "NATS to take a dead letter",
        )
        self._figures.groups_dead_lettered += len(tasks)

    async def _retry_or_bury(self, order: Order, err: Exception) -> None:
        attempt = order.delivery.num_delivered
        if attempt >= self._task_attempts:
            await self._bury(order, type(err).__name__, f"failed in each of {attempt} deliveries, the last time: {err}")
            return
        delay_s = min(self._retry_delay_s * 2 ** (attempt - 1), MAX_RETRY_DELAY_S)
        self._figures.packs_given_back += 1
        self._figures.packs_distrusted += isinstance(err, EngineDistrusted)
        log.warning("pack given back", pack_id=order.pack_id, attempt=attempt, delay_s=delay_s, error=str(err))
        await self._tell(order.delivery.give_back(delay_s), order, "give back")

    async def _bury(self, order: Order, reason: str, detail: str) -> None:
        log.error("pack dead-lettered", pack_id=order.pack_id, reason=reason, detail=detail)
        self._figures.groups_dead_lettered += max(1, len(order.delivery.fact.tasks))
        await self._tell(order.delivery.dead_letter(reason, detail), order, "dead-letter")

    async def _tell(self, ending: Awaitable[None], order: Order, what: str) -> None:
        """Tell NATS; when it is away for too long the pack comes again, and is recognised by its ids."""
        try:
            await ending
        except BusUnreachable as err:
            log.warning("NATS was not told; the pack comes again", what=what, pack_id=order.pack_id, error=str(err))
