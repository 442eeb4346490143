"""vLLM's replies → completions, checksums, server reports and metrics; pure. A reply that contradicts itself is refused as a whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.rollout_service.engines.completion import (
    Completion,
    EngineChecksum,
    check_tokens,
    read_version_runs,
    shorten,
)
from penstock.rollout_service.engines.engine_client import ServerReport, read_samples
from penstock.rollout_service.errors import EngineAborted, ReplyRefused

_METRICS = {
    "num_requests_running": "engine_running",
    "num_requests_waiting": "engine_queued",
    "generation_tokens_total": "engine_generated_tokens",
    "prompt_tokens_total": "engine_prompt_tokens",
    "prompt_tokens_cached_total": "engine_cached_tokens",
    "num_preemptions_total": "engine_retracted",
    "kv_cache_usage_perc": "engine_kv_usage",
}
TESTED_VERSIONS = ("0.32.0",)  # the contract ran against a CPU build of these


def read_metrics(exposition: str) -> dict[str, float]:
    return read_samples(exposition, prefix="vllm", names=_METRICS)


def report_of(version: str, info: Mapping[str, Any]) -> ServerReport:
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


def read_completions(answer: Any, limits: Sequence[int], *, interrupted: bool) -> list[Completion]:
    """Read the reply of ``/inference/v1/generate``, one choice for each of ``limits``, the tokens it may have.

    Raises ReplyRefused or EngineAborted, naming what does not fit. The engine may have aborted a choice of an
    ``interrupted`` request, even before its first token: its tokens so far are returned with the finish reason
    ``"abort"``. The texts are empty: this API returns token ids.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != len(limits):
        got = f"{len(choices)} choices" if isinstance(choices, list) else shorten(answer)
        raise ReplyRefused(f"expected {len(limits)} choices, got {got}")
    try:
        ordered = sorted(choices, key=lambda choice: choice["index"])
        numbers = [choice["index"] for choice in ordered]
    except (KeyError, TypeError) as err:
        raise ReplyRefused(f"choices do not have vLLM's form ({err!r}): {shorten(choices)}") from None
    if numbers != list(range(len(limits))):
        raise ReplyRefused(f"expected choices 0 to {len(limits) - 1}, got {numbers}")
    return [_completion(choice, limit, interrupted) for choice, limit in zip(ordered, limits, strict=True)]


def _completion(choice: dict[str, Any], limit: int, interrupted: bool) -> Completion:
    finish = choice.get("finish_reason")
    is_part = interrupted and finish == "abort"
    if finish == "abort" and not is_part:
        raise EngineAborted(f"the engine aborted a generation: {shorten(choice.get('stop_reason'))}")
    if finish not in ("stop", "length", "abort"):
        raise ReplyRefused(f"unknown finish reason {shorten(finish)}")
    try:
        token_ids: list[int] = choice["token_ids"] or []
        content = (choice.get("logprobs") or {}).get("content") or []
        logprob_ids = [entry["token_id"] for entry in content]
        logprobs = [entry["logprob"] for entry in content]
    except (KeyError, TypeError, AttributeError) as err:
        raise ReplyRefused(f"a choice does not have vLLM's form ({err!r}): {shorten(choice)}") from None
    check_tokens(token_ids, logprob_ids, logprobs, at_least=0 if is_part else 1, at_most=limit)
    runs = read_version_runs(choice.get("weight_versions"), len(token_ids), engine="vLLM")
    return Completion(token_ids, logprobs, runs, finish, "")


def read_checksum(answer: Any) -> EngineChecksum | None:
    """Read the reply to ``/weight_checker``: one digest for each tensor of each rank; None when it holds none."""
    digests = answer.get("checksums") if isinstance(answer, dict) else None
    if not isinstance(digests, dict) or not digests:
        return None
    return EngineChecksum(_digest(digests), f"{len(digests)}-{_digest(sorted(digests))[:12]}")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
