"""What the training thread hands over: one version's weights on the CPU, as they were when the step ended.

A run that publishes adapters hands over the low-rank factors alone; the model that they sit upon, its base, is
published once and never changes. A model lies on the ranks in parts; an adapter, which is small, is rank 0's.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import AdapterConfig, adapter_digest
from penstock.protocol.weights.digest import weights_digest
from penstock.trainer.publishing.weight_buckets import Part, part_of


class Base:
    """The model that adapters sit upon, as it is published, and how they count."""

    def __init__(self, part: Part, config: AdapterConfig, *, root: str | None = None) -> None:
        """``config`` is the same for all adapters of a run; ``root`` of all ranks' parts, None where this one is whole."""
        self.part = part
        self.config = config.to_json()
        self._root = root

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], config: AdapterConfig) -> Base:
        """Copy a whole model."""
        return cls(part_of(tensors), config)

    @functools.cached_property
    def root(self) -> str:
        """The `weights_digest` of the model."""
        return self._root or self.part.state_root

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of this rank's part."""
        return self.part.tensors()


@dataclass(frozen=True, slots=True)
class Weights:
    """What is published of a policy: this rank's part of a model, or an adapter and the base it sits upon."""

    part: Part
    base: Base | None = None
    whole_root: Callable[[], str] | None = None  # of all ranks' parts; None where this one is whole

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], base: Base | None = None) -> Weights:
        """Copy a whole model, or with a base an adapter."""
        return cls(part_of(tensors, **({} if base is None else {"bucket_bytes": sys.maxsize})), base)

    def root_later(self) -> Callable[[], str]:
        """Return what will say the root, without holding on to the weights."""
        if self.whole_root is not None:
            return self.whole_root
        hashed, base = self.part.hashed, self.base
        if base is None:
            return lambda: weights_digest(hashed.result())
        config = hashlib.sha256(base.config).hexdigest()
        return lambda: adapter_digest(base.root, config, hashed.result())

    def root(self) -> str:
        """Return the root of the weights that this is served as, as manifests and the run's record carry it."""
        return self.root_later()()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version; the other ranks hold their parts of a model under the same ``part.taken``."""

    version: PolicyVersion
    step: int
    part: Part  # this rank's
    dtype: str
    must_publish: bool = False  # an evaluation is pinned to it, or it is the last
    base: Base | None = None  # what ``part`` is an adapter of; None of a model
