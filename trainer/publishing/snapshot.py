"""What the training thread submits: the weights of one version on the CPU, as they were when the step ended.

A model is split over the ranks by buckets. A run that publishes adapters submits the low-rank factors alone, which
are small and complete on rank 0; the model that they are applied to, their base, is published once and never changes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import AdapterConfig, adapter_digest
from penstock.protocol.weights.digest import weights_digest
from penstock.trainer.publishing.weight_buckets import WeightBuckets, copy_to_buckets


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """The model that a run's adapters are applied to, as it is published: this rank's buckets of it."""

    buckets: WeightBuckets
    config: AdapterConfig  # the same for all adapters of a run
    root: str  # the `weights_digest` over all ranks' buckets


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model to publish: this rank's buckets of it."""

    buckets: WeightBuckets
    all_ranks_root: Callable[[], str] | None = None  # root over all ranks' buckets; None if all are here

    def root_later(self) -> Callable[[], str]:
        """Return a function that returns the root, without a reference to the weights."""
        if self.all_ranks_root is not None:
            return self.all_ranks_root
        hashed = self.buckets.hashed
        return lambda: weights_digest(hashed.result())

    def root(self) -> str:
        """Return the root of the weights, as manifests and the run's record store it."""
        return self.root_later()()


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter to publish: its factors in one bucket, and the base that it is applied to."""

    buckets: WeightBuckets
    base: AdapterBase

    @classmethod
    def of(cls, factors: Mapping[str, Tensor], base: AdapterBase, *, copy_id: int = 0) -> AdapterWeights:
        """Copy an adapter's factors."""
        return cls(copy_to_buckets(factors, copy_id=copy_id, bucket_bytes=sys.maxsize), base)

    def root_later(self) -> Callable[[], str]:
        """Return a function that returns the root, without a reference to the factors."""
        hashed, base = self.buckets.hashed, self.base
        config = hashlib.sha256(base.config.to_json()).hexdigest()
        return lambda: adapter_digest(base.root, config, hashed.result())

    def root(self) -> str:
        """Return the root of the weights that base and adapter make, as manifests and the run's record store it."""
        return self.root_later()()


Weights = ModelWeights | AdapterWeights
W = TypeVar("W", ModelWeights, AdapterWeights, Weights)


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[W]):
    """One version; the other ranks hold their buckets of a model under the same ``weights.buckets.copy_id``."""

    version: PolicyVersion
    step: int
    weights: W
    dtype: str
    must_publish: bool = False  # never skipped: an evaluation needs this version, or it is the last
