"""The messages on NATS: every fact with its schema tag and fields; streams, consumers and buckets of a run."""

from __future__ import annotations

from pydantic import BaseModel

from docs.generate import table
from docs.generate.settings import type_name
from penstock.protocol import facts, streams

_RUN = "RUN"


def text() -> str:
    """Return the streams, the facts and the models inside them."""
    parts = ["## Streams\n", _streams(), "## Facts\n"]
    parts += [_model(fact, f"`{tag}`. ") for tag, fact in sorted(facts.Fact.registry.items())]
    parts.append("## Inside facts\n")
    inner = (facts.Task, facts.Sampling, facts.RewardRequest, facts.GeneratedGroup, facts.ScoredGroup, facts.BlobRef)
    parts += [_model(model, "") for model in inner]
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


def _model(model: type[BaseModel], lead: str) -> str:
    summary = (model.__doc__ or "").strip().replace("\n\n", " ").replace("\n", " ")
    rows: list[tuple[object, ...]] = []
    for name, field in model.model_fields.items():
        default = "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        rows.append((f"`{name}`", type_name(field.annotation), default))
    return f"### {model.__name__}\n\n{lead}{' '.join(summary.split())}\n\n" + table(
        "field", "type", "default", rows=rows
    )
