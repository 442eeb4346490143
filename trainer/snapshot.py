"""What the training thread hands over: one version's weights on the CPU, as they were when the step ended.

A run that publishes adapters hands over the low-rank factors alone; the model that they sit upon, its base, is
published once and never changes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.adapter_format import AdapterConfig, adapter_digest
from protocol.versions import PolicyVersion
from protocol.weights_digest import TensorDigest, tensor_digest, weights_digest


class Base:
    """The model that adapters sit upon, as it is published, and how they count."""

    def __init__(self, tensors: Mapping[str, Tensor], config: AdapterConfig) -> None:
        """Nobody writes to ``tensors`` any more; ``config`` is the same for all adapters of a run."""
        self.tensors = dict(tensors)
        self.config = config.to_json()

    @functools.cached_property
    def root(self) -> str:
        """The `weights_digest` of the model; computed when it is first asked for."""
        return snapshot_digest(self.tensors)


@dataclass(frozen=True, slots=True)
class Weights:
    """What is published of a policy: a whole model, or an adapter's tensors and the base they sit upon."""

    tensors: dict[str, Tensor]
    base: Base | None = None

    def root(self) -> str:
        """Return the root of the weights that this is served as, as manifests and the run's record carry it."""
        if self.base is None:
            return snapshot_digest(self.tensors)
        return adapter_digest(self.base.root, hashlib.sha256(self.base.config).hexdigest(), _digests(self.tensors))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version; nobody writes to its tensors."""

    version: PolicyVersion
    step: int
    tensors: dict[str, Tensor]
    dtype: str
    must_publish: bool = False  # an evaluation is pinned to it, or it is the last
    base: Base | None = None  # what ``tensors`` are an adapter of; None of a whole model


def snapshot_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the `weights_digest` of tensors on the CPU, under the names they are published with."""
    return weights_digest(_digests(tensors))


def _digests(tensors: Mapping[str, Tensor]) -> Iterator[TensorDigest]:
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield tensor_digest(name, dtype, tuple(tensor.shape), flat.numpy().data)
