"""The section [data] of the run file: prompts, and how rows are read; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import Identifier, RewardName
from penstock.trainer.fine_tuning_settings import Files, listed
from penstock.trainer.row_format import ROW_FORMATS

COLUMNS = (
    "prompt",
    "messages",
    "response",
    "ground_truth",
    "data_source",
    "extra_info",
    "reward_model",
    "question",
    "answer",
    "completion",
    "system",
    "conversations",
    "instruction",
    "input",
    "output",
    "label",
    "tools",
    "chosen",
    "rejected",
    "margin",
    "images",
)
_TEMPLATE_NAMES = {"messages", "tools", "documents", "add_generation_prompt"}  # given by Penstock


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
        "alpaca, openrlhf, or your own as my_format.py:my_format.",
    )
    map: dict[str, str] = Field(
        default={}, description='Columns with other names, as expected = "actual": data.map.prompt = "instruction".'
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
    ignore: list[str] = Field(
        default=[], description="Columns to leave out, as named in the file; no reward sees them."
    )
    shuffle: bool = Field(default=True, description="Another order in every epoch, made from run.seed alone.")

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        if value != "auto" and ":" not in value:  # a file is run when rows are read, not when settings are
            try:
                ROW_FORMATS.find(value)
            except ConfigError as err:
                raise ValueError(str(err)) from None
        return value

    @field_validator("map")
    @classmethod
    def _known_columns(cls, value: dict[str, str]) -> dict[str, str]:
        unknown = sorted(set(value) - set(COLUMNS))
        if unknown:
            raise ValueError(f"data.map.{unknown[0]} maps a column that is not read; use one of {', '.join(COLUMNS)}")
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
        if self.text_prompts == "plain" and self.system_prompt:
            raise ValueError('data.system_prompt has no place with data.text_prompts = "plain"; remove one of them')
        return self

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
