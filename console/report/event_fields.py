"""What the console reads from the data of events, the lines of metrics.jsonl and the settings in a run's folder, validated.

Events arrive from every service, and anything may be in them. A count must be a whole number; an event in which it is
not is skipped and counted by its reader. A measured figure that is not finite (a loss may be NaN) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from penstock.protocol.files import json_value, read_regular


def number(value: Any) -> float | None:
    """Return a finite number, None for anything else."""
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer beyond the largest float
        return None


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file of a run's folder; None for a file that is missing, a link, or holds anything else."""
    try:
        content = json_value(read_regular(path))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def setting(document: Mapping[str, Any] | None, section: str, key: str) -> Any:
    """Return a setting of a stored document of settings; None where it has none of that name."""
    found: Any = document
    for name in ("settings", section, key):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


_Count = Annotated[int, BeforeValidator(lambda value: value or 0), Field(ge=0, le=2**53)]  # None and "" count as 0
_Counts = Annotated[dict[str, _Count], BeforeValidator(lambda value: value or {})]
_Figure = Annotated[float | None, BeforeValidator(number)]
_Text = Annotated[str, BeforeValidator(lambda value: value or "")]


class EventFields(BaseModel):
    """Base of the models: other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class GroupFields(EventFields):
    issued: _Count = 0
    scored: _Count = 0
    trained: _Count = 0
    outstanding: _Count = 0
    reused: _Count = 0
    dropped: _Counts = {}


class StepFields(EventFields):
    step: Annotated[int, Field(ge=0, le=2**53)] | None = None
    version: _Count = 0
    reward_mean: _Figure = None
    loss: _Figure = None
    tokens_trained: _Count = 0
    staleness_tokens: Annotated[
        dict[Annotated[int, Field(ge=0, le=2**53)], _Count], BeforeValidator(lambda value: value or {})
    ] = {}
    zero_signal_groups: _Figure = None
    skipped: _Counts = {}
    scored_by: _Counts = {}
    groups: GroupFields | None = None


class EvalFields(EventFields):
    step: _Count = 0
    version: _Count = 0
    num_prompts: _Count = 0
    accuracy: _Figure = None
    reward_mean: _Figure = None
    success: _Text = ""
    split: _Text = ""
    name: _Text = ""
    primary: bool = True  # of the source that versions are compared by


class StateFields(EventFields):
    text: _Text = ""
    state: _Text = ""
    total_steps: _Count = 0
    attention: _Text = ""  # of the trainer: what computes it
    finished: bool | None = None


class PublicationFields(EventFields):
    version: Annotated[int, Field(ge=0, le=2**53)] | None = None
    kind: _Text = ""
    raw_bytes: _Count = 0
    sent_bytes: _Count = 0
    density: _Figure = None
    diff_s: _Figure = None
    upload_s: _Figure = None
    publish_s: _Figure = None


class NoteFields(EventFields):
    text: _Text = ""


class RewardErrorFields(EventFields):
    reason: _Text = ""
    detail: _Text = ""
    group_ids: Annotated[tuple[str, ...], BeforeValidator(lambda value: value or ())] = ()


class UnreadableEvent(ValueError):
    """The data of an event does not fit; the text names the first field that does not."""


M = TypeVar("M", bound=EventFields)


def read(model: type[M], data: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as err:
        first = err.errors(include_input=False)[0]
        raise UnreadableEvent(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
