"""The state of the trainer at a checkpoint besides weights and optimizer: ``state.json`` in the checkpoint's folder.

The trainer writes it and resumes from it; an audit reads it. A checkpoint is a folder ``step00000050`` below the run's
``checkpoints``. The newest is the one of the highest epoch, then of the highest step: a trainer that lost its
lease during a commit may leave a folder, but never the newest one by that order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from penstock.protocol.errors import MalformedFact
from penstock.protocol.files import JsonTooLarge, read_document
from penstock.protocol.groups import BlobRef, Count, Identifier, Sha256, Wire, first_problem
from penstock.protocol.record.lineage import AccountState

STATE_FILE = "state.json"
PARTIAL = ".partial"
_PREFIX = "step"


class CheckpointState(Wire):
    """The content of ``state.json``."""

    run_id: Identifier
    epoch: Count  # of the lease it was written under
    step: Count  # optimizer steps done
    version: Count  # policy version of these weights
    weights_digest: Sha256  # of these weights, as they are published
    weights_dtype: str  # of their publication
    weights_are: Literal["model", "adapter"] = "model"  # in their publication
    ledger: tuple[tuple[int, tuple[str, ...]], ...]  # (version it was trained at, group ids), within the window
    # the data cursor and the open groups, as `trainer/groups/prompt_cursor.py` writes it
    dispatch: dict[str, Any]
    unsent: tuple[tuple[Identifier, ...], ...] = ()  # packs that are issued but not known to be on the stream
    letters_read: Count = 0  # sequence number of the last dead letter that this state knows
    totals: dict[str, Any]  # counters of the whole run, as `trainer/groups/group_totals.py` writes them
    algorithm: dict[str, Any] = Field(
        default={}
    )  # the state of the algorithm, as `trainer/algorithm/credit.py` writes it
    # versions between both were published by sessions that were rolled back
    abandoned: tuple[tuple[Count, Count], ...] = ()
    # (until, first, num) of these: the ``num`` versions after ``first`` have the weights of those after ``until``
    remade: tuple[tuple[Count, Count, Count], ...] = ()
    account: AccountState
    metrics_bytes: Count  # length of metrics.jsonl: lines after it belong to steps that are repeated
    record: BlobRef  # the last chapter of the lineage
    chapter: Count  # its number
    # of every other file of the folder, by relative path; {}: not recorded
    files: dict[str, Sha256] = Field(default={})


def folder_name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def read_state(folder: Path) -> CheckpointState:
    try:
        return CheckpointState.model_validate_json(read_document(folder / STATE_FILE))
    except JsonTooLarge as err:
        raise MalformedFact(f"{folder / STATE_FILE}: {err}; restore it") from None
    except ValidationError as err:
        raise MalformedFact(f"{folder / STATE_FILE}: {first_problem(err)}") from None


def committed(root: Path) -> list[tuple[Path, CheckpointState]]:
    """Return all committed checkpoints below a run's ``checkpoints`` folder, the newest last.

    One that the trainer removes meanwhile is left out. Raises MalformedFact or OSError for one that cannot be read.
    """
    states = []
    for path in root.glob(f"{_PREFIX}*"):
        if PARTIAL not in path.suffixes and path.is_dir():
            try:
                states.append((path, read_state(path)))
            except FileNotFoundError:
                if path.exists():  # a removal renames the folder first
                    raise
    return sorted(states, key=lambda pair: (pair[1].epoch, pair[1].step))
