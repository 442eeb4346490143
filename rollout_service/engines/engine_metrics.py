"""An engine's metrics by the worker's names; pure. Each engine's package translates its own names.

| metric                         | of several engines | meaning                                    |
|--------------------------------|--------------------|--------------------------------------------|
| `engine_running`               | sum                | sequences decoding                         |
| `engine_queued`                | sum                | sequences waiting                          |
| `engine_paused`                | sum                | sequences paused by an update              |
| `engine_tokens_per_s`          | sum                | tokens decoded per second                  |
| `engine_generated_tokens`      | sum                | tokens decoded since the engine started    |
| `engine_prompt_tokens`         | sum                | prompt tokens since the engine started     |
| `engine_cached_tokens`         | sum                | of these, found in the prefix cache        |
| `engine_aborted`               | sum                | requests aborted since the engine started  |
| `engine_retracted`             | sum                | sequences preempted since the start        |
| `engine_kv_usage`              | mean               | share of the key-value cache in use        |
| `engine_cache_hit_rate`        | mean               | share of prompt tokens found in the cache  |

An engine that does not report a metric leaves it out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

_SHARES = frozenset({"engine_kv_usage", "engine_cache_hit_rate"})
_SAMPLE = re.compile(r"^(\w+):(\w+)(?:\{.*\})? (\S+)", re.MULTILINE)


def read_samples(exposition: str, *, prefix: str, names: Mapping[str, str]) -> dict[str, float]:
    """Return the samples ``<prefix>:<name>`` of a page in Prometheus' text format, by the worker's ``names``.

    Samples of one name with other labels are added up, or averaged where the metric is a share.
    """
    found: dict[str, list[float]] = {}
    for engine, name, text in _SAMPLE.findall(exposition):
        if engine == prefix and name in names:
            value = _number(text)
            if value is not None:
                found.setdefault(names[name], []).append(value)
    return {name: _aggregate(name, values) for name, values in found.items()}


def aggregate_metrics(engines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of several engines as those of one."""
    names = {name for metrics in engines for name in metrics}
    return {name: _aggregate(name, [metrics[name] for metrics in engines if name in metrics]) for name in sorted(names)}


def _aggregate(name: str, values: Sequence[float]) -> float:
    return sum(values) / len(values) if name in _SHARES else sum(values)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
