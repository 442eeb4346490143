"""The page that Prometheus reads, written by prometheus-client; nothing else imports that library."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from penstock.protocol.metrics.table import METRICS, Labels, Samples


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
        for name, series in self._samples.numbers.items():
            metric = METRICS[name]
            # The family of a counter is named without the ending of its samples.
            family = Family(name.removesuffix("_total") if metric.kind == "counter" else name, metric.help, metric.kind)
            for values, number in series.items():
                family.add_sample(name, _labels(name, values), number)
            yield family
        for name, series in self._samples.histograms.items():
            family = Family(name, METRICS[name].help, "histogram")
            for values, histogram in series.items():
                labels = _labels(name, values)
                for bound, count in histogram.cumulative():
                    family.add_sample(f"{name}_bucket", {**labels, "le": floatToGoString(bound)}, count)
                family.add_sample(f"{name}_sum", labels, histogram.total)
                family.add_sample(f"{name}_count", labels, histogram.count)
            yield family
        for name, series in self._samples.quantiles.items():
            family = Family(name, METRICS[name].help, "summary")
            for values, quantiles in series.items():
                labels = _labels(name, values)
                for quantile, value in quantiles.items():
                    is_total = quantile in ("sum", "count")
                    row = (f"{name}_{quantile}", labels) if is_total else (name, {**labels, "quantile": quantile})
                    family.add_sample(*row, value)
            yield family


def _labels(name: str, values: Labels) -> dict[str, str]:
    return dict(zip(METRICS[name].labels, values, strict=True))
