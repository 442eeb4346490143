"""The section [eval]: evaluation on held-out prompts during training, of one or several sources; imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.facts import RewardName
from penstock.trainer.fine_tuning_settings import Files, listed

ENVIRONMENT = r"^[A-Za-z0-9_.-]+$"  # as in `Task.environment`
DATA_EVAL = "eval"  # the source that is data.eval
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
_METRIC = re.compile(r"accuracy|reward|pass@([1-9][0-9]{0,5})")


class BestBy(NamedTuple):
    source: str
    metric: str = ""  # accuracy, reward or pass@K; empty: the accuracy, or the reward where there is none


class EvalSource(Section):
    """One source of held-out prompts; what is not set is as in [eval]."""

    data: Files = Field(description="Held-out prompts, same forms as data.eval.")
    every: int | None = Field(default=None, ge=0, description="Steps between evaluations; none: eval.every.")
    num_prompts: int | None = Field(
        default=None, ge=0, description="Only the first prompts, 0: all; none: eval.num_prompts."
    )
    temperature: float | None = Field(
        default=None, ge=0.0, le=100.0, description="Sampling temperature; none: eval.temperature."
    )
    samples: int | None = Field(default=None, ge=1, description="Completions per prompt; none: eval.samples.")
    max_new_tokens: int | None = Field(default=None, ge=1, description="Longest completion; none: eval.max_new_tokens.")
    environment: str | None = Field(
        default=None, pattern=ENVIRONMENT, max_length=200, description="Environment; none: eval.environment."
    )
    reward: RewardName | None = Field(
        default=None, description="Reward that scores its completions; none: as the rows of training, by [reward]."
    )

    @property
    def files(self) -> tuple[Path, ...]:
        return listed(self.data)


class EvalSettings(Section):
    """Evaluation on held-out prompts, each pinned to one version."""

    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0: only at start and end.")
    num_prompts: int = Field(default=0, ge=0, description="Only the first prompts of data.eval; 0: all.")
    at_start: bool = Field(default=True, description="Evaluate version 0, when there is data.eval or a source.")
    at_end: bool = Field(default=True, description="Evaluate the last version, when there is data.eval or a source.")
    temperature: float = Field(default=0.0, ge=0.0, le=100.0, description="Sampling temperature; 0 is greedy.")
    samples: int = Field(default=1, ge=1, description="Completions per prompt; their rewards are averaged.")
    max_new_tokens: int | None = Field(default=None, ge=1, description="Longest completion; none: as in rollout.")
    environment: str | None = Field(
        default=None, pattern=ENVIRONMENT, max_length=200, description="Environment; none: as in rollout."
    )
    source: dict[str, EvalSource] = Field(
        default={},
        description='Further sources by name, each evaluated by itself: eval.source.aime.data = "aime.parquet". data.eval is the '
        "source eval.",
    )
    best_by: str = Field(
        default="",
        description="What versions are compared by, for trainer.keep_best and eval.early_stop: SOURCE or SOURCE.METRIC, such as "
        "aime.pass@8; metrics are accuracy, reward and pass@K. Empty: the first source, its accuracy or else its mean reward.",
    )
    early_stop: int = Field(
        default=0,
        ge=0,
        description="End the run after so many evaluations in a row of the source of eval.best_by without a better result; 0: never.",
    )

    @model_validator(mode="after")
    def _samples_differ(self) -> EvalSettings:
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError(
                f"eval.samples = {self.samples} greedy completions would all be the same; "
                "set eval.temperature above 0 or eval.samples = 1"
            )
        for name, source in self.source.items():
            if not _NAME.fullmatch(name) or name == DATA_EVAL:
                raise ValueError(
                    f"eval.source.{name}: a name has 1 to 40 of A-Z, a-z, 0-9, '_' and '-', and is not {DATA_EVAL}, which is data.eval"
                )
            if not source.files:
                raise ValueError(
                    f"eval.source.{name}.data names no file; set it to held-out prompts, or remove the source"
                )
            one = self.of(name)
            if one.samples > 1 and one.temperature == 0.0:
                raise ValueError(
                    f"eval.source.{name}: {one.samples} greedy completions would all be the same; set its temperature above 0, or its "
                    "samples to 1"
                )
        return self

    def of(self, name: str) -> EvalSettings:
        if name == DATA_EVAL:
            return self
        own = {
            key: value
            for key in ("every", "num_prompts", "temperature", "samples", "max_new_tokens", "environment")
            if (value := getattr(self.source[name], key)) is not None
        }
        return self.model_copy(update=own)

    def names(self, *, has_data_eval: bool) -> list[str]:
        return [*([DATA_EVAL] if has_data_eval else []), *self.source]

    def best(self, *, has_data_eval: bool) -> BestBy | None:
        """Return what versions are compared by, None without any source; raises ValueError for what is not measured."""
        names = self.names(has_data_eval=has_data_eval)
        if not self.best_by:
            return BestBy(names[0]) if names else None
        name, dot, metric = self.best_by.partition(".")
        if name not in names:
            raise ValueError(
                f"eval.best_by = {self.best_by}: there is no source {name}; there are {', '.join(names) or 'none'}"
            )
        found = _METRIC.fullmatch(metric)
        if dot and found is None:
            raise ValueError(f"eval.best_by = {self.best_by}: expected {name}.accuracy, {name}.reward or {name}.pass@K")
        k, samples = int(found[1]) if found and found[1] else 1, self.of(name).samples
        if found and found[1] and (k > samples or samples == 1 or k & (k - 1)):
            raise ValueError(
                f"eval.best_by = {self.best_by}: pass@K is measured for K = 1, 2, 4, … up to the samples of the source, which has {samples}; "
                "raise its samples, or name another K"
            )
        return BestBy(name, metric)
