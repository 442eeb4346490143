"""How every issued group is closed: the state of dispatch, and decisions that return the next one.

    position ──plan──▶ outstanding ──settle──▶ trained, or dropped without another attempt
                 ▲          │  ▲
                 └─ again ◀─┤  └── accept (its dead letter was sent again)
          send_back (stale) └─dead_letter─▶ dead

Group ids are ``e<epoch>.p<prompt>.a<attempt>`` and follow from the data order alone; a pack's id follows from its
groups. So a trainer that restarts from a checkpoint issues the same ids again, and the broker and the trainer recognise
them. Groups issued after the checkpoint may arrive before they are issued again: `accept` counts them as issued, once, if
the run's log has them (`issue_log.py`). Any other group was never issued, and is foreign.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from penstock.protocol.versions import admissible_groups
from penstock.trainer.data.data_order import DataOrder, Place
from penstock.trainer.errors import CheckpointError
from penstock.trainer.groups.issue_log import IssuedBefore
from penstock.trainer.settings import RolloutSettings

_GROUP_ID = re.compile(r"e([0-9]{1,9})\.p([0-9]{1,12})\.a([0-9]{1,9})")
_STATE_TAG = "dispatch_state.v1"
NOTHING_BEFORE = IssuedBefore()  # a run's first session

MAX_DEAD_KNOWN = 10_000  # newest dead-lettered groups that are recognised when their letters are sent again


class GroupKey(NamedTuple):
    """The parts of a training group's id."""

    epoch: int
    prompt: int
    attempt: int

    def __str__(self) -> str:
        return f"e{self.epoch}.p{self.prompt}.a{self.attempt}"

    @property
    def place(self) -> Place:
        """The prompt in its epoch, whatever the attempt."""
        return Place(self.epoch, self.prompt)

    @classmethod
    def parse(cls, group_id: str) -> GroupKey:
        """Read a training group's id; raises ValueError for anything else."""
        match = _GROUP_ID.fullmatch(group_id)
        if match is None:
            raise ValueError(f"{group_id!r} is not the id of a training group (e<epoch>.p<prompt>.a<attempt>)")
        key = cls(int(match[1]), int(match[2]), int(match[3]))
        if str(key) != group_id:  # "e00.p1.a0" would be a second id of the group "e0.p1.a0"
            raise ValueError(f"{group_id!r} is not the id of a training group: expected {key}")
        return key


