"""What a judge is told: the file of ``penstock reward serve-judge``."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.errors import ConfigError
from penstock.reward_service.hosting.judge.template import PAIRWISE, POINTWISE, SYSTEM, Template

Mode = Literal["pointwise", "pairwise"]


class JudgeSettings(Section):
    """A judge over any endpoint that speaks OpenAI's chat completions."""

    base_url: str = Field(
        min_length=1,
        description="Where /chat/completions is, e.g. http://127.0.0.1:30000/v1 or https://api.openai.com/v1.",
    )
    model: str = Field(min_length=1, description="Name of the model that judges.")
    mode: Mode = Field(
        default="pointwise",
        description="pointwise: a score for every answer; pairwise: the share of its comparisons an answer wins in its group.",
    )
    system: str = Field(default=SYSTEM, description="The system message; empty for none.")
    template: str = Field(default="", description="The question put to it; empty for the built-in one of the mode.")
    min_score: float = Field(default=0.0, allow_inf_nan=False, description="Pointwise: the lowest score it may give.")
    max_score: float = Field(default=10.0, allow_inf_nan=False, description="Pointwise: the highest score it may give.")
    scale: bool = Field(default=True, description="Pointwise: bring scores to 0..1 by min_score and max_score.")
    opponents: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Pairwise: answers each is compared with; every other one unless given.",
    )
    both_orders: bool = Field(
        default=True, description="Pairwise: ask every pair twice, either answer first, since judges favour a place."
    )
    temperature: float = Field(default=0.0, ge=0, le=2, description="0 for verdicts that repeat.")
    seed: int | None = Field(default=0, description="Sent along for servers that know it; omitted when null.")
    max_tokens: int = Field(
        default=1024, ge=1, le=1_000_000, description="Longest verdict; one that is cut off is an error."
    )
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens", description="What the endpoint calls it; OpenAI's reasoning models want the second."
    )
    concurrency: int = Field(default=16, ge=1, le=4096, description="Questions under way at the same time.")
    timeout_s: float = Field(
        default=120.0, gt=0, le=3600, description="Longest one question may take, its tries included."
    )
    retries: int = Field(default=3, ge=0, le=20, description="Further tries after no connection, 429 or 5xx.")
    max_answer_chars: int = Field(
        default=60_000,
        ge=1,
        description="Longer answers are not judged but are errors, so that none is judged in part.",
    )
    api_key_env: str = Field(default="", description="Environment variable that holds the API key.")
    api_key_file: Path | None = Field(
        default=None, description="File that holds the API key, as a secret mount gives it."
    )
    price_in: float = Field(default=0.0, ge=0, description="Price of a million prompt tokens, for the cost figure.")
    price_out: float = Field(default=0.0, ge=0, description="Price of a million tokens of its verdicts.")

    @field_validator("base_url")
    @classmethod
    def _url(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")) or "@" in value:
            raise ValueError(
                f"must start with http:// or https:// and hold no password, got {value.rsplit('@', maxsplit=1)[-1]!r}"
            )
        return value.rstrip("/")

    @model_validator(mode="after")
    def _consistent(self) -> JudgeSettings:
        if self.min_score >= self.max_score:
            raise ValueError(f"min_score {self.min_score:g} must be below max_score {self.max_score:g}")
        if self.api_key_env and self.api_key_file is not None:
            raise ValueError("give api_key_env or api_key_file, not both")
        _ = self.question
        return self

    @property
    def question(self) -> Template:
        """The template of its mode."""
        default = POINTWISE if self.mode == "pointwise" else PAIRWISE
        needed = {"answer"} if self.mode == "pointwise" else {"answer_a", "answer_b"}
        return Template.read(self.template or default, needed=needed)

    def api_key(self) -> str:
        """Return the key, or nothing when none is named; raises ConfigError when it is not where it should be."""
        if self.api_key_env:
            key = os.environ.get(self.api_key_env, "").strip()
            if not key:
                raise ConfigError(f"api_key_env = {self.api_key_env!r}: no such environment variable, or it is empty")
            return key
        if self.api_key_file is None:
            return ""
        try:
            return self.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as err:
            reason = err.strerror if isinstance(err, OSError) else "not UTF-8"
            raise ConfigError(f"api_key_file = {self.api_key_file}: not readable ({reason})") from None


def load(file: Path) -> JudgeSettings:
    """Read a judge's TOML file; raises ConfigError naming the file and the key."""
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
        return JudgeSettings.model_validate(given)
    except OSError as err:
        raise ConfigError(f"{file}: not readable ({err.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as err:
        raise ConfigError(f"{file}: not TOML: {err}") from None
    except ValidationError as err:
        wrong = [f"{'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}" for one in err.errors()]
        raise ConfigError(f"{file}: {'; '.join(wrong)}") from None
