"""Steps that a crash rolled back, as the lines of `metrics.jsonl` after the checkpoint list them.

Made again of the same groups, in the same order, they make the same weights: the trainer holds all these groups again, since
none of them was acknowledged. A session keeps what it is to make again in the run's folder, so that the next one can go on if
this one is killed before it is through.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from penstock.protocol import files
from penstock.protocol.groups import Count, Wire
from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.record.lineage import STEP_DIGEST, StepDigest

_FILE = "rolled_back.json"


@dataclass(frozen=True, slots=True)
class RolledBackSteps:
    batches: tuple[tuple[str, ...], ...] = ()  # of each step, the first digits of its groups' digests in order
    # (until, first) of `Remade`, once a step is made again; until None: the version that the session starts with
    marks: tuple[tuple[int | None, int], ...] = ()
    path: Path | None = None  # where they are kept

    def forget(self) -> None:
        """Let no later session go on with them: this one makes other steps; raises OSError."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class _Kept(Wire):
    """The content of the file."""

    after: Count  # version of the checkpoint that the session resumed
    step: Count  # steps done there
    batches: tuple[tuple[str, ...], ...]
    marks: tuple[tuple[Count | None, Count], ...]


def read_lines(lines: bytes, *, steps_done: int) -> RolledBackSteps:
    """Return the steps of the lines that follow ``steps_done``, up to one whose groups are not listed."""
    versions, batches = list[int](), list[tuple[str, ...]]()
    for line in lines.splitlines():
        try:
            row = json.loads(line)
            if row["kind"] != "step":
                continue
            groups = tuple(StepDigest.model_validate(row[STEP_DIGEST]).listed())
            step, version = int(row["step"]), int(row["version"])
        except (ValueError, KeyError, TypeError):
            break
        if not groups or step != steps_done + len(batches) + 1 or (versions and version != versions[-1] + 1):
            break
        versions.append(version)
        batches.append(groups)
    return RolledBackSteps(tuple(batches), ((None, versions[0]),)) if versions else RolledBackSteps()


def take_rolled_back(folder: Path, lines: bytes, resumed: CheckpointState | None) -> RolledBackSteps:
    """Return the steps to make again after a checkpoint, and keep them in the run's folder; raises OSError."""
    after, step = (resumed.version, resumed.step) if resumed is not None else (0, 0)
    rolled_back = read_lines(lines, steps_done=step)
    try:
        kept = _Kept.model_validate_json((folder / _FILE).read_bytes())
    except (OSError, ValidationError):
        kept = None
    if kept is not None:
        rolled_back = _go_on(rolled_back, kept, resumed, after=after, step=step)
    document = _Kept(after=after, step=step, batches=rolled_back.batches, marks=rolled_back.marks)
    files.atomic_write(folder / _FILE, document.model_dump_json().encode())
    return replace(rolled_back, path=folder / _FILE)


def _go_on(
    rolled_back: RolledBackSteps, kept: _Kept, resumed: CheckpointState | None, *, after: int, step: int
) -> RolledBackSteps:
    """Add the rest of what the session before was to make again, if it was killed while it did that."""
    start_version: int | None = None  # the version that the session before started with, if a checkpoint has it
    num_done = step - kept.step
    if kept.after != after:
        start_version = dict(resumed.abandoned if resumed is not None else ()).get(kept.after)
        remade = {(until, first): num for until, first, num in (resumed.remade if resumed is not None else ())}
        newest = next((first for until, first in kept.marks if until is None), None)
        if start_version is None or newest is None or remade.get((start_version, newest), 0) < num_done:
            return rolled_back
    rest = kept.batches[max(0, num_done) :]
    if num_done < 0 or rolled_back.batches != rest[: len(rolled_back.batches)]:
        return rolled_back
    marks = [(start_version if until is None else until, first) for until, first in kept.marks]
    return RolledBackSteps(rest, (*marks, *rolled_back.marks)) if rest else rolled_back
