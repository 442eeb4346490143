"""The engine's metrics in Prometheus' text format, under SGLang's names where SGLang has them."""

from __future__ import annotations

from penstock.rollout_service.embedded_engine.engine_thread import EngineThread

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(engine: EngineThread) -> str:
    """Return the metrics page."""
    counters, running = engine.metrics, engine.num_running
    rows: list[tuple[str, str, str, float]] = [
        ("sglang:num_running_reqs", "gauge", "sequences with keys and values in the cache", running),
        ("sglang:num_queue_reqs", "gauge", "sequences that wait", engine.num_waiting),
        ("sglang:num_paused_reqs", "gauge", "sequences paused in place", running if engine.paused else 0),
        ("sglang:num_used_tokens", "gauge", "tokens in the KV cache", engine.num_stored_tokens),
        ("sglang:prompt_tokens_total", "counter", "prompt tokens of started sequences", counters.prompt_tokens),
        (
            "sglang:cached_tokens_total",
            "counter",
            "prompt tokens that another sequence had computed",
            counters.cached_tokens,
        ),
        ("sglang:generation_tokens_total", "counter", "sampled tokens", counters.generated_tokens),
        ("sglang:num_requests_total", "counter", "sequences answered", counters.finished_sequences),
        ("sglang:num_aborted_requests_total", "counter", "sequences ended early", counters.aborted_sequences),
        ("sglang:num_retracted_requests_total", "counter", "sequences computed again", counters.retractions),
        ("penstock_engine_weight_updates_total", "counter", "weight updates applied", counters.weight_updates),
        ("penstock_engine_kept_tokens", "gauge", "tokens kept for sequences that begin alike", engine.num_kept_tokens),
        ("penstock_engine_evicted_tokens_total", "counter", "kept tokens that made room", engine.num_evicted_tokens),
        ("penstock_engine_busy_seconds_total", "counter", "seconds the engine thread computed", counters.busy_s),
    ]
    lines = []
    for name, kind, meaning, value in rows:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {value}"]
    return "\n".join(lines) + "\n"
