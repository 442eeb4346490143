"""What turns one version of the weights into another, for engines that change single words where they serve them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.versions import PolicyVersion

LOAD_WAYS = (
    "patch",
    "chain",
    "dense",
    "unmapped",
    "refused",
    "unsupported",
)  # of a version: by patch, or why from its folder
# Why a version cannot be a patch: no stored patches lead to it from the served one, or too many words changed.
NoChanges: TypeAlias = Literal["chain", "dense"]


NUM_THREADS = min(
    16, os.cpu_count() or 1
)  # that find and place changes; each holds little memory, unlike a bucket that is fetched


@dataclass(frozen=True, slots=True)
class TensorChange:
    name: str
    dtype: str  # as `layout.TensorSpec` spells it
    positions: NDArray[np.int64]  # [n], strictly increasing, in the tensor's values in row-major order
    new: NDArray[Any]  # [n] words, unsigned integers
    old: NDArray[Any]  # [n]


@dataclass(frozen=True, slots=True)
class WeightChanges:
    base: PolicyVersion
    version: PolicyVersion
    num_words: int  # of the whole model
    tensors: tuple[TensorChange, ...]

    @property
    def num_changed(self) -> int:
        return sum(len(tensor.positions) for tensor in self.tensors)


@runtime_checkable
class TakesChanges(Protocol):
    """An engine, or the client of one, that can load a version as a change of the version it serves."""

    @property
    def max_changed_share(self) -> float:
        """The largest share of changed words that it loads faster than a folder; 0.0: it takes no changes."""
        ...

    async def stage(self, changes: WeightChanges | NoChanges) -> None:
        """Prepare all that needs no pause, so that the next load of that version may change the weights in place.

        A load whose changes were not staged, or do not fit the weights that are served, reads the folder.
        """
        ...


def max_changed_share(engine: object) -> float:
    return engine.max_changed_share if isinstance(engine, TakesChanges) else 0.0


async def stage_changes(engine: object, changes: WeightChanges | NoChanges) -> None:
    if isinstance(engine, TakesChanges):
        await engine.stage(changes)
