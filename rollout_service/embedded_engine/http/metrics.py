"""The numbers of this process in Prometheus' text format, under SGLang's names where SGLang has them."""

from __future__ import annotations

from penstock.rollout_service.embedded_engine.engine_thread import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(engine: Engine) -> str:
    """Return the exposition of every figure."""
    figures, running = engine.figures, engine.num_running
    rows: list[tuple[str, str, str, float]] = [
        ("sglang:num_running_reqs", "gauge", "sequences that hold keys and values", running),
        ("sglang:num_queue_reqs", "gauge", "sequences that wait", engine.num_waiting),
        ("sglang:num_paused_reqs", "gauge", "sequences paused in place", running if engine.paused else 0),
        ("sglang:num_used_tokens", "gauge", "tokens in KV memory", engine.num_stored_tokens),
        ("sglang:prompt_tokens_total", "counter", "prompt tokens of started sequences", figures.prompt_tokens),
        ("sglang:cached_tokens_total", "counter", "of these, shared with another sequence", figures.cached_tokens),
        ("sglang:generation_tokens_total", "counter", "sampled tokens", figures.generated_tokens),
        ("sglang:num_requests_total", "counter", "sequences answered", figures.finished_sequences),
        ("sglang:num_aborted_requests_total", "counter", "sequences ended early", figures.aborted_sequences),
        ("sglang:num_retracted_requests_total", "counter", "sequences computed anew", figures.retractions),
        ("penstock_engine_weight_updates_total", "counter", "weights put into service", figures.weight_updates),
        ("penstock_engine_busy_seconds_total", "counter", "seconds the engine thread computed", figures.busy_s),
    ]
    lines = []
    for name, kind, meaning, value in rows:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {value}"]
    return "\n".join(lines) + "\n"
