"""The batch at which a run stopped by itself, in the run's folder, for people to look at and to train on again.

```
stopped/step00000012/batch.json      step, version, why, and every group as it was scored
                     groups.parquet  their trajectories, a pack as workers store them: `protocol/packs/group_pack.py`
```

The packs in the object store may expire; the folder stays until somebody removes it. A run that stops at the same step again
replaces it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from penstock.protocol.packs import group_pack
from penstock.protocol.record.stopped_batch import BATCH, FOLDER, GROUPS, StoppedBatch
from penstock.trainer.learner.step_plan import ReadyGroup

_PARTIAL = ".partial"


def save_batch(
    run_folder: Path, batch: Sequence[ReadyGroup], *, run_id: str, step: int, version: int, reason: str
) -> Path:
    """Save the groups of a batch below a run's folder, and return where; raises OSError.

    Args:
        run_folder: The run's own folder.
        batch: The groups, in the order of their use.
        run_id: The run.
        step: Number of the step that was to be made.
        version: Of the weights before it.
        reason: Why the run stopped.
    """
    folder = run_folder / FOLDER / f"step{step:08d}"
    partial = folder.with_name(folder.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    scored = tuple(
        group.scored.model_copy(update={"generated": group.scored.generated.model_copy(update={"row_group": number})})
        for number, group in enumerate(batch)
    )
    document = StoppedBatch(run_id=run_id, step=step, version=version, reason=reason, groups=scored)
    _write(partial / GROUPS, group_pack.encode([group.group for group in batch]))
    _write(partial / BATCH, document.model_dump_json(indent=1).encode() + b"\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
