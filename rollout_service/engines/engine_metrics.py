"""What an engine tells about itself on its metrics page, under the worker's names; pure.

| figure                         | SGLang's sample                    | of several engines |
|--------------------------------|------------------------------------|--------------------|
| `engine_running`               | `num_running_reqs`                 | sum                |
| `engine_queued`                | `num_queue_reqs`                   | sum                |
| `engine_paused`                | `num_paused_reqs`                  | sum                |
| `engine_tokens_per_s`          | `gen_throughput`                   | sum                |
| `engine_generated_tokens`      | `generation_tokens_total`          | sum                |
| `engine_prompt_tokens`         | `prompt_tokens_total`              | sum                |
| `engine_cached_tokens`         | `cached_tokens_total`              | sum                |
| `engine_aborted`               | `num_aborted_requests_total`       | sum                |
| `engine_retracted`             | `num_retracted_requests_total`     | sum                |
| `engine_kv_usage`              | `token_usage`                      | mean               |
| `engine_cache_hit_rate`        | `cache_hit_rate`                   | mean               |

Counters count since the engine started, not since the worker did.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

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
_SHARES = frozenset({"engine_kv_usage", "engine_cache_hit_rate"})
_SAMPLE = re.compile(r"^sglang:(\w+)(?:\{.*\})? (\S+)", re.MULTILINE)


def read_figures(exposition: str) -> dict[str, float]:
    """Return the figures of one engine from its metrics page; samples of one name with other labels are added up."""
    found: dict[str, list[float]] = {}
    for name, text in _SAMPLE.findall(exposition):
        if name in _NAMES:
            value = _number(text)
            if value is not None:
                found.setdefault(_NAMES[name], []).append(value)
    return {name: _together(name, values) for name, values in found.items()}


def add_figures(engines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the figures of several engines as those of one."""
    names = {name for figures in engines for name in figures}
    return {name: _together(name, [figures[name] for figures in engines if name in figures]) for name in sorted(names)}


def _together(name: str, values: Sequence[float]) -> float:
    return sum(values) / len(values) if name in _SHARES else sum(values)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