@dataclass(frozen=True, slots=True)
class DispatchState:
    """Everything dispatch keeps between calls; part of the checkpoint."""

    order_id: str  # of the data and its order; positions are valid for this one only
    position: int = 0  # next prompt of the data order
    outstanding: frozenset[GroupKey] = frozenset()  # issued, and neither trained nor dropped
    again: tuple[GroupKey, ...] = ()  # to be issued before new prompts
    ahead: frozenset[Place] = frozenset()  # arrived from an earlier session before their position was reached
    refused: frozenset[GroupKey] = (
        frozenset()
    )  # refused since an older attempt had arrived: the broker has seen their ids
    dead: tuple[GroupKey, ...] = ()  # closed by dead letters, the newest last: these may be sent again
    num_issued: int = 0
    num_issued_again: int = 0
    num_given_up: int = 0

    def to_document(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return {
            "schema_tag": _STATE_TAG,
            "order_id": self.order_id,
            "position": self.position,
            "outstanding": [str(key) for key in sorted(self.outstanding)],
            "again": [str(key) for key in self.again],
            "ahead": [list(place) for place in sorted(self.ahead)],
            "refused": [str(key) for key in sorted(self.refused)],
            "dead": [str(key) for key in self.dead],
            "num_issued": self.num_issued,
            "num_issued_again": self.num_issued_again,
            "num_given_up": self.num_given_up,
        }

    @classmethod
    def from_document(cls, document: dict[str, Any], *, order_id: str) -> DispatchState:
        """Read what `to_document` wrote; raises CheckpointError when it belongs to other data."""
        if document.get("schema_tag") != _STATE_TAG:
            raise CheckpointError(f"dispatch state: expected {_STATE_TAG}, got {document.get('schema_tag')!r}")
        if document["order_id"] != order_id:
            raise CheckpointError(
                f"the checkpoint's position counts prompts of other data (order {document['order_id']}, now {order_id}): "
                "data.train, the image files of its rows, data.map, data.format, data.max_prompt_tokens, data.max_samples, "
                "data.shuffle or run.seed changed; restore them, or start over with another run.id or trainer.resume = false"
            )
        return cls(
            order_id=order_id,
            position=document["position"],
            outstanding=frozenset(GroupKey.parse(text) for text in document["outstanding"]),
            again=tuple(GroupKey.parse(text) for text in document["again"]),
            ahead=frozenset(Place(*place) for place in document["ahead"]),
            refused=frozenset(GroupKey.parse(text) for text in document.get("refused", ())),
            dead=tuple(GroupKey.parse(text) for text in document.get("dead", ())),
            num_issued=document["num_issued"],
            num_issued_again=document["num_issued_again"],
            num_given_up=document["num_given_up"],
        )


def order_id(order: DataOrder, fingerprint: str) -> str:
    """Return the id of a data order and of the files it orders."""
    text = f"{fingerprint} {order.num_prompts} {order.seed} {order.shuffle}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan(
    state: DispatchState,
    *,
    order: DataOrder,
    rollout: RolloutSettings,
    groups_per_message: int,
    most_outstanding: int | None = None,
    lag: int = 0,
) -> tuple[list[tuple[GroupKey, ...]], DispatchState]:
    """Plan the next packs: as many groups as the staleness bound admits, in whole packs.

    A pack that is not full waits until the bound admits the rest, unless fewer groups are outstanding than a step needs:
    then waiting would starve the trainer, and the pack is cut short. A pack never spans the groups of two steps.

    Args:
        state: What is outstanding, and the next position.
        order: The order of prompts.
        rollout: Groups of a step, and the staleness bound.
        groups_per_message: Groups of a full pack.
        most_outstanding: What the rest of the run can still use, so that nothing is issued needlessly near its end.
        lag: Versions that the announced one is behind the trainer.

    Returns:
        The packs, each a tuple of groups, and the state after issuing them.
    """
    sizes: list[int] = []
    outstanding, num_issued = len(state.outstanding), state.num_issued
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
        sizes.append(min(wanted, admitted))
        outstanding, num_issued = outstanding + sizes[-1], num_issued + sizes[-1]
    taken, state = _take(state, order, sum(sizes))  # all at once: the state holds tens of thousands in a large run
    groups = iter(taken)
    return [tuple(itertools.islice(groups, size)) for size in sizes], state


def _take(state: DispatchState, order: DataOrder, count: int) -> tuple[tuple[GroupKey, ...], DispatchState]:
    pack = list(state.again[:count])
    position, ahead = state.position, state.ahead
    while len(pack) < count:
        place = order.at(position)
        position += 1
        if place in ahead:
            ahead -= {place}
        else:
            pack.append(GroupKey(*place, attempt=0))
    num_again = min(count, len(state.again))
    return tuple(pack), replace(
        state,
        position=position,
        outstanding=state.outstanding | set(pack),
        again=state.again[num_again:],
        ahead=ahead,
        num_issued=state.num_issued + len(pack),
        num_issued_again=state.num_issued_again + num_again,
    )


def accept(
    state: DispatchState,
    group_id: str,
    *,
    order: DataOrder,
    before: IssuedBefore = NOTHING_BEFORE,
    holds: Callable[[str], bool] = lambda _: False,
) -> DispatchState | None:
    """Return the state after a group arrived; None if it must not be used: foreign, a duplicate, or an attempt given up.

    A group that this session has not issued was issued by an earlier one, after the checkpoint, if ``before`` has it: it
    counts as issued from now on. If it is a later attempt, the earlier session had dropped the one before: that one is no
    longer outstanding, unless ``holds`` returns True for it, since it can then be used itself. A group that was
    dead-lettered is outstanding once more: its letter was sent again, or was not true.
    """
    key = GroupKey.parse(group_id)
    if key in state.outstanding:
        return state
    if key in state.dead:
        left = tuple(k for k in state.dead if k != key)
        return replace(state, outstanding=state.outstanding | {key}, dead=left)
    if not was_issued_before(key, order, before):
        return None
    replaced = frozenset(k for k in state.outstanding if k.place == key.place and k.attempt < key.attempt)
    queued = [k for k in state.again if k.place == key.place and k.attempt <= key.attempt]
    if replaced or queued:
        if any(holds(str(k)) for k in replaced):
            return None
        return replace(
            state,
            outstanding=(state.outstanding - replaced) | {key},
            again=tuple(k for k in state.again if k not in queued),
            num_issued=state.num_issued + 1,
            num_issued_again=state.num_issued_again + 1,
        )
    if key.place in state.ahead or order.position_of(key.place) < state.position:
        return None
    return replace(
        state,
        outstanding=state.outstanding | {key},
        ahead=state.ahead | {key.place},
        num_issued=state.num_issued + 1,
    )


