"""SGLang's metrics page by the worker's names; pure. Needs ``--enable-metrics``."""

from __future__ import annotations

from penstock.rollout_service.engines.engine_metrics import read_samples

_NAMES = {
    "num_running_reqs": "engine_running",
    "num_queue_reqs": "engine_queued",
    "num_paused_reqs": "engine_paused",
    "gen_throughput": "engine_tokens_per_s",
    "generation_tokens_total": "engine_generated_tokens",
    "prompt_tokens_total": "engine_prompt_tokens",
    "cached_tokens_total": "engine_cached_tokens",
    "num_aborted_requests_total": "engine_aborted",
    "num_retracted_requests_total": "engine_retracted",
    "token_usage": "engine_kv_usage",
    "cache_hit_rate": "engine_cache_hit_rate",
}


def read_metrics(exposition: str) -> dict[str, float]:
    """Return the metrics of one server from its page in Prometheus' text format."""
    return read_samples(exposition, prefix="sglang", names=_NAMES)
