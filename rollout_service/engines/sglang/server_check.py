"""What a SGLang server reports of its own start, checked against what the contract relies on; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.rollout_service.engines.engine_client import ServerReport

TESTED_VERSIONS = ("0.5.23",)  # `make test-sglang` runs the contract against these


def report_of(info: Mapping[str, Any]) -> ServerReport:
    """Read ``/server_info``; the embedded engine and other versions of SGLang may leave out any of it."""
    version, length = info.get("version"), info.get("context_length")
    return ServerReport(
        objections=objections(info),
        untested_version="" if version is None or str(version) in TESTED_VERSIONS else str(version),
        context_tokens=length if isinstance(length, int) and length > 0 else None,
        takes_adapters=bool(info.get("enable_lora")),
    )


def objections(info: Mapping[str, Any]) -> list[str]:
    """Return why a server cannot be used; empty when it can, or when it does not report the flag."""
    reasons: list[str] = []
    if info.get("skip_tokenizer_init"):
        reasons.append("--skip-tokenizer-init: completions would have no text to be rewarded")
    if info.get("tokenizer_worker_num", 1) != 1:
        reasons.append("--tokenizer-worker-num above 1: each worker names another weight version after an update")
    if info.get("enable_deterministic_inference"):
        reasons.append(
            "--enable-deterministic-inference: without a seed of its own for each, all samples of a group are the same"
        )
    if info.get("weight_cache_mode", "off") not in ("off", None):
        reasons.append("--weight-cache-mode: the server crashes at its first update")
    return reasons
