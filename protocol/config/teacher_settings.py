"""The section ``[teacher]`` of a run file: the model that workers ask about the tokens that the policy sampled."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import MAX_TEACHER_TOP_K


class TeacherSettings(Section):
    """A model of the policy's vocabulary that is not trained; rollout workers store its log-probabilities in every pack."""

    url: str = Field(
        default="",
        description="URL of the server that answers for the teacher; several with commas between them, of the same model.",
    )
    kind: str = Field(
        default="sglang",
        description="What the server speaks: 'sglang' (SGLang's /generate, which Penstock's embedded engine answers too), or your own "
        "as 'my_package.module:kind' or 'my_teacher.py:kind'.",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        le=MAX_TEACHER_TOP_K,
        description="Likeliest tokens that the teacher names in the place of each sampled one, for algorithm.distill_form = forward.",
    )
    api_key_file: Path | None = Field(default=None, description="File with the key that the server was started with.")
    deadline_s: float = Field(default=120.0, gt=0.0, description="Longest wait for the answer about one group, in s.")
    attempts: int = Field(
        default=4,
        ge=1,
        description="Requests about one group before its pack is requeued; then worker.task_attempts counts.",
    )
    max_requests: int = Field(default=8, ge=1, description="Requests of one worker that are open at once.")

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs in ``url``."""
        return tuple(url.strip().rstrip("/") for url in self.url.split(",") if url.strip())

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        for url in filter(None, map(str.strip, value.split(","))):
            if not url.startswith(("http://", "https://")) or "@" in url:
                raise ValueError(
                    f"expected an address such as http://127.0.0.1:30000 without a password in it, got {url!r}"
                )
        return value

    @model_validator(mode="after")
    def _has_a_url(self) -> TeacherSettings:
        idle = [
            key
            for key in type(self).model_fields
            if key != "url" and getattr(self, key) != type(self).model_fields[key].default
        ]
        if idle and not self.urls:
            raise ValueError(f"teacher.{idle[0]} does nothing while teacher.url is empty; set that too")
        return self

    def api_key(self) -> str:
        """Return the server's key, empty when none is needed; raises ConfigError when unreadable."""
        if self.api_key_file is None:
            return ""
        try:
            return self.api_key_file.read_text().strip()
        except OSError as err:
            raise ConfigError(f"teacher.api_key_file = {self.api_key_file}: not readable ({err.strerror})") from None
