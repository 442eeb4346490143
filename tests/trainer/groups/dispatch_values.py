"""The cursor and the states of groups as values: each function returns the next one and leaves its argument as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from penstock.protocol.record.lineage import SplitTotals
from penstock.trainer.data.data_order import DataOrder, Place
from penstock.trainer.groups.group_states import GroupStates, State
from penstock.trainer.groups.group_totals import Drop, DropReason, GroupTotals
from penstock.trainer.groups.issue_log import IssuedBefore
from penstock.trainer.groups.prompt_cursor import NOTHING_BEFORE, GroupKey, PromptCursor
from penstock.trainer.settings import RolloutSettings


class DispatchState:
    """One value; equal to another with the same document."""

    def __init__(self, order_id: str, cursor: PromptCursor | None = None) -> None:
        self.cursor = cursor or PromptCursor(DataOrder(1, seed=0), order_id, GroupStates())
        self.groups = self.cursor._groups
        self.order_id, self.position = order_id, self.cursor.position
        self.again, self.ahead, self.refused = tuple(self.cursor.again), self.cursor.ahead, self.cursor.refused
        self.outstanding = frozenset(map(GroupKey.parse, self.groups.outstanding()))
        self.num_issued = self.groups.totals.sums.issued
        self.num_issued_again, self.num_given_up = self.cursor.num_issued_again, self.cursor.num_given_up

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DispatchState) and self.to_document() == other.to_document()

    __hash__ = None  # type: ignore[assignment]

    def to_document(self) -> dict[str, Any]:
        return self.cursor.to_document()

    @classmethod
    def from_document(cls, document: dict[str, Any], *, order_id: str) -> DispatchState:
        groups = GroupStates(
            totals=GroupTotals(SplitTotals(issued=document.get("num_issued", 0))),
            outstanding=document.get("outstanding", ()),
            dead=document.get("dead", ()),
        )
        cursor = PromptCursor(DataOrder(1, seed=0), order_id, groups)
        cursor.resume(document)
        return cls(order_id, cursor)

    def changed(self, order: DataOrder | None = None, before: IssuedBefore = NOTHING_BEFORE) -> PromptCursor:
        cursor = copy.deepcopy(self.cursor)
        cursor.before = before
        if order is not None:
            cursor.order = order
        return cursor


def plan(
    state: DispatchState, *, order: DataOrder, rollout: RolloutSettings, groups_per_message: int, lag: int = 0
) -> tuple[list[tuple[GroupKey, ...]], DispatchState]:
    cursor = state.changed(order)
    packs = cursor.plan(rollout, groups_per_message, lag=lag)
    return packs, DispatchState(state.order_id, cursor)


def accept(
    state: DispatchState, group_id: str, *, order: DataOrder, before: IssuedBefore = NOTHING_BEFORE,
    holds: Callable[[str], bool] = lambda _: False,
) -> DispatchState | None:  # fmt: skip
    cursor = state.changed(order, before)
    for held in filter(holds, list(cursor._groups.outstanding())):
        cursor._groups.arrive(held, 1)
    return DispatchState(state.order_id, cursor) if cursor.accept(group_id) is None else None


def was_issued(state: DispatchState, group_id: str, *, order: DataOrder, before: IssuedBefore = NOTHING_BEFORE) -> bool:
    return state.changed(order, before)._was_issued(GroupKey.parse(group_id))


def settle(state: DispatchState, group_ids: Iterable[str]) -> DispatchState:
    cursor = state.changed()
    for group_id in group_ids:
        cursor._groups.drop(Drop(group_id, DropReason.NO_SIGNAL, 0))
        cursor.close([group_id])
    return DispatchState(state.order_id, cursor)


def send_back(
    state: DispatchState, group_ids: Iterable[str], *, max_attempts: int
) -> tuple[DispatchState, tuple[str, ...]]:
    cursor, given_up = state.changed(), []
    for key in sorted(map(GroupKey.parse, group_ids)):
        cursor._groups.drop(Drop(str(key), DropReason.STALE, 0))
        if not cursor.queue_again(str(key), max_attempts=max_attempts):
            given_up.append(str(key))
    return DispatchState(state.order_id, cursor), tuple(given_up)


def refuse_attempt(state: DispatchState, group_id: str) -> DispatchState:
    """Return the state after a later attempt of an earlier session was refused, since the one before has arrived."""
    key = GroupKey.parse(group_id)
    cursor = state.changed(DataOrder(100, seed=0, shuffle=False), IssuedBefore(later=frozenset({group_id})))
    for held in cursor._groups.outstanding():
        if GroupKey.parse(held).place == Place(key.epoch, key.prompt):
            cursor._groups.arrive(held, 1)
            break
    else:
        return state
    assert cursor.accept(group_id) is DropReason.DUPLICATE
    assert cursor._groups.state(held) is State.ARRIVED
    return DispatchState(state.order_id, cursor)
