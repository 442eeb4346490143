"""What turns one version of the weights into another, for engines that change single words where they serve them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.protocol.versions import PolicyVersion

if TYPE_CHECKING:
    from penstock.rollout_service.engines.engine_client import UpdateMode

# Of a version: by patch, or why from its folder.
LOAD_WAYS = ("patch", "chain", "dense", "unmapped", "refused", "withdrawn", "unsupported")
# Why a version cannot be a patch: no stored patches lead to it from the served one, too many words changed, or one that was is withdrawn.
NoChanges: TypeAlias = Literal["chain", "dense", "withdrawn"]
# That find and place changes; each holds little memory, unlike a bucket that is fetched.
NUM_THREADS = min(16, os.cpu_count() or 1)


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

    async def stage(self, changes: WeightChanges | NoChanges) -> bool:
        """Prepare all of a change that needs no pause; False where the version must be loaded from its folder."""
        ...

    async def patch(self, version: PolicyVersion, mode: UpdateMode = "drain") -> bool:
        """Change the weights in place as it was staged for a version, which has no folder yet; ``mode`` is that of a load.

        Returns False, and serves what it did, when nothing fitting is staged or the server refuses. Raises EngineError when the weights
        are unknown afterwards.
        """
        ...
