"""A placement: which GPUs of one machine the engines and the ranks of a run use, as a value and as text; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.protocol.errors import ConfigError
from penstock.protocol.metrics.gpu import Gpu

_GB = 1e9


class DoesNotFit(ConfigError):
    """The roles do not fit on the GPUs. ``settings`` are SECTION.KEY=VALUE with which they would; () if none are known."""

    def __init__(self, text: str, settings: Sequence[str] = (), *, of_trainer: bool = False) -> None:
        super().__init__(text)
        self.settings = tuple(settings)
        self.of_trainer = of_trainer


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of every process; without GPUs all of it is empty, and nothing is changed."""

    gpus: tuple[Gpu, ...] = ()
    engines: tuple[tuple[Gpu, ...], ...] = ()  # of each engine
    trainer: tuple[Gpu, ...] = ()  # of each rank
    num_workers: int | None = None  # None: engines need no GPU, so that it does not depend on them
    zero_stage: int | None = None
    is_shared: bool = False
    takes_turns: bool = False  # on the shared GPUs
    engine_fraction: float | None = None  # of the memory of a shared GPU, for weights, keys and values
    reason: str = ""
    notes: tuple[str, ...] = ()

    def of_worker(self, number: int) -> tuple[Gpu, ...]:
        each = self.engines_of_worker
        return tuple(gpu for engine in self.engines[number * each : (number + 1) * each] for gpu in engine)

    @property
    def engines_of_worker(self) -> int:
        return len(self.engines) // (self.num_workers or 1)

    @property
    def engine_size(self) -> int:
        return len(self.engines[0]) if self.engines else 0

    @property
    def rest(self) -> tuple[Gpu, ...]:
        taken = {gpu.number for gpus in (*self.engines, self.trainer) for gpu in gpus}
        return tuple(gpu for gpu in self.gpus if gpu.number not in taken)

    def lines(self) -> list[str]:
        """Return the decision and its reason, then what was left out."""
        if not self.gpus:
            return []
        roles = []
        if self.engines:
            workers = f", {self.num_workers} workers" if (self.num_workers or 1) > 1 else ""
            part = f", {self.engine_fraction:.2f} of the memory" if self.engine_fraction else ""
            gpus = [gpu for engine in self.engines for gpu in engine]
            roles.append(f"{numbers(gpus)} engines ({len(self.engines)} x tp {self.engine_size}{workers}{part})")
        if self.trainer:
            ranks = f"{len(self.trainer)} rank{'s' if len(self.trainer) > 1 else ''}"
            stage = "" if self.zero_stage is None else f", ZeRO {self.zero_stage}"
            roles.append(f"{numbers(self.trainer)} trainer ({ranks}{stage})")
        left_out = {note.partition(":")[0] for note in self.notes}
        idle = (
            [gpu for gpu in self.rest if f"GPU {gpu.number}" not in left_out] if self.engines and self.trainer else []
        )
        unused = [f"{numbers(idle)}: not used, free for rewards"] if idle else []
        return [f"{', '.join(roles)}{f': {self.reason}' if self.reason else ''}", *self.notes, *unused]

    def document(self) -> dict[str, Any]:
        return {
            "gpus": [
                {"number": g.number, "id": g.id, "name": g.name, "total": g.total, "used": g.used} for g in self.gpus
            ],
            "engines": [[gpu.number for gpu in engine] for engine in self.engines],
            "trainer": [gpu.number for gpu in self.trainer],
            "workers": self.num_workers,
            "zero_stage": self.zero_stage,
            "is_shared": self.is_shared,
            "takes_turns": self.takes_turns,
            "engine_fraction": self.engine_fraction,
            "says": self.lines(),
        }


def numbers(gpus: Sequence[Gpu]) -> str:
    """Return ``GPU 0-3, 6`` of GPUs by their numbers."""
    parts: list[list[int]] = []
    for number in sorted(gpu.number for gpu in gpus):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return "GPU " + ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def gb(size: float) -> str:
    return f"{size / _GB:.1f} GB"
