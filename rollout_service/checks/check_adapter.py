"""Check before every load that a folder holds an adapter for these base weights.

SGLang 0.5.23 crashes at the first request when a shape is wrong, generates garbage from a NaN, and silently ignores
tensors that it has no name for. Blocking: reads the adapter, and the headers of the base weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from penstock.rollout_service.checks.adapter_shapes import pair_tensors, read_config
from penstock.rollout_service.checks.check_weights import read_file, read_header
from penstock.rollout_service.errors import AdapterUnfit, WeightsNotApplied


def check_adapter(folder: Path, version: PolicyVersion, base: Path) -> None:
    """Raise WeightsNotApplied for an adapter that is incomplete, not finite, or does not fit the model in ``base``."""
    try:
        config = read_config(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")))
        found = {name: sizes for name, (_, sizes) in read_file(folder / ADAPTER_WEIGHTS).items()}
        weights: dict[str, tuple[int, ...]] = {}
        for file in sorted(base.glob("*.safetensors")):
            weights |= {name: tuple(entry["shape"]) for name, entry in read_header(file)[0].items()}
        pair_tensors(config, found, weights)
    except (OSError, ValueError, KeyError, TypeError, AdapterUnfit) as err:
        raise WeightsNotApplied(f"adapter of version {version} in {folder}: {err}") from None
