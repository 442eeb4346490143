"""What a vLLM server reports of its own start, checked against what the contract relies on; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.rollout_service.engines.engine_client import ServerReport

TESTED_VERSIONS = ("0.32.0",)  # the contract ran against a CPU build of these


def report_of(version: str, info: Mapping[str, Any]) -> ServerReport:
    """Read ``/version`` and the JSON form of ``/server_info``."""
    config = info.get("vllm_config")
    config = config if isinstance(config, dict) else {}
    model = config.get("model_config")
    model = model if isinstance(model, dict) else {}
    length = model.get("max_model_len")
    return ServerReport(
        objections=_objections(model),
        untested_version="" if version in TESTED_VERSIONS else version,
        context_tokens=length if isinstance(length, int) and length > 0 else None,
        takes_adapters=bool(config.get("lora_config")),
    )


def _objections(model: Mapping[str, Any]) -> list[str]:
    reasons: list[str] = []
    mode = model.get("logprobs_mode")
    if mode != "processed_logprobs":
        reasons.append(
            f"--logprobs-mode {mode}: log-probabilities must be those of the sampled distribution, 'processed_logprobs'"
        )
    if model.get("skip_tokenizer_init"):
        reasons.append("--skip-tokenizer-init: the server would not know the model's end token")
    return reasons
