"""The memory of a rank in `penstock plan`: reads the shape of the model, and the flags of the limit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from penstock.deploy.plan.memory import report
from penstock.deploy.plan.memory.memory_plan import MemoryPlan
from penstock.deploy.plan.memory.model_shape import ModelShape, read_shape
from penstock.deploy.plan.memory.plan_inputs import plan_inputs
from penstock.deploy.plan.memory.suggestions import suggestions
from penstock.protocol.errors import ConfigError
from penstock.trainer.settings import TrainerSettings

_UNITS = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30, "TB": 10**12, "TiB": 2**40}


class RankMemory:
    """What a rank of a run needs, and the settings with which it fits into a limit."""

    def __init__(self, settings: TrainerSettings, *, limit: int | None, on_gpu: bool) -> None:
        """Estimate it; raises NotEstimated, with the reason.

        Args:
            settings: The run.
            limit: Bytes that a rank may use; None: not compared.
            on_gpu: Count what lies on the device that trains; False: host and device together, as where the CPU trains.
        """
        inputs = plan_inputs(
            settings,
            read_shape(settings.model.path, "model.path"),
            reference=_shape(settings.algorithm.reference_path, "algorithm.reference_path"),
            critic=_shape(settings.critic.path, "critic.path"),
        )
        self._plan, self._limit, self._on_gpu = MemoryPlan(inputs), limit, on_gpu
        self._found = [] if limit is None or self.fits else suggestions(inputs, limit, on_gpu=on_gpu)

    @property
    def fits(self) -> bool:
        """False if the estimate is above the limit."""
        return self._limit is None or self._plan.peak(on_gpu=self._on_gpu) <= self._limit

    def text(self) -> str:
        """Return the section of the plan's report."""
        return report.text(self._plan, limit=self._limit, on_gpu=self._on_gpu, found=self._found)

    def document(self) -> dict[str, Any]:
        """Return the same as a JSON object; sizes in bytes."""
        return report.document(self._plan, limit=self._limit, on_gpu=self._on_gpu, found=self._found)


def parse_size(given: str, flag: str) -> int:
    """Return the bytes of a size such as 24GB or 80GiB; raises ConfigError, which names the flag."""
    size = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?) ?([MGT]i?B)", given)
    if size is None or float(size[1]) == 0.0:
        raise ConfigError(f"{flag} {given}: expected a size such as 24GB, 80GiB or 900MB")
    return int(float(size[1]) * _UNITS[size[2]])


def _shape(path: Path | None, key: str) -> ModelShape | None:
    return None if path is None else read_shape(path, key)
