"""vLLM's metrics page by the worker's names; pure."""

from __future__ import annotations

from penstock.rollout_service.engines.engine_metrics import read_samples

_NAMES = {
    "num_requests_running": "engine_running",
    "num_requests_waiting": "engine_queued",
    "generation_tokens_total": "engine_generated_tokens",
    "prompt_tokens_total": "engine_prompt_tokens",
    "prompt_tokens_cached_total": "engine_cached_tokens",
    "num_preemptions_total": "engine_retracted",
    "kv_cache_usage_perc": "engine_kv_usage",
}


def read_metrics(exposition: str) -> dict[str, float]:
    """Return the metrics of one server from its page in Prometheus' text format."""
    return read_samples(exposition, prefix="vllm", names=_NAMES)
