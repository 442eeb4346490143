"""What a server tells about itself, held against what the contract rests on; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TESTED_VERSIONS = ("0.5.23",)  # `make test-sglang` runs the contract against these


def objections(info: Mapping[str, Any]) -> list[str]:
    """Return why a server cannot be used, from its ``/server_info``; empty when it can.

    A server that does not say something (the embedded engine, another version of SGLang) is not blamed for it.
    """
    reasons: list[str] = []
    if info.get("skip_tokenizer_init"):
        reasons.append("--skip-tokenizer-init: completions would have no text to be rewarded")
    if info.get("tokenizer_worker_num", 1) != 1:
        reasons.append("--tokenizer-worker-num above 1: each of them knows another weight version after an update")
    if info.get("enable_deterministic_inference"):
        reasons.append(
            "--enable-deterministic-inference: without a seed of its own for each, all samples of a group are the same"
        )
    if info.get("weight_cache_mode", "off") not in ("off", None):
        reasons.append("--weight-cache-mode: the server dies of its first update")
    return reasons


def is_tested(info: Mapping[str, Any]) -> bool:
    """Say whether a server is of a version that the contract was tested with; one that names none is ours."""
    return info.get("version") is None or str(info["version"]) in TESTED_VERSIONS


def context_length(info: Mapping[str, Any]) -> int | None:
    """Return the context a server was limited to; None: the model's own."""
    value = info.get("context_length")
    return value if isinstance(value, int) and value > 0 else None
