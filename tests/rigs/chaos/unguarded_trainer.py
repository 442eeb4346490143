"""Run the trainer without any of its guards against a group that comes twice: for the control of `tests.rigs.chaos.run` only.

    python -m tests.rigs.chaos.unguarded_trainer RUN.TOML [SECTION.KEY=VALUE ...]

| guard                                                     | here                                          |
|-----------------------------------------------------------|-----------------------------------------------|
| ledger: ids of trained groups, in memory and checkpoints  | holds none                                    |
| collector: a group that has arrived is a duplicate        | accepts every group                           |
| dispatch: positions, and attempts given up                | opens every group that arrives                |
| accounting: closes only what is open                      | closes everything, and counts it              |

What is left is the audit, which reads the record alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from penstock.trainer.__main__ import main
from penstock.trainer.groups.accounting import Accounting
from penstock.trainer.groups.delivery_tracker import DeliveryTracker
from penstock.trainer.groups.dispatch_state import GroupKey
from penstock.trainer.groups.issue import Issuer
from penstock.trainer.groups.ledger import Ledger


def remove_guards() -> None:
    replaced: tuple[tuple[type, str, Any], ...] = (
        (Ledger, "record", lambda *_, **__: None),
        (Ledger, "uses", lambda *_: 1),
        (DeliveryTracker, "_refusal", _refusal),
        (Issuer, "accept", _accept),
        (Accounting, "issue", _issue),
        (Accounting, "_close", staticmethod(lambda account, group_id: account.in_flight.discard(group_id))),
    )
    for owner, name, changed in replaced:
        if not hasattr(owner, name):
            raise AttributeError(f"{owner.__name__} has no guard {name} any more; adapt this control")
        setattr(owner, name, changed)


def _refusal(tracker: DeliveryTracker, group_id: str) -> None:
    tracker._issued.accept(group_id, lambda _: False)


def _accept(issuer: Issuer, group_id: str, holds: Callable[[str], bool] = lambda _: False) -> bool:
    with issuer._changed:
        state = issuer._dispatch.state
        issuer._dispatch.state = replace(state, outstanding=state.outstanding | {GroupKey.parse(group_id)})
        issuer._counters.groups_scored += 1
        issuer._accounting._splits["train"].in_flight.add(group_id)
        return True


def _issue(accounting: Accounting, split: Any, group_ids: Iterable[str]) -> None:
    with accounting._lock:
        account, new = accounting._splits[split], list(group_ids)
        account.in_flight.update(new)
        account.issued.extend(new)
        account.totals = account.totals.model_copy(update={"issued": account.totals.issued + len(new)})


if __name__ == "__main__":
    remove_guards()
    sys.exit(main(["train", *sys.argv[1:]]))
