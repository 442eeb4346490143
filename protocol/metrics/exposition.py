"""The page that Prometheus reads, written by prometheus-client; nothing else imports that library."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from penstock.protocol.metrics.table import METRICS, Samples


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
        yield from self._numbers()
        yield from self._histograms()
        yield from self._quantiles()

    def _numbers(self) -> Iterator[Family]:
        for name, series in self._samples.numbers.items():
            metric = METRICS[name]
            # The family of a counter is named without the ending of its samples.
            family = Family(name.removesuffix("_total") if metric.kind == "counter" else name, metric.help, metric.kind)
            for values, number in series.items():
                family.add_sample(name, dict(zip(metric.labels, values, strict=True)), number)
            yield family

    def _histograms(self) -> Iterator[Family]:
        for name, series in self._samples.histograms.items():
            family = Family(name, METRICS[name].help, "histogram")
            for values, histogram in series.items():
                labels = dict(zip(METRICS[name].labels, values, strict=True))
                for bound, count in histogram.cumulative():
                    family.add_sample(f"{name}_bucket", {**labels, "le": floatToGoString(bound)}, count)
                family.add_sample(f"{name}_sum", labels, histogram.total)
                family.add_sample(f"{name}_count", labels, histogram.count)
            yield family

    def _quantiles(self) -> Iterator[Family]:
        for name, series in self._samples.quantiles.items():
            family = Family(name, METRICS[name].help, "summary")
            for values, quantiles in series.items():
                labels = dict(zip(METRICS[name].labels, values, strict=True))
                for quantile, value in quantiles.items():
                    if quantile in ("sum", "count"):
                        family.add_sample(f"{name}_{quantile}", labels, value)
                    else:
                        family.add_sample(name, {**labels, "quantile": quantile}, value)
            yield family
