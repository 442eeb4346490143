"""What every part of an algorithm has: a name, a function, its source, its options, its presets; imports no torch.

A part is a policy loss, an advantage estimator, a filter of trajectories or of groups, or a correction. It is one file of its
package (`losses/`, `estimators/`, `filters/`, `group_filters/`, `corrections/`) or user code; `trainer/algorithm/chosen_parts.py` finds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from pydantic import Field
from pydantic_core import PydanticUndefined

from penstock.protocol.config.connection import Section


class Options(Section):
    """Options of one part, each with a default and a description; of a built-in part they are keys of [algorithm]."""


OptionsT_co = TypeVar("OptionsT_co", bound=Options, covariant=True)
PartT = TypeVar("PartT")
FieldsP = ParamSpec("FieldsP")


# Values of presets that change the loss of GRPO and nothing else.
GRPO: Mapping[str, Any] = {"advantage": "grpo", "normalise_by_std": True, "aggregation": "token-mean"}


@dataclass(frozen=True, eq=False, kw_only=True)
class Part(Generic[OptionsT_co]):
    """One part of an algorithm; calling it calls its function."""

    name: str = field(kw_only=False)  # as a run file writes it
    fn: Callable[..., Any] = field(kw_only=False)  # its keyword-only parameters have the names of the options
    options: type[OptionsT_co] = Options  # pyright: ignore[reportAssignmentType]
    source: str  # paper or code that the formula is from
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # read of built-in parts only

    def __post_init__(self) -> None:
        for name, info in self.options.model_fields.items():
            if not info.description or info.default is PydanticUndefined:
                raise TypeError(f"{self.name}: option {name} needs a default and a description; give Field both")
        parameters = inspect.signature(self.fn).parameters.values()
        keywords = {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}
        missing = sorted(set(self.option_names) - set(keywords))
        unfilled = sorted({name for name, is_required in keywords.items() if is_required} - set(self.option_names))
        if missing or unfilled:
            raise TypeError(
                f"{self.name}: options and keyword-only parameters differ: {', '.join(missing + unfilled)}; "
                f"declare each of them in {self.options.__name__} and in {self.fn.__name__}"
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    @property
    def option_names(self) -> tuple[str, ...]:
        return tuple(self.options.model_fields)

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.fn) or "").partition("\n")[0]

    def bind(self, **values: Any) -> Callable[..., Any]:
        """Return the function with these options, the others at their defaults; raises pydantic's ValidationError."""
        return partial(self.fn, **self.options(**values).model_dump())


def decorator(
    kind: Callable[Concatenate[str, Callable[..., Any], FieldsP], PartT],
) -> Callable[FieldsP, Callable[[Callable[..., Any]], PartT]]:
    """Return the decorator that makes a function a part of this kind; it takes the part's fields, and the name is the function's."""
    return lambda *args, **fields: lambda fn: kind(fn.__name__, fn, *args, **fields)


class ClipRange(Options):
    """How far a ratio may move from 1."""

    clip_low: float = Field(default=0.2, gt=0.0, le=1.0, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0.0, description="The ratio is clipped above at 1 + clip_high.")


class DualClip(Options):
    """Bound of the ratio of failed samples."""

    dual_clip: float | None = Field(
        default=None,
        gt=1.0,
        description="Bound of the ratio for negative advantages, which keeps training on stale samples stable; none: off.",
    )


class DualClipRange(DualClip, ClipRange):
    """Both bounds of a ratio."""


class WeightCap(Options):
    """Bound of a detached importance weight."""

    weight_cap: float = Field(
        default=4.0, gt=0.0, description="Bound of the detached ratio in cispo, minirl, dppo; of failures in topr."
    )


class StdNormalisation(Options):
    """Whether advantages are divided by a standard deviation."""

    normalise_by_std: bool = Field(default=True, description="Divide advantages by the group's standard deviation.")
