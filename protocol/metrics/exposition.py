"""The page that Prometheus reads, written by prometheus-client; nothing else imports that library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from penstock.protocol.metrics.table import METRICS, Histogram, Samples


def page(samples: Samples, accept: str) -> tuple[bytes, str]:
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry()
    registry.register(_Families(samples))
    return encode(registry), content_type


class _Families(Collector):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterator[Family]:
        for name, series in self._samples.series.items():
            metric = METRICS[name]
            # The family of a counter is named without the ending of its samples.
            family = Family(name.removesuffix("_total") if metric.kind == "counter" else name, metric.help, metric.kind)
            for values, value in series.items():
                labels = dict(zip(metric.labels, values, strict=True))
                for suffix, more, number in _rows(value):
                    family.add_sample(name + suffix, {**labels, **more}, number)
            yield family


def _rows(value: float | Histogram | Mapping[str, float]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the samples of one series: the ending of the name, further labels, the number."""
    if isinstance(value, Histogram):
        for bound, count in value.cumulative():
            yield "_bucket", {"le": floatToGoString(bound)}, count
        yield from (("_sum", {}, value.total), ("_count", {}, value.count))
    elif isinstance(value, Mapping):
        for quantile, number in value.items():
            yield (f"_{quantile}", {}, number) if quantile in ("sum", "count") else ("", {"quantile": quantile}, number)
    else:
        yield "", {}, value
