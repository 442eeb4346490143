"""The batch at which a run stopped by itself, in the run's folder, for people to look at and to train on again.

```
stopped/step00000012/batch.json      step, version, why, and every group as it was scored
                     config.json     the settings of the session, as in the run's record
                     groups.parquet  their trajectories, a pack as workers store them: `protocol/packs/group_pack.py`
```

The packs in the object store may expire; the folder stays until somebody removes it. A run that stops at the same step again
replaces it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.protocol import files
from penstock.protocol.packs import group_pack
from penstock.protocol.record.stopped_batch import BATCH, FOLDER, GROUPS, SETTINGS, StoppedBatch
from penstock.trainer.learner.step_plan import ReadyGroup

_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class Stop:
    run_id: str
    step: int  # number of the step that was to be made
    version: int  # of the weights before it
    error: Exception
    epoch: int = 0  # of the trainer's lease
    algorithm: Mapping[str, Any] = field(default_factory=dict)  # the algorithm's state before the step


def save_batch(run_folder: Path, batch: Sequence[ReadyGroup], stop: Stop, *, config: bytes) -> Path:
    """Save the groups of a batch below a run's folder, in the order of their use, and return where; raises OSError.

    ``config`` are the session's settings as JSON, with which `penstock replay RUN --batch` trains on the batch again.
    """
    folder = run_folder / FOLDER / f"step{stop.step:08d}"
    partial = folder.with_name(folder.name + _PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    scored = tuple(
        group.scored.model_copy(update={"generated": group.scored.generated.model_copy(update={"row_group": number})})
        for number, group in enumerate(batch)
    )
    document = StoppedBatch(
        run_id=stop.run_id,
        step=stop.step,
        version=stop.version,
        reason=str(stop.error),
        error=type(stop.error).__name__,
        epoch=stop.epoch,
        algorithm=dict(stop.algorithm),
        groups=scored,
    )
    files.atomic_write(partial / SETTINGS, config, sync=True)
    files.atomic_write(partial / GROUPS, group_pack.encode([group.group for group in batch]), sync=True)
    files.atomic_write(partial / BATCH, document.model_dump_json(indent=1).encode() + b"\n", sync=True)
    shutil.rmtree(folder, ignore_errors=True)
    files.replace(partial, folder)
    return folder
