"""What the training thread hands over: one version's weights on the CPU, as they were when the step ended."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from protocol.versions import PolicyVersion


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version; nobody writes to its tensors."""

    version: PolicyVersion
    step: int
    tensors: dict[str, Tensor]
    dtype: str
    must_publish: bool = False  # an evaluation is pinned to it, or it is the last
