"""Which prompt is issued next, and which arriving groups belong to the run; pure.

    position ──take──▶ issued ──▶ trained, or dropped without another attempt
                 ▲        │  ▲
                 └─ again ◀  └── accept: of an earlier session, or its dead letter was sent again
                  (queue_again)

Group ids are ``e<epoch>.p<prompt>.a<attempt>`` and follow from the data order alone; a pack's id follows from its
groups. So a trainer that restarts from a checkpoint issues the same ids again, and the broker and the trainer recognise
them. Groups issued after the checkpoint may arrive before they are issued again: `accept` counts them as issued, once, if
the run's log has them (`issue_log.py`). Any other group was never issued, and is foreign.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from penstock.protocol.versions import admissible_groups
from penstock.trainer.data.data_order import DataOrder, Place, WeightedOrder
from penstock.trainer.errors import CheckpointError
from penstock.trainer.groups.group_states import GroupStates, State
from penstock.trainer.groups.group_totals import Drop, DropReason
from penstock.trainer.groups.issue_log import IssuedBefore
from penstock.trainer.settings import RolloutSettings

_GROUP_ID = re.compile(r"e([0-9]{1,9})\.p([0-9]{1,12})\.a([0-9]{1,9})")
_STATE_TAG = "dispatch_state.v1"
NOTHING_BEFORE = IssuedBefore()  # a run's first session


class GroupKey(NamedTuple):
    epoch: int
    prompt: int
    attempt: int

    def __str__(self) -> str:
        return f"e{self.epoch}.p{self.prompt}.a{self.attempt}"

    @property
    def place(self) -> Place:
        return Place(self.epoch, self.prompt)

    @classmethod
    def parse(cls, group_id: str) -> GroupKey:
        match = _GROUP_ID.fullmatch(group_id)
        if match is None:
            raise ValueError(f"{group_id!r} is not the id of a training group (e<epoch>.p<prompt>.a<attempt>)")
        key = cls(int(match[1]), int(match[2]), int(match[3]))
        if str(key) != group_id:  # "e00.p1.a0" would be a second id of the group "e0.p1.a0"
            raise ValueError(f"{group_id!r} is not the id of a training group: expected {key}")
        return key


def order_id(order: DataOrder | WeightedOrder, fingerprint: str) -> str:
    return hashlib.sha256(f"{fingerprint} {order.identity}".encode()).hexdigest()[:16]


class PromptCursor:
    def __init__(self, order: DataOrder | WeightedOrder, id_of_order: str, groups: GroupStates) -> None:
        """Start at the first prompt; positions are valid for ``id_of_order`` only, and attempts for ``groups``."""
        self.order, self.order_id, self._groups = order, id_of_order, groups
        self.position = 0  # next prompt of the data order
        self.again: list[GroupKey] = []  # to be issued before new prompts
        self.ahead: set[Place] = set()  # arrived from an earlier session before their position was reached
        self.refused: set[GroupKey] = set()  # since an older attempt had arrived: the broker has seen their ids
        self.num_issued_again = 0
        self.num_given_up = 0
        self.before = NOTHING_BEFORE  # what earlier sessions issued

    def to_document(self) -> dict[str, Any]:
        return {
            "schema_tag": _STATE_TAG,
            "order_id": self.order_id,
            "position": self.position,
            "outstanding": self.outstanding(),
            "again": [str(key) for key in self.again],
            "ahead": [list(place) for place in sorted(self.ahead)],
            "refused": [str(key) for key in sorted(self.refused)],
            "dead": self._groups.dead(),
            "num_issued": self._groups.totals.sums.issued,
            "num_issued_again": self.num_issued_again,
            "num_given_up": self.num_given_up,
        }

    def resume(self, document: dict[str, Any]) -> None:
        if document.get("schema_tag") != _STATE_TAG:
            raise CheckpointError(f"dispatch state: expected {_STATE_TAG}, got {document.get('schema_tag')!r}")
        if document["order_id"] != self.order_id:
            raise CheckpointError(
                f"the checkpoint's position counts prompts of other data (order {document['order_id']}, now {self.order_id}): "
                "data.train, the image files of its rows, data.map, data.format, data.max_prompt_tokens, data.max_samples, "
                "data.shuffle, data.weights or run.seed changed; restore them, or start over with another run.id or trainer.resume = false"
            )
        self.position = document["position"]
        self.again = [GroupKey.parse(text) for text in document["again"]]
        self.ahead = {Place(*place) for place in document["ahead"]}
        self.refused = {GroupKey.parse(text) for text in document.get("refused", ())}
        self.num_issued_again, self.num_given_up = document["num_issued_again"], document["num_given_up"]

    def outstanding(self) -> list[str]:
        """Return the ids that are outstanding, sorted by epoch, prompt and attempt: their order must be reproducible."""
        return [str(key) for key in sorted(map(GroupKey.parse, self._groups.outstanding()))]

    def plan(
        self, rollout: RolloutSettings, groups_per_message: int, *, most_outstanding: int | None = None, lag: int = 0
    ) -> list[tuple[GroupKey, ...]]:
        """Issue the next packs: as many groups as the staleness bound admits, in whole packs.

        A pack that is not full waits until the bound admits the rest, unless fewer groups are outstanding than a step needs: then
        waiting would starve the trainer, and the pack is cut short. A pack never spans the groups of two steps. ``lag`` are the
        versions that the announced one is behind the trainer.
        """
        packs: list[tuple[GroupKey, ...]] = []
        outstanding, num_issued = self._groups.num_outstanding, self._groups.totals.sums.issued
        while True:
            admitted = admissible_groups(
                outstanding=outstanding,
                max_staleness=rollout.max_staleness,
                groups_per_step=rollout.groups_per_step,
                lag=lag,
            )
            if most_outstanding is not None:
                admitted = min(admitted, most_outstanding - outstanding)
            wanted = min(groups_per_message, rollout.groups_per_step - num_issued % rollout.groups_per_step)
            needed = rollout.groups_per_step - outstanding  # or the next step could never be filled
            if admitted <= 0 or (admitted < wanted and needed <= 0):
                break
            packs.append(tuple(self._next() for _ in range(min(wanted, admitted))))
            outstanding, num_issued = outstanding + len(packs[-1]), num_issued + len(packs[-1])
        self._groups.issue([str(key) for pack in packs for key in pack])
        return packs

    def accept(self, group_id: str, *, is_preferred: bool = False) -> DropReason | None:
        """Record that a group which has not arrived yet comes; return why it must not be used, None if it is.

        A group that this session has not issued was issued by an earlier one, after the checkpoint, if `before` has it: it
        counts as issued from now on. If it is a later attempt, the earlier session had dropped the one before: that one is
        closed as ``superseded``, unless it has arrived, since it can then be used itself, and this one is not preferred. A group
        that was dead-lettered is outstanding once more: its letter was sent again, or was not true.
        """
        try:
            key = GroupKey.parse(group_id)
        except ValueError:
            return DropReason.FOREIGN
        if self._groups.is_dead(group_id):
            self._groups.revive(group_id)
        if self._groups.state(group_id) is State.ISSUED or (
            self.was_issued_before(key) and self._replace_with(key, is_preferred=is_preferred)
        ):
            return None
        if not self._was_issued(key):
            return DropReason.FOREIGN
        if any(attempt < key.attempt for attempt in self._attempts(key.place)):
            self.refused.add(key)
        return DropReason.DUPLICATE

    def may_arrive(self, group_id: str) -> bool:
        try:
            key = GroupKey.parse(group_id)
        except ValueError:
            return False
        if key.prompt >= self.order.num_prompts:
            return False
        is_open = any(key.place == queued.place for queued in self.again) or bool(self._attempts(key.place))
        return is_open or self.order.position_of(key.place) >= self.position

    def was_issued_before(self, key: GroupKey) -> bool:
        if key.prompt >= self.order.num_prompts:
            return False
        if key.attempt:
            return str(key) in self.before.later
        return self.before.position > 0 and self.order.position_of(key.place) < self.before.position

    def close(self, group_ids: Iterable[str]) -> None:
        if self.refused:
            places = {GroupKey.parse(group_id).place for group_id in group_ids}
            self.refused = {key for key in self.refused if key.place not in places}

    def queue_again(self, group_id: str, *, max_attempts: int) -> bool:
        """Queue the prompt of a dropped group for another attempt; return False if that was the last one.

        The number of an attempt that was refused before is skipped: under the same id the broker would discard the task as
        a duplicate, and it would be in no queue.
        """
        key = GroupKey.parse(group_id)
        used = [key.attempt, *(refused.attempt for refused in self.refused if refused.place == key.place)]
        following = key._replace(attempt=max(used) + 1)
        self.close([group_id])
        if following.attempt >= max_attempts:
            self.num_given_up += 1
            return False
        self.again.append(following)
        return True

    def _next(self) -> GroupKey:
        if self.again:
            self.num_issued_again += 1
            return self.again.pop(0)
        while True:
            place = self.order.at(self.position)
            self.position += 1
            if place not in self.ahead:
                return GroupKey(*place, attempt=0)
            self.ahead.remove(place)

    def _replace_with(self, key: GroupKey, *, is_preferred: bool) -> bool:
        older = [key._replace(attempt=n) for n in self._attempts(key.place) if n < key.attempt]
        queued = [k for k in self.again if k.place == key.place and k.attempt <= key.attempt]
        arrived = [k for k in older if self._groups.has_arrived(str(k))]
        if arrived and not (is_preferred and all(self._groups.state(str(k)) is State.READY for k in arrived)):
            return False
        if older or queued:
            self.again = [k for k in self.again if k not in queued]
            self.num_issued_again += 1
        elif key.place in self.ahead or self.order.position_of(key.place) < self.position:
            return False
        else:
            self.ahead.add(key.place)
        self._groups.issue([str(key)])
        for replaced in map(str, sorted(older)):
            content = self._groups.content(replaced)
            num_tokens, pack = (0, None) if content is None else (content.num_tokens, content.pack)
            self._groups.drop(Drop(replaced, DropReason.SUPERSEDED, num_tokens, pack))
        return True

    def _was_issued(self, key: GroupKey) -> bool:
        """Return False for a group that no session issued; each attempt of a closed prompt counts as issued."""
        if self.was_issued_before(key):
            return True
        if key.prompt >= self.order.num_prompts:
            return False
        issued = max(self._attempts(key.place), default=-1)
        queued = min((k.attempt for k in self.again if k.place == key.place), default=0)
        if issued >= 0 or queued > 0:
            return key.attempt <= issued or key.attempt < queued
        return key.place in self.ahead or self.order.position_of(key.place) < self.position

    def _attempts(self, place: Place) -> list[int]:
        prefix = str(GroupKey(*place, 0))[:-1]
        return [int(i.removeprefix(prefix)) for i in self._groups.outstanding() if i.startswith(prefix)]
