"""The section ``[placement]``: how the engines and the trainer of a run share GPUs. Read by trainer and workers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.protocol.config.connection import Section


class PlacementSettings(Section):
    """How engines and trainer share a GPU."""

    shared: Literal["auto", "beside", "turns", "never"] = Field(
        "auto",
        description="An engine and the trainer on one GPU. 'turns': one has its memory there at a time, the engine releases weights, keys "
        "and values, the trainer moves its states to host memory; 'beside': both keep it there; 'never': they have GPUs of their own. "
        "'auto' takes no turns, and `penstock plan` says whether both fit beside each other.",
    )
    devices: tuple[str, ...] = Field(
        (),
        description="UUIDs of the GPUs that this process shares, in the order of CUDA_VISIBLE_DEVICES: the trainer's local rank r has the "
        "r-th, a worker all of them. None: those that CUDA shows, as NVML names them.",
    )
    lock_dir: Path | None = Field(
        None,
        description="Folder for the locks of shared GPUs, which every process of the host that uses one must see: containers need a "
        "common mount. Default: a folder of the user's in the system's folder for temporary files.",
    )
    turn_deadline_s: float = Field(
        3600.0, gt=0, description="Seconds to wait for the turn on a shared GPU before the error that names who has it."
    )

    @property
    def takes_turns(self) -> bool:
        return self.shared == "turns"

    @property
    def lock_folder(self) -> Path:
        return self.lock_dir or Path(tempfile.gettempdir()) / f"penstock-gpus-{os.getuid()}"
