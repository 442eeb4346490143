"""Run the trainer without any of its guards against a group that comes twice: for the control of `tests.rigs.chaos.run` only.

    python -m tests.rigs.chaos.unguarded_trainer RUN.TOML [SECTION.KEY=VALUE ...]

| guard                                                       | here                                        |
|-------------------------------------------------------------|---------------------------------------------|
| states: ids of trained groups, in memory and checkpoints    | knows none                                  |
| batcher: a group that was trained or dropped is a duplicate | opens every group that arrives              |
| cursor: positions, and attempts given up                    | is not asked about groups that arrive       |
| states: a group that is known is not issued                 | opens it again, and counts it               |

What is left is the audit, which reads the record alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from penstock.trainer.__main__ import main
from penstock.trainer.groups.batcher import Batcher
from penstock.trainer.groups.group_states import GroupRecord, GroupStates, State
from penstock.trainer.groups.group_totals import DropReason


def remove_guards() -> None:
    replaced: tuple[tuple[type, str, Any], ...] = (
        (GroupStates, "rows", lambda _: ()),
        (GroupStates, "issue", _issue),
        (Batcher, "_refusal", _refusal),
    )
    for owner, name, changed in replaced:
        if not hasattr(owner, name):
            raise AttributeError(f"{owner.__name__} has no guard {name} any more; adapt this control")
        setattr(owner, name, changed)


def _open(groups: GroupStates, group_id: str) -> None:
    if (record := groups._groups.get(group_id)) is not None:
        if record.state not in (State.KEPT, State.CLOSED):
            return  # its earlier message is being read, or in a batch
        groups._remove(group_id, record)
    groups._add(group_id, GroupRecord(State.ISSUED))


def _refusal(batcher: Batcher, group_id: str) -> DropReason | None:
    if batcher._groups.has_arrived(group_id):
        return DropReason.DUPLICATE
    _open(batcher._groups, group_id)
    return None


def _issue(groups: GroupStates, group_ids: Iterable[str]) -> None:
    new = list(group_ids)
    for group_id in new:
        _open(groups, group_id)
    groups.totals.issue(new)


if __name__ == "__main__":
    remove_guards()
    sys.exit(main(["train", *sys.argv[1:]]))
