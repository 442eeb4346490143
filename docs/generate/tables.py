"""Text of the short reference pages: one function for each ``<!-- generated: NAME -->``, of that name."""

from __future__ import annotations

import textwrap

from pydantic import BaseModel

from docs.generate import table
from docs.generate.settings import type_name
from penstock.console.report.diagnoses import MEANINGS
from penstock.console.report.learning import _NESTED, LABELS
from penstock.deploy.monitoring.alerts import ALERTS
from penstock.protocol import errors as protocol_errors
from penstock.protocol import facts as nats_facts
from penstock.protocol import streams
from penstock.protocol.groups import BlobRef, GeneratedGroup, RewardRequest, Sampling, ScoredGroup, Task
from penstock.protocol.metrics.table import MAX_VALUES, METRICS, OPEN_LABELS, OTHER, Metric
from penstock.reward_service import errors as reward_errors
from penstock.rollout_service import errors as rollout_errors
from penstock.trainer import errors as trainer_errors
from penstock.trainer.row_format import ROW_FORMATS
from penstock.trainer.settings import COLUMNS

_EVERY_FORMAT = """Every format may have ground_truth, data_source, extra_info and system, and images. Other columns go into extra_info, so that a
reward sees the whole row. An invalid value is refused with its file, line and column. [Rows](../data.md) has an example of each."""


def alerts() -> str:
    """Return a table of all alerts: name, when it fires, cause, cure; from the table that ``rules.yml`` is written from."""
    rows: list[tuple[object, ...]] = []
    for alert in ALERTS:
        summary = alert.summary.replace("{{ $labels.", "").replace(" }}", "")
        rows.append((f"`{alert.name}`", alert.severity, summary, alert.cause, alert.cure))
    return table("alert", "severity", "says", "usual cause", "cure", rows=rows)


def data_forms() -> str:
    """The formats of rows in the order in which ``auto`` tries them, what holds for all, and the columns that `data.map` may name."""
    formats = sorted(ROW_FORMATS.built_in.values(), key=lambda form: form.precedence)
    rows = [(f"`{form.name}`", form.columns, form.trains) for form in formats]
    columns = ", ".join(f"`{name}`" for name in COLUMNS)
    return f"{table('format', 'columns', 'can train', rows=rows)}\n\n{_EVERY_FORMAT}\n\nColumns that `data.map` may name: {columns}.\n"


_TREES = {
    "protocol": protocol_errors,
    "trainer": trainer_errors,
    "rollout_service": rollout_errors,
    "reward_service": reward_errors,
}


def errors() -> str:
    """Return the trees of errors, a section for each package, as the modules that define them draw them."""
    parts = []
    for name, module in _TREES.items():
        summary, _, rest = (module.__doc__ or "").partition("\n\n")
        body = f"\n```text\n{textwrap.dedent(rest).strip()}\n```\n" if rest else ""
        parts.append(f"## {name}\n\n{summary.strip()}\n{body}")
    return "\n".join(parts)


_RUN = "RUN"


def facts() -> str:
    """Return the messages on NATS: streams, every fact with its schema tag and fields, and the models inside them."""
    parts = ["## Streams\n", _streams(), "## Facts\n"]
    parts += [_fact(fact, f"`{tag}`. ") for tag, fact in sorted(nats_facts.Fact.registry.items())]
    parts.append("## Inside facts\n")
    inner = (Task, Sampling, RewardRequest, GeneratedGroup, ScoredGroup, BlobRef)
    parts += [_fact(model, "") for model in inner]
    return "\n".join(parts)


def _streams() -> str:
    rows = [
        (
            f"`{spec.name.replace('run-', f'{_RUN}-', 1)}`",
            ", ".join(f"`{subject.replace('.run.', f'.{_RUN}.')}`" for subject in spec.subjects),
            "work queue" if spec.retention == "workqueue" else "limits",
            f"{spec.max_msgs:,}",
            f"{spec.max_msg_bytes // 1024} KiB",
        )
        for spec in streams.streams("run")
    ]
    return table("stream", "subjects", "retention", "messages at most", "size of one at most", rows=rows)


def _fact(model: type[BaseModel], lead: str) -> str:
    summary = (model.__doc__ or "").strip().replace("\n\n", " ").replace("\n", " ")
    rows: list[tuple[object, ...]] = []
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        rows.append((f"`{name}`", type_name(field.annotation), default))
    return f"### {model.__name__}\n\n{lead}{' '.join(summary.split())}\n\n" + table(
        "field", "type", "default", rows=rows
    )


def metrics() -> str:
    figures: list[tuple[object, ...]] = [
        (f"`{'.'.join(_NESTED.get(name, (name,)))}`", label) for name, label in LABELS.items()
    ]
    reasons: list[tuple[object, ...]] = [(f"`{name}`", meaning) for name, meaning in MEANINGS.items()]
    return (
        "## Figures of a step\n\n"
        + table("key in `metrics.jsonl`", "is", rows=figures)
        + "\n## Why a group is dropped\n\n"
        + table("reason", "means", rows=reasons)
    )


_TITLES = {
    ("trainer", "rollout", "reward"): "Every service",
    ("trainer", "rollout"): "Trainer and rollout worker",
    ("trainer",): "Trainer",
    ("rollout",): "Rollout worker",
    ("reward",): "Reward service",
}


def prometheus() -> str:
    """Return a table for each set of services, and the bound of the labels."""
    parts = []
    for services, title in _TITLES.items():
        rows = [_metric(metric) for metric in METRICS.values() if metric.services == services]
        parts.append(f"## {title}\n\n" + table("metric", "type", "unit", "labels", "is", rows=rows))
    labels = ", ".join(f"`{label}`" for label in sorted(OPEN_LABELS))
    parts.append(
        "## Bounded labels\n\n"
        f"Values of {labels} come from users. The first {MAX_VALUES} of each in a metric of a process have series of their own; "
        f"counters and histograms of the others are added up as `{OTHER}`, and their gauges are left out.\n"
    )
    return "\n".join(parts)


def _metric(metric: Metric) -> tuple[object, ...]:
    kind = metric.kind
    if metric.buckets:
        kind += f", up to {metric.buckets[-1]:g}"
    return f"`{metric.name}`", kind, metric.unit, ", ".join(f"`{label}`" for label in metric.labels), metric.help