def was_issued(state: DispatchState, group_id: str, *, order: DataOrder, before: IssuedBefore = NOTHING_BEFORE) -> bool:
    """Return False for a group that no session of this run has issued.

    Attempts of a prompt that is closed are not stored: each counts as issued.
    """
    key = GroupKey.parse(group_id)
    if was_issued_before(key, order, before):
        return True
    if key.prompt >= order.num_prompts:
        return False
    issued = max((k.attempt for k in state.outstanding if k.place == key.place), default=-1)
    queued = min((k.attempt for k in state.again if k.place == key.place), default=0)
    if issued >= 0 or queued > 0:
        return key.attempt <= issued or key.attempt < queued
    return key.place in state.ahead or order.position_of(key.place) < state.position


def was_issued_before(key: GroupKey, order: DataOrder, before: IssuedBefore) -> bool:
    """Return True for a group that an earlier session of this run issued."""
    if key.prompt >= order.num_prompts:
        return False
    if key.attempt:
        return str(key) in before.later
    return before.position > 0 and order.position_of(key.place) < before.position


def settle(state: DispatchState, group_ids: Iterable[str]) -> DispatchState:
    """Close groups that were trained, or dropped without another attempt; raises ValueError for one not outstanding."""
    closed = _outstanding(state, group_ids)
    return replace(state, outstanding=state.outstanding - closed, refused=_without(state.refused, closed))


def dead_letter(state: DispatchState, group_ids: Iterable[str]) -> DispatchState:
    """Close groups that were dead-lettered: their prompts are not issued again, but the letters may be sent again."""
    closed = _outstanding(state, group_ids)
    dead = (*state.dead, *sorted(closed))[-MAX_DEAD_KNOWN:]
    return replace(state, outstanding=state.outstanding - closed, refused=_without(state.refused, closed), dead=dead)


def send_back(
    state: DispatchState, group_ids: Iterable[str], *, max_attempts: int
) -> tuple[DispatchState, tuple[str, ...]]:
    """Close groups that came back too stale, and queue their prompts for another attempt.

    The number of an attempt that was refused before is skipped: under the same id the broker would discard the task as
    a duplicate, and it would be in no queue.

    Returns:
        The state, and the ids of the groups that had their last attempt.
    """
    closed = sorted(_outstanding(state, group_ids))
    following = {key: _next_attempt(state, key) for key in closed}
    again = [key for key in following.values() if key.attempt < max_attempts]
    given_up = tuple(str(key) for key, later in following.items() if later.attempt >= max_attempts)
    return replace(
        state,
        outstanding=state.outstanding.difference(closed),
        again=(*state.again, *again),
        refused=_without(state.refused, closed),
        num_given_up=state.num_given_up + len(given_up),
    ), given_up


def refuse_attempt(state: DispatchState, group_id: str) -> DispatchState:
    """Return the state after refusing a group; it records a later attempt that came while an older one is outstanding."""
    key = GroupKey.parse(group_id)
    if any(k.place == key.place and k.attempt < key.attempt for k in state.outstanding):
        return replace(state, refused=state.refused | {key})
    return state


def _next_attempt(state: DispatchState, key: GroupKey) -> GroupKey:
    refused = [k.attempt for k in state.refused if k.place == key.place]
    return key._replace(attempt=max(key.attempt, *refused) + 1 if refused else key.attempt + 1)


def _without(refused: frozenset[GroupKey], closed: Iterable[GroupKey]) -> frozenset[GroupKey]:
    places = {key.place for key in closed} if refused else set()
    return frozenset(key for key in refused if key.place not in places)


def _outstanding(state: DispatchState, group_ids: Iterable[str]) -> frozenset[GroupKey]:
    keys = frozenset(GroupKey.parse(group_id) for group_id in group_ids)
    unknown = keys - state.outstanding
    if unknown:
        raise ValueError(f"group {min(unknown)} is not outstanding; it was settled before, or never issued")
    return keys
