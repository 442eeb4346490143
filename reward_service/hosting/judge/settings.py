"""The settings file of ``penstock reward serve-judge``."""

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
    """A judge model behind any endpoint with OpenAI's chat completions API."""

    base_url: str = Field(
        min_length=1,
        description="Base URL of /chat/completions, e.g. http://127.0.0.1:30000/v1 or https://api.openai.com/v1.",
    )
    model: str = Field(min_length=1, description="Name of the judge model.")
    mode: Mode = Field(
        default="pointwise",
        description="pointwise: a score for every answer; pairwise: the share of its comparisons an answer wins in its group.",
    )
    system: str = Field(default=SYSTEM, description="The system message; empty for none.")
    template: str = Field(default="", description="The question to the judge; empty for the built-in one of the mode.")
    min_score: float = Field(default=0.0, allow_inf_nan=False, description="Pointwise: the lowest score allowed.")
    max_score: float = Field(default=10.0, allow_inf_nan=False, description="Pointwise: the highest score allowed.")
    scale: bool = Field(default=True, description="Pointwise: scale scores from min_score..max_score to 0..1.")
    opponents: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Pairwise: number of other answers each answer is compared with; default: all.",
    )
    both_orders: bool = Field(
        default=True, description="Pairwise: ask about every pair in both orders, since judges favour a position."
    )
    temperature: float = Field(default=0.0, ge=0, le=2, description="Sampling temperature; 0 for repeatable verdicts.")
    seed: int | None = Field(default=0, description="Sampling seed for servers that support it; omitted when null.")
    max_tokens: int = Field(
        default=1024, ge=1, le=1_000_000, description="Token limit of a verdict; a verdict that is cut off is an error."
    )
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = Field(
        default="max_tokens",
        description="The endpoint's name for the token limit; OpenAI's reasoning models require the second.",
    )
    concurrency: int = Field(default=16, ge=1, le=4096, description="Number of concurrent questions.")
    timeout_s: float = Field(
        default=120.0, gt=0, le=3600, description="Deadline of one question in seconds, retries included."
    )
    retries: int = Field(default=3, ge=0, le=20, description="Retries after a failed connection, 429 or 5xx.")
    max_answer_chars: int = Field(
        default=60_000,
        ge=1,
        description="Longer answers are errors; no answer is judged in part.",
    )
    api_key_env: str = Field(default="", description="Environment variable that holds the API key.")
    api_key_file: Path | None = Field(
        default=None, description="File that holds the API key, for example a mounted secret."
    )
    price_in: float = Field(default=0.0, ge=0, description="Price of a million prompt tokens, for the reported cost.")
    price_out: float = Field(default=0.0, ge=0, description="Price of a million completion tokens.")

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
        """Return the API key, or "" if none is configured; raises ConfigError if it cannot be read."""
        if self.api_key_env:
            key = os.environ.get(self.api_key_env, "").strip()
            if not key:
                raise ConfigError(f"api_key_env = {self.api_key_env!r}: the environment variable is missing or empty")
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
