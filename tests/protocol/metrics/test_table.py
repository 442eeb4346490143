"""The names of all metrics, and the number of series that a service may have."""

from __future__ import annotations

import re

import pytest

from penstock.protocol.metrics import exposition
from penstock.protocol.metrics.table import (
    MAX_LABEL_LENGTH,
    MAX_VALUES,
    METRICS,
    OPEN_LABELS,
    OTHER,
    Histogram,
    LabelValues,
    Samples,
)

FIXED_LABELS = {
    "store", "file", "role", "worker", "run", "version", "outcome", "against", "statistic", "kind", "phase",
    "stage", "stream", "consumer", "folder", "layers", "way",
}  # fmt: skip
HOSTILE = [
    "a\nb 1", 'a"} 1\npenstock_fake 1', "\\", "\ud800", "\x00\x1b[2J", "x" * 100_000, "<script>", "{a='b'}", "٣", "",
]  # fmt: skip


def test_names_follow_the_conventions_of_prometheus() -> None:
    """Counters end in _total, nothing else does; names are lower case with the prefix; labels are known, help is there."""
    for metric in METRICS.values():
        assert re.fullmatch(r"penstock_[a-z0-9_]+", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not metric.name.endswith(("_sum", "_count", "_bucket")), metric.name
        assert ("seconds" in metric.name) == (metric.unit in ("s", "Unix time")), metric.name
        assert set(metric.labels) <= FIXED_LABELS | OPEN_LABELS, metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert metric.help.endswith("."), metric.name


def test_hostile_labels_make_no_unbounded_series_and_no_broken_page() -> None:
    """Ten thousand endpoint names give a hundred series and one for the rest, whose sum loses nothing."""
    values = LabelValues()
    for _scrape in range(2):
        samples = Samples("reward", values)
        for number in range(10_000):
            samples.add("penstock_reward_endpoint_calls_total", 1.0, endpoint=f"e{number}")
            samples.add("penstock_reward_endpoint_waiting", 7.0, endpoint=f"e{number}")
        series = samples.series["penstock_reward_endpoint_calls_total"]
        assert len(series) == MAX_VALUES + 1
        assert sum(series.values()) == 10_000
        assert series[(OTHER,)] == 10_000 - MAX_VALUES
        assert len(samples.series["penstock_reward_endpoint_waiting"]) == MAX_VALUES, "a sum of gauges means nothing"
    late = Samples("reward", values)
    late.add("penstock_reward_endpoint_calls_total", 1.0, endpoint="e5")
    late.add("penstock_reward_endpoint_calls_total", 1.0, endpoint="new")
    assert set(late.series["penstock_reward_endpoint_calls_total"]) == {("e5",), (OTHER,)}, "the first keep theirs"


@pytest.mark.parametrize(
    "accept", ["", "application/openmetrics-text;version=1.0.0", "text/plain;version=1.0.0", "\x00" * 99]
)
def test_hostile_label_values_are_data(accept: str) -> None:
    """Line breaks, quotes, surrogates and very long values stay inside their label in every format."""
    samples = Samples("reward", LabelValues())
    for value in HOSTILE:
        samples.add("penstock_reward_groups_scored_total", 1.0, scorer=value)
    page, content_type = exposition.page(samples, accept)
    lines = page.decode("utf-8").splitlines()
    assert sum(line.startswith("penstock_reward_groups_scored_total{") for line in lines) == len(HOSTILE)
    assert not any(line.startswith("penstock_fake") for line in lines)
    assert max(map(len, lines)) < 2 * MAX_LABEL_LENGTH + 100
    assert content_type.startswith(("text/plain", "application/openmetrics-text"))


def test_what_the_table_does_not_have_is_refused() -> None:
    """A metric, a label or a kind that is not in the table, or of another service, is an error."""
    samples = Samples("rollout", LabelValues())
    for name, labels in (
        ("penstock_x", {}),
        ("penstock_trainer_loss", {}),
        ("penstock_tokens_total", {"endpoint": "e"}),
    ):
        with pytest.raises(ValueError, match="penstock_"):
            samples.add(name, 1.0, **labels)
    with pytest.raises(ValueError, match="no histogram"):
        samples.add("penstock_rollout_packs_held", Histogram([1.0]))


def test_a_histogram_counts_by_upper_bound() -> None:
    """A value is counted in every bucket whose bound it does not exceed, as often as it was observed."""
    histogram = Histogram((0.0, 1.0, 4.0))
    histogram.observe(0.0, 5)
    histogram.observe(1.0, 2)
    histogram.observe(1.5)
    histogram.observe(9.0, 3)
    assert histogram.cumulative() == [(0.0, 5), (1.0, 7), (4.0, 8), (float("inf"), 11)]
    assert (histogram.count, histogram.total) == (11, 30.5)
    both = Histogram(histogram.bounds)
    both.add(histogram)
    both.add(histogram)
    assert (both.count, both.total, histogram.count) == (22, 61.0, 11)
