"""The sections of the run file that name data: [sft] and [rm] with what [dpo] has of them, [eval], [data]; imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field, PrivateAttr, field_validator, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import Identifier, RewardName
from penstock.trainer.row_format import ROW_FORMATS

Schedule = Literal["constant", "linear", "cosine"]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Files = Path | list[Path]
TurnMasks = Literal["auto", "turns", "markers"]

ENVIRONMENT = r"^[A-Za-z0-9_.-]+$"  # as in `Task.environment`
DATA_EVAL = "eval"  # the source that is data.eval
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
_METRIC = re.compile(r"accuracy|reward|pass@([1-9][0-9]{0,5})")
COLUMNS = (
    "prompt", "messages", "response", "ground_truth", "data_source", "extra_info", "reward_model", "question", "answer", "completion",
    "system", "conversations", "instruction", "input", "output", "label", "tools", "chosen", "rejected", "margin", "images",
)  # fmt: skip
_OF_A_SOURCE = ("every", "num_prompts", "temperature", "top_p", "top_k", "samples", "max_new_tokens", "environment")
_TEMPLATE_NAMES = {"messages", "tools", "documents", "add_generation_prompt"}  # set by Penstock


def _known_columns(columns: dict[str, str]) -> dict[str, str]:
    if unknown := sorted(set(columns) - set(COLUMNS)):
        raise ValueError(f"{unknown[0]} is no column that is read; use one of {', '.join(COLUMNS)}")
    return columns


ColumnNames = Annotated[dict[str, str], AfterValidator(_known_columns)]


def listed(files: Files) -> tuple[Path, ...]:
    return tuple(files) if isinstance(files, list) else (files,)


class FineTuningSettings(Section):
    """What every kind of training on given answers has: data, length, optimizer, validation, result."""

    data: Files = Field(default=[], description="Rows to train on; none: data.train.")
    eval_data: Files = Field(
        default=[], description="Held-out rows of the same forms, for the validation loss; none: no validation."
    )
    map: ColumnNames = Field(
        default={},
        description='Columns of these rows with other names, as in data.map: sft.map.response = "solution". None: data.map where the rows '
        "are data.train, or there is no data.train.",
    )
    steps: int = Field(default=100, ge=1, description="Optimizer steps.")
    epochs: float | None = Field(
        default=None, gt=0.0, description="Passes over the rows, such as 3 or 0.5, instead of steps; none: steps."
    )
    batch_size: int = Field(default=32, ge=1, description="Rows of one optimizer step, over all ranks.")
    lr: float = Field(default=1e-5, gt=0.0, description="Peak learning rate of AdamW.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's decay of both moments.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear warm-up from 0 to lr.")
    schedule: Schedule = Field(default="constant", description="Learning rate after the warm-up.")
    eval_every: int = Field(
        default=0, ge=0, description="Steps between validations on eval_data; 0: only after the last step."
    )
    early_stop: int = Field(
        default=0,
        ge=0,
        description="Stop after so many validations in a row without a lower validation loss; 0: never.",
    )
    keep_best: bool = Field(
        default=False, description="The result has the weights of the lowest validation loss, not the last ones."
    )
    checkpoint_every: int = Field(
        default=0, ge=0, description="Steps between checkpoints; 0: by time alone, trainer.checkpoint_every_s."
    )
    output: Path | None = Field(
        default=None, description="Folder for the result; none: a folder of the command's name in the run's folder."
    )

    @property
    def files(self) -> tuple[Path, ...]:
        return listed(self.data)

    @property
    def eval_files(self) -> tuple[Path, ...]:
        return listed(self.eval_data)

    @model_validator(mode="after")
    def _validation_is_possible(self) -> FineTuningSettings:
        asked = [name for name in ("eval_every", "early_stop", "keep_best") if getattr(self, name)]
        if asked and not self.eval_files:
            raise ValueError(f"{asked[0]} needs held-out rows; set eval_data too, or remove {asked[0]}")
        if self.early_stop and not self.eval_every:
            raise ValueError("early_stop compares validations during the training; set eval_every too")
        return self


class SftSettings(FineTuningSettings):
    """Supervised fine-tuning, `penstock sft`."""

    mask: TurnMasks = Field(
        default="auto",
        description="Tokens that are trained. turns: each assistant turn is an example of its own, after the chat before it. "
        "markers: a chat is one example, and what the chat template puts between {% generation %} and {% endgeneration %} is "
        "trained. auto: markers where the template has them.",
    )
    loss: Literal["nll", "dft"] = Field(
        default="nll",
        description="nll: cross-entropy; dft: the same, each token weighed by its probability (arXiv 2508.05629).",
    )


class RmSettings(FineTuningSettings):
    """Training of a reward model on preferences, `penstock rm`."""

    use_margin: bool = Field(
        default=True,
        description="A row's column margin is the least difference of rewards that is asked for; false: 0.",
    )
    center: float = Field(
        default=0.0,
        ge=0.0,
        description="Weight of the squared sum of both rewards, which keeps rewards near 0 (arXiv 2312.09244); TRL's is 0.01.",
    )


class BestBy(NamedTuple):
    source: str
    metric: str = ""  # accuracy, reward or pass@K; empty: the accuracy, or the reward where there is none


class EvalSource(Section):
    """One source of held-out prompts; what is not set is as in [eval]."""

    data: Files = Field(description="Held-out prompts, same forms as data.eval.")
    map: ColumnNames = Field(default={}, description="Columns with other names, as in data.map; none: eval.map.")
    every: int | None = Field(default=None, ge=0, description="Steps between evaluations; none: eval.every.")
    num_prompts: int | None = Field(
        default=None, ge=0, description="Only the first prompts, 0: all; none: eval.num_prompts."
    )
    temperature: float | None = Field(
        default=None, ge=0.0, le=100.0, description="Sampling temperature; none: eval.temperature."
    )
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, description="As eval.top_p; none: that.")
    top_k: int | None = Field(default=None, ge=-1, description="As eval.top_k; none: that.")
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

    map: ColumnNames = Field(
        default={}, description="Columns of held-out prompts with other names, as in data.map; none: data.map."
    )
    every: int = Field(default=0, ge=0, description="Steps between evaluations; 0: only at start and end.")
    num_prompts: int = Field(default=0, ge=0, description="Only the first prompts of data.eval; 0: all.")
    at_start: bool = Field(default=True, description="Evaluate version 0, when there is data.eval or a source.")
    at_end: bool = Field(default=True, description="Evaluate the last version, when there is data.eval or a source.")
    temperature: float = Field(default=0.0, ge=0.0, le=100.0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Sample from the likeliest tokens that have this probability together; 1: from all.",
    )
    top_k: int = Field(default=-1, ge=-1, description="Sample from so many of the likeliest tokens; -1: from all.")
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
    def _sources_are_whole(self) -> EvalSettings:
        for name, source in self.source.items():
            if not _NAME.fullmatch(name) or name == DATA_EVAL:
                raise ValueError(
                    f"eval.source.{name}: a name has 1 to 40 of A-Z, a-z, 0-9, '_' and '-', and is not {DATA_EVAL}, which is data.eval"
                )
            if not source.files:
                raise ValueError(
                    f"eval.source.{name}.data names no file; set it to held-out prompts, or remove the source"
                )
        for name in (DATA_EVAL, *self.source):
            where, chosen = "eval" if name == DATA_EVAL else f"eval.source.{name}", self.of(name)
            idle = [key for key, off in (("top_p", 1.0), ("top_k", -1)) if getattr(chosen, key) != off]
            if chosen.temperature == 0.0 and chosen.samples > 1:
                raise ValueError(
                    f"{where}.samples = {chosen.samples} greedy completions would all be the same; "
                    f"set {where}.temperature above 0 or {where}.samples = 1"
                )
            if chosen.temperature == 0.0 and idle:
                raise ValueError(
                    f"{where}.{idle[0]} does nothing while {where}.temperature = 0; set it above 0, or remove {idle[0]}"
                )
        return self

    def of(self, name: str) -> EvalSettings:
        if name == DATA_EVAL:
            return self
        overrides = {key: value for key in _OF_A_SOURCE if (value := getattr(self.source[name], key)) is not None}
        return self.model_copy(update=overrides)

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
        match = _METRIC.fullmatch(metric)
        if dot and match is None:
            raise ValueError(f"eval.best_by = {self.best_by}: expected {name}.accuracy, {name}.reward or {name}.pass@K")
        k, samples = int(match[1]) if match and match[1] else 1, self.of(name).samples
        if match and match[1] and (k > samples or samples == 1 or k & (k - 1)):
            raise ValueError(
                f"eval.best_by = {self.best_by}: pass@K is measured for K = 1, 2, 4, … up to the samples of the source, which has {samples}; "
                "raise its samples, or name another K"
            )
        return BestBy(name, metric)


class DataSettings(Section):
    """Prompts to train and evaluate on, and how rows are read as prompts."""

    train: Files = Field(
        default=[],
        description="JSONL, JSON, CSV, Parquet or Arrow file with the training prompts, a folder of them, an id on the Hugging "
        "Face hub (OWNER/NAME, OWNER/NAME:main/train-*), or a list of these.",
    )
    eval: Files = Field(default=[], description="Held-out prompts, same forms; none: no evaluation.")
    from_run: Identifier | None = Field(
        default=None,
        description="Train on this output of `penstock rescore` instead of generating: no engine, no rewards, no evaluation; "
        "data.train and data.eval are not read.",
    )
    format: str = Field(
        default="auto",
        description="Form of the rows: auto recognises it by the columns; verl, trl, messages, flat, question_answer, sharegpt, "
        "alpaca, openrlhf, xlam, or your own as my_format.py:my_format.",
    )
    map: ColumnNames = Field(
        default={},
        description='Columns with other names, as expected = "actual": data.map.prompt = "instruction". Rows of another section have '
        "a map of their own: sft.map, dpo.map, rm.map, eval.map.",
    )
    system_prompt: str = Field(default="", description="Prepended to every prompt that has no system message.")
    max_prompt_tokens: int = Field(default=1024, ge=1, description="Longest prompt, template included, in tokens.")
    overlong: Literal["drop", "error"] = Field(
        default="drop",
        description="Prompts above max_prompt_tokens, or too long for the model's context: drop and count them, or refuse the "
        "file.",
    )
    max_samples: int | None = Field(
        default=None,
        ge=1,
        description="Only the first training rows, for a quick try; none: all. Of data.eval: eval.num_prompts.",
    )
    text_prompts: Literal["chat", "plain"] = Field(
        default="chat",
        description="A prompt that is a text: chat makes it a user message in the model's chat template (as verl does); plain "
        "trains on the text itself (as TRL, ROLL and OpenRLHF do), also with a base model that has no template.",
    )
    template_arguments: dict[str, bool | int | float | str] = Field(
        default={}, description="Arguments of the chat template: data.template_arguments.enable_thinking = false."
    )
    use_tools: bool = Field(
        default=False, description="Give a row's column tools to the chat template; false: only the reward sees it."
    )
    answer_is_ground_truth: bool = Field(
        default=False,
        description="The answer in a row without a ground truth (last assistant message, completion, response, output) is its "
        "ground truth; false: only SFT uses it.",
    )
    self_play_reward: RewardName | None = Field(
        default=None,
        description="Reward of rows with self_play = true, which compares the completions of a group with one another, such as a "
        "judge with mode = pairwise; none: such rows are refused.",
    )
    roles: dict[str, str] = Field(
        default={}, description='Other roles of messages, as found = "meant": data.roles.bot = "assistant".'
    )
    control_tokens: Literal["refuse", "escape", "keep"] = Field(
        default="refuse",
        description="A message whose text contains that of a control token of the model, such as <|im_end|>: refuse the row, escape it "
        "(it is ordinary text), or keep it (it is the token, as if the template had written it).",
    )
    ignore: list[str] = Field(
        default=[], description="Columns to leave out, as named in the file; no reward sees them."
    )
    weights: dict[str, Annotated[float, Field(gt=0.0, allow_inf_nan=False)]] = Field(
        default={},
        description='Shares of the data sources among the prompts, such as data.weights = {math = 3, "mbpp,apps" = 1}: the rows of '
        "math are three in any four, those of mbpp and apps together the fourth. A source whose rows are used up begins again. Every "
        "data_source needs one; none: rows come as often as they are in data.train.",
    )
    shuffle: bool = Field(default=True, description="Another order in every epoch, made from run.seed alone.")
    _map_key: str = PrivateAttr(default="data.map")

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        if value != "auto" and ":" not in value:  # a file is run when rows are read, not when settings are
            try:
                ROW_FORMATS.find(value)
            except ConfigError as err:
                raise ValueError(str(err)) from None
        return value

    @field_validator("template_arguments")
    @classmethod
    def _free_names(cls, value: dict[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
        if taken := sorted(_TEMPLATE_NAMES & value.keys()):
            raise ValueError(f"data.template_arguments.{taken[0]} is set by Penstock for every chat; leave it out")
        return value

    @model_validator(mode="after")
    def _one_reading(self) -> DataSettings:
        if both := sorted(set(self.ignore) & set(self.map.values())):
            raise ValueError(f"data.ignore leaves out {both[0]}, which data.map reads; remove it from one of them")
        if self.weights and self.from_run is not None:
            raise ValueError("data.weights does nothing with data.from_run, whose groups have an order; leave it out")
        if self.text_prompts == "plain" and self.system_prompt:
            raise ValueError('data.system_prompt has no place with data.text_prompts = "plain"; remove one of them')
        return self

    @property
    def map_key(self) -> str:
        """The setting that ``map`` comes from, which messages about columns name."""
        return self._map_key

    def with_map(self, columns: dict[str, str], key: str) -> DataSettings:
        """Return the same reading of rows whose columns have the names of another section."""
        data = self.model_copy(update={"map": columns})
        data._map_key = key
        return data

    @property
    def least_age(self) -> int:
        """The least age of a token in versions: 1 if another run sampled it, whatever its version number."""
        return 0 if self.from_run is None else 1

    @property
    def train_files(self) -> tuple[Path, ...]:
        if not listed(self.train):
            raise ConfigError("data.train names no file; set it to the JSONL, JSON, CSV or Parquet file to train on")
        return listed(self.train)

    @property
    def eval_files(self) -> tuple[Path, ...]:
        return listed(self.eval)
