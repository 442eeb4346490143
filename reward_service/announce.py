"""Publication of what happened to a group: scored, waiting, or dead-lettered with its reason."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol import subjects, trace_context
from penstock.protocol.errors import MessageTooLarge
from penstock.protocol.facts import DeadLetter, GroupGenerated, GroupScored, RunEvent, encode
from penstock.protocol.groups import GeneratedGroup, ScoredGroup
from penstock.protocol.transport.bus import Bus
from penstock.protocol.transport.delivery import Delivery

STAGE = "generated"
_MAX_DETAIL_CHARS = 2000
_MAX_EVENT_DETAIL_CHARS = 1500  # a reason with a traceback of some frames


class Announcer:
    """Publishes for one run; every publication is acknowledged by the server before it returns."""

    def __init__(self, bus: Bus, *, run_id: str, source: str) -> None:
        self._bus = bus
        self._run_id = run_id
        self._source = source

    async def scored(
        self, delivery: Delivery[GroupGenerated], groups: Sequence[ScoredGroup]
    ) -> dict[str, MessageTooLarge]:
        """Announce scored groups, a message for each split, in pieces where the parts make one too large.

        Returns the groups that fit into no message (their reward returns too many parts), with the error.
        """
        too_large: dict[str, MessageTooLarge] = {}
        for split in sorted({group.generated.split for group in groups}):
            of_split = [group for group in groups if group.generated.split == split]
            too_large |= await self._scored(delivery, subjects.scored(self._run_id, split), of_split)
        return too_large

    async def _scored(
        self, delivery: Delivery[GroupGenerated], subject: str, groups: Sequence[ScoredGroup]
    ) -> dict[str, MessageTooLarge]:
        generated = delivery.fact
        fact = GroupScored(
            run_id=generated.run_id, pack_id=generated.pack_id, worker_id=generated.worker_id, pack=generated.pack,
            groups=tuple(groups),
        )  # fmt: skip
        ids = [group.generated.group_id for group in groups]
        msg_id = f"s:{_message_id(delivery)}:{generated.pack_id}:{hash_of(ids)}"
        try:
            await self._bus.publish(subject, fact, msg_id=msg_id, traceparent=trace_context.child(delivery.traceparent))
        except MessageTooLarge as err:
            if len(groups) == 1:
                return {ids[0]: err}
            half = len(groups) // 2
            first = await self._scored(delivery, subject, groups[:half])
            return first | await self._scored(delivery, subject, groups[half:])
        return {}

    async def dead(
        self, delivery: Delivery[GroupGenerated], groups: Sequence[GeneratedGroup], *, reason: str, detail: str
    ) -> None:
        """Store exactly these groups of the message as a dead letter."""
        generated = delivery.fact
        ids = [group.group_id for group in groups]
        payload = encode(generated.model_copy(update={"groups": tuple(groups)}))
        letter = DeadLetter(
            run_id=self._run_id, stage=STAGE, subject=subjects.generated(self._run_id, groups[0].split),
            reason=reason, detail=detail[:_MAX_DETAIL_CHARS], group_ids=tuple(ids),
            num_delivered=delivery.num_delivered, payload=payload,
        )  # fmt: skip
        await self._bus.publish(
            subjects.dead(self._run_id, STAGE), letter, msg_id=f"dead:{_message_id(delivery)}:{hash_of(ids)}",
            traceparent=trace_context.child(delivery.traceparent),
        )  # fmt: skip
        await self.event(
            "dead",
            {
                "stage": STAGE,
                "reason": reason,
                "detail": detail[:_MAX_EVENT_DETAIL_CHARS],
                "group_ids": ids,
                "pack_id": generated.pack_id,
            },
            msg_id=f"dead-event:{_message_id(delivery)}:{hash_of(ids)}",
        )

    async def waiting(
        self, delivery: Delivery[GroupGenerated], errors: Mapping[str, Exception], *, delay_s: float
    ) -> None:
        first = next(iter(errors.values()))
        data = {
            "pack_id": delivery.fact.pack_id, "group_ids": list(errors), "reason": type(first).__name__,
            "detail": str(first)[:_MAX_EVENT_DETAIL_CHARS], "num_delivered": delivery.num_delivered,
            "delay_s": delay_s,
        }  # fmt: skip
        await self.event("reward_error", data, msg_id=f"wait:{_message_id(delivery)}:{delivery.num_delivered}")

    async def event(self, kind: str, data: dict[str, Any], *, msg_id: str) -> None:
        event = RunEvent(run_id=self._run_id, source=self._source, kind=kind, at=time.time(), data=data)
        await self._bus.publish(subjects.events(self._run_id, kind), event, msg_id=f"{self._source}:{msg_id}")


def _message_id(delivery: Delivery[GroupGenerated]) -> str:
    """Return what no other message has: its number in the stream, and its trace, which no other login knows.

    Another message that states the same pack id, or a login that guesses, must not take the ids that follow from it.
    """
    return f"{delivery.sequence}:{trace_context.trace_id(delivery.traceparent)}"


def hash_of(group_ids: Sequence[str]) -> str:
    """Return a short hash of a set of groups, independent of their order."""
    return hashlib.sha256("\n".join(sorted(group_ids)).encode()).hexdigest()[:16]
