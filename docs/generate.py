"""Text of the reference pages, written from the code for each ``<!-- generated: NAME -->`` of a page.

Each is the function of that name, here or in `schemas.py`, and returns Markdown. To add a reference, add a function, its name to
``_REFERENCES``, and a page with its mark. ``python -m docs.generate NAME`` prints one, without a name the names of all.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel
from rich.console import Console

from docs.schemas import http_apis, settings, table, type_name
from penstock.console.cli import verb_help
from penstock.console.cli.main import app
from penstock.console.report.diagnoses import MEANINGS, RunMetrics, diagnose
from penstock.console.report.learning import LABELS, NESTED, Evaluation
from penstock.console.report.run_summary import Diagnosis
from penstock.deploy.monitoring.alerts import ALERTS
from penstock.protocol import errors as protocol_errors
from penstock.protocol import facts as nats_facts
from penstock.protocol import groups, streams
from penstock.protocol.command_line import App
from penstock.protocol.metrics.table import MAX_VALUES, METRICS, OPEN_LABELS, OTHER, Metric
from penstock.reward_service import errors as reward_errors
from penstock.rollout_service import errors as rollout_errors
from penstock.trainer import errors as trainer_errors
from penstock.trainer.data_settings import COLUMNS
from penstock.trainer.row_format import ROW_FORMATS

_EVERY_FORMAT = """Every format may have ground_truth, data_source, extra_info and system, and images. Other columns go into extra_info, so that a
reward sees the whole row. An invalid value is refused with its file, line and column. [Rows](../data.md) has an example of each."""
_TREES = {
    "protocol": protocol_errors,
    "trainer": trainer_errors,
    "rollout_service": rollout_errors,
    "reward_service": reward_errors,
}
WILD = Path(__file__).parents[1] / "tests" / "data" / "wild" / "rows.jsonl"
"""A row in the schema of each of many public data sets, with what it must be read as."""
_RUN = "RUN"
_TITLES = {
    ("trainer", "rollout", "reward"): "Every service",
    ("trainer", "rollout"): "Trainer and rollout worker",
    ("trainer",): "Trainer",
    ("rollout",): "Rollout worker",
    ("reward",): "Reward service",
}
_STEPS, _SHORT = 60, 20  # of a run that is diagnosed
_WIDTH = 100  # columns of a help text
_OF_EVERY_APP = {"--help", "-h", "--version"}


def alerts() -> str:
    """Return a table of all alerts: name, when it fires, cause, cure."""
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


def wild_rows() -> str:
    """Return a table of public data sets: which verbs read their rows, with which settings, or why none does."""
    rows: list[tuple[object, ...]] = []
    for entry in map(json.loads, WILD.read_text().splitlines()):
        settings = dict(entry.get("settings", {}))
        columns = [f"map.{name} = {json.dumps(column)}" for name, column in settings.pop("map", {}).items()]
        needed = ", ".join(f"`{text}`" for text in [*columns, *(f"{k} = {json.dumps(v)}" for k, v in settings.items())])
        verbs_that_read = ", ".join(verb for verb in ("train", "sft", "dpo") if verb in entry)
        rows.append((entry["name"], entry["kind"], needed, verbs_that_read or f"refused: {entry['refused']}"))
    return table("data set", "kind", "settings in `[data]`", "read by", rows=rows)


def errors() -> str:
    """Return the trees of errors, a section for each package, of the classes that its module defines."""
    parts = []
    for name, module in _TREES.items():
        classes = [
            kind
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == module.__name__
        ]
        roots = {kind.__bases__[0]: None for kind in classes if kind.__bases__[0] not in classes}
        lines = [line for root in roots for line in (root.__name__, *_below(root, classes))]
        summary = (module.__doc__ or "").partition("\n\n")[0]
        parts.append(f"## {name}\n\n{summary.strip()}\n\n```text\n{chr(10).join(lines)}\n```\n")
    return "\n".join(parts)


def _below(base: type, classes: Sequence[type], indent: str = "") -> list[str]:
    """Return the lines of a tree of the classes below a base, each with the first sentence of its docstring."""
    children = [kind for kind in classes if kind.__bases__[0] is base]
    lines = []
    for kind in children:
        mark, further = ("└── ", "    ") if kind is children[-1] else ("├── ", "│   ")
        summary = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
        lines += [f"{indent + mark + kind.__name__:<34}{summary}", *_below(kind, classes, indent + further)]
    return lines


def facts() -> str:
    """Return the messages on NATS: streams, every fact with its schema tag and fields, and the models inside them."""
    parts = ["## Streams\n", _streams(), "## Facts\n"]
    parts += [_fact(fact, f"`{tag}`. ") for tag, fact in sorted(nats_facts.Fact.registry.items())]
    parts.append("## Inside facts\n")
    inner = (
        groups.Task,
        groups.Sampling,
        groups.RewardRequest,
        groups.GeneratedGroup,
        groups.ScoredGroup,
        groups.BlobRef,
    )
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
        (f"`{'.'.join(NESTED.get(name, (name,)))}`", label) for name, label in LABELS.items()
    ]
    reasons: list[tuple[object, ...]] = [(f"`{name}`", meaning) for name, meaning in MEANINGS.items()]
    return (
        "## Figures of a step\n\n"
        + table("key in `metrics.jsonl`", "is", rows=figures)
        + "\n## Why a group is dropped\n\n"
        + table("reason", "means", rows=reasons)
    )


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


def _run(**figures: float) -> RunMetrics:
    steps = [{"reward_mean": 0.4 + 0.01 * (step % 5), "reward_std": 0.3, **figures} for step in range(_STEPS)]
    return RunMetrics(steps)


def _constant(reward: float) -> RunMetrics:
    return RunMetrics([{"reward_mean": reward, "reward_std": 0.0}] * _STEPS)


def _course(name: str, first: float, last: float) -> RunMetrics:
    values = [first] * (_SHORT // 2) + [last] * (_SHORT // 2)
    return RunMetrics([{"reward_mean": 0.4 + 0.01 * (n % 5), name: value} for n, value in enumerate(values)])


def _rose_and_fell() -> RunMetrics:
    third = _STEPS // 3
    return RunMetrics([{"reward_mean": value, "reward_std": 0.3} for value in (0.1, 0.8, 0.2) for _ in range(third)])


def _held_out(accuracies: Sequence[float], rewards: Sequence[float]) -> RunMetrics:
    steps = [{"reward_mean": (n + 1) / _SHORT, "reward_std": 0.3} for n in range(_SHORT)]
    return RunMetrics(
        steps, evaluations=[Evaluation(5 * n, *both) for n, both in enumerate(zip(accuracies, rewards, strict=True))]
    )


RUNS: tuple[RunMetrics, ...] = (
    _run(loss_not_finite=1.0), RunMetrics([], failing="RewardFailed: HTTP 503"), _run(truncated_share=1.0),
    _run(zero_signal_groups=1.0, truncated_share=0.6, entropy=0.9), _constant(0.0), _constant(1.0), _run(engine_gap=0.08),
    _run(update_ratio=0.4), _run(kl_behaviour=0.3, staleness_mean=12.0), _run(ess_share=0.3), _run(kl_behaviour=0.2),
    _held_out((0.5, 0.2, 0.0), (0.1, 0.8, 1.0)), _held_out((0.5, 0.3, 0.1), (0.5, 0.3, 0.1)), _run(kl_reference=0.8),
    _course("completion_tokens_mean", 17.0, 63.0), _course("entropy", 1.2, 0.01), _run(zero_signal_groups=0.8), _run(truncated_share=0.4),
    _rose_and_fell(), _run(lr=2e-7, lr_set=1e-6), RunMetrics(_run().steps, issued=1000, dropped={"stale": 300}),
)  # fmt: skip


def diagnoses() -> str:
    """Return symptom, cause and cure of each rule, in the order in which the rules are asked."""
    return "\n".join(
        f"`{diagnosis.key}`\n: **{diagnosis.what}** {diagnosis.cause} *Cure:* {diagnosis.cure}\n"
        for run in RUNS
        for diagnosis in shown(run)
    )


def shown(run: RunMetrics) -> tuple[Diagnosis, ...]:
    return diagnose(run)[:1]


def commands() -> str:
    """Return a heading and a code block for each verb."""
    verb_help.attach(app)
    return "\n".join(f"## {' '.join(('penstock', *words))}\n\n```text\n{help_text(words)}```\n" for words, _ in verbs())


def verbs(parent: App = app, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Yield the words of every verb and its app, in the order of the help."""
    for name in parent:
        if name in _OF_EVERY_APP:
            continue
        child = parent[name]
        if child.default_command is not None:
            yield (*words, name), child
        if child is not parent and child.default_command is not child:
            yield from verbs(child, (*words, name))


def help_text(words: tuple[str, ...]) -> str:
    """Return what ``penstock WORDS --help`` prints."""
    written = io.StringIO()
    app.help_print(list(words), console=Console(file=written, width=_WIDTH, color_system=None))
    return "\n".join(line.rstrip() for line in written.getvalue().strip("\n").splitlines()) + "\n"


_REFERENCES = {
    function.__name__: function
    for function in (
        alerts, commands, data_forms, diagnoses, errors, facts, http_apis, metrics, prometheus, settings, wild_rows,
    )
}  # fmt: skip
NAMES = tuple(_REFERENCES)


def text(name: str) -> str:
    """Return the Markdown of one reference; raises ValueError for an unknown name."""
    if name not in _REFERENCES:
        raise ValueError(f"no generated reference {name}; there are {', '.join(NAMES)}")
    return _REFERENCES[name]()


if __name__ == "__main__":
    sys.stdout.write(text(sys.argv[1]) if len(sys.argv) > 1 else "\n".join(NAMES) + "\n")
