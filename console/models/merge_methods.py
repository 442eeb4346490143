"""How tensors of several models become one; pure, in float32, on flat arrays of equal length.

| method            | formula                                                                                  | source           |
|-------------------|------------------------------------------------------------------------------------------|------------------|
| `linear`          | Σ wᵢ xᵢ / Σ wᵢ                                                                           | arXiv 2203.05482 |
| `slerp`           | on the arc between two tensors, at ``t``; on the line where they are nearly parallel      | Shoemake 1985    |
| `task_arithmetic` | b + λ Σ wᵢ (xᵢ - b)                                                                      | arXiv 2212.04089 |
| `ties`            | b + λ · mean of the largest changes whose sign is the elected one                        | arXiv 2306.01708 |
| `dare`            | b + λ Σ wᵢ mᵢ (xᵢ - b) / density, mᵢ a random mask that keeps ``density`` of the changes | arXiv 2311.03099 |
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from penstock.console.models.tensor_files import Float32s
from penstock.protocol.errors import ConfigError

Method = Literal["linear", "slerp", "task_arithmetic", "ties", "dare"]
METHODS: tuple[Method, ...] = get_args(Method)
_NEARLY_PARALLEL = 0.9995
_ON_A_BASE = ("task_arithmetic", "ties", "dare")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A method with its numbers, for ``num_models`` models."""

    method: Method
    weights: tuple[float, ...]
    t: float = 0.5  # slerp: 0 the first model, 1 the second
    density: float = 0.5  # share of the changes that ties and dare keep
    scale: float = 1.0  # λ
    seed: int = 0  # of dare's masks

    def check(self, *, has_base: bool) -> None:
        """Raise ConfigError for numbers or a base that the method does not fit."""
        if len(self.weights) < 2:
            raise ConfigError("a merge needs at least two models")
        if self.method == "slerp" and len(self.weights) != 2:
            raise ConfigError(f"slerp merges two models, got {len(self.weights)}; use linear for more")
        if has_base != (self.method in _ON_A_BASE):
            raise ConfigError(
                f"{self.method} adds changes to a base model: name it with --base"
                if not has_base
                else f"{self.method} has no base model: leave out --base, or use {', '.join(_ON_A_BASE)}"
            )
        if not 0.0 < self.density <= 1.0 or not 0.0 <= self.t <= 1.0:
            raise ConfigError(f"density {self.density:g} must be above 0 and at most 1, t {self.t:g} between 0 and 1")
        if self.method == "linear" and abs(sum(self.weights)) < 1e-6:
            raise ConfigError("the weights of a linear merge add up to 0; give others")


def merge(recipe: Recipe, models: Sequence[Float32s], base: Float32s | None, name: str) -> Float32s:
    """Return the merged tensor ``name``."""
    if recipe.method == "linear":
        return _sum(models, recipe.weights) / np.float32(sum(recipe.weights))
    if recipe.method == "slerp":
        return slerp(models[0], models[1], recipe.t)
    assert base is not None
    changes = [model - base for model in models]
    if recipe.method == "ties":
        return np.add(base, ties(changes, recipe.weights, recipe.density) * np.float32(recipe.scale), dtype=np.float32)
    if recipe.method == "dare":
        changes = [dare(change, recipe.density, f"{recipe.seed} {n} {name}") for n, change in enumerate(changes)]
    return np.add(base, _sum(changes, recipe.weights) * np.float32(recipe.scale), dtype=np.float32)


def slerp(first: Float32s, second: Float32s, t: float) -> Float32s:
    """Return the point at ``t`` of the arc between two tensors, which are taken as vectors."""
    lengths = float(np.linalg.norm(first)), float(np.linalg.norm(second))
    cosine = float(np.dot(first, second)) / (lengths[0] * lengths[1]) if min(lengths) > 0.0 else 1.0
    if abs(cosine) > _NEARLY_PARALLEL:
        return _sum((first, second), (1.0 - t, t))
    angle = float(np.arccos(cosine))
    return _sum((first, second), (np.sin((1.0 - t) * angle) / np.sin(angle), np.sin(t * angle) / np.sin(angle)))


def ties(changes: Sequence[Float32s], weights: Sequence[float], density: float) -> Float32s:
    """Trim each change to its largest entries, elect a sign for each entry, and average the changes that have it."""
    trimmed = [_largest(change, density) * np.float32(weight) for change, weight in zip(changes, weights, strict=True)]
    elected = np.sign(_sum(trimmed, [1.0] * len(trimmed)))
    total, share = np.zeros_like(changes[0]), np.zeros_like(changes[0])
    for change, weight in zip(trimmed, weights, strict=True):
        agrees = (np.sign(change) == elected) & (change != 0)
        total += np.where(agrees, change, np.float32(0))
        share += np.where(agrees, np.float32(abs(weight)), np.float32(0))
    return np.divide(total, share, out=np.zeros_like(total), where=share > 0)


def dare(change: Float32s, density: float, seed: str) -> Float32s:
    """Keep each entry with probability ``density`` and scale it up, so that the expected change stays."""
    generator = np.random.default_rng(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little"))
    kept = generator.random(len(change), np.float32) < density
    return np.where(kept, change / np.float32(density), np.float32(0))


def _largest(change: Float32s, density: float) -> Float32s:
    keep = max(1, round(density * len(change)))
    if keep >= len(change):
        return change
    sizes = np.abs(change)
    threshold = np.partition(sizes, len(change) - keep)[len(change) - keep]
    return np.where(sizes >= threshold, change, np.float32(0))


def _sum(arrays: Sequence[Float32s], weights: Sequence[float]) -> Float32s:
    total = np.zeros_like(arrays[0])
    for array, weight in zip(arrays, weights, strict=True):
        total += array * np.float32(weight)
    return total


def parse_weights(text: str | None, count: int) -> tuple[float, ...]:
    """Return a weight for each of ``count`` models from ``0.3,0.7``, 1 each without; raises ConfigError."""
    if text is None:
        return (1.0,) * count
    try:
        found = tuple(float(one) for one in text.split(","))
    except ValueError:
        raise ConfigError(f"--weights {text!r}: expected numbers, comma-separated") from None
    if len(found) != count or not np.isfinite(found).all():
        raise ConfigError(f"--weights {text!r}: expected {count} numbers, one for each model")
    return found
