"""The settings of the reward service."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from penstock.protocol.config.connection import NatsSettings, RunSettings, S3Settings, Section
from penstock.protocol.config.reward_settings import RewardSettings as RewardChoice
from penstock.protocol.errors import ConfigError
from penstock.protocol.secret_values import content_of
from penstock.protocol.transport import tls
from penstock.reward_service.endpoints.endpoint import Access, Role, read_tokens
from penstock.serving.target_policy import PRIVATE_TARGETS, TargetPolicy

ADMIN = "admin"  # the name of the holder of token and token_file


def _default_id() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40] + f"-{os.getpid()}"


class RewardServiceSection(Section):
    """The reward service: its HTTP API, its limits, its graders."""

    id: str = Field(
        default_factory=_default_id,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$",
        description="Name of this replica in heartbeats; host and process id unless given.",
    )
    host: str = Field(
        default="127.0.0.1", description="Address the HTTP API listens on; others than loopback need a token."
    )
    port: int = Field(default=8700, ge=0, le=65535, description="Port of the HTTP API; 0 takes any free one.")
    port_file: Path | None = Field(default=None, description="File that receives the port once the API listens.")
    token: str = Field(default="", description="Bearer token of the admin; prefer token_file.", repr=False)
    token_file: Path | None = Field(default=None, description="File that holds the token, as a secret mount gives it.")
    tokens_file: Path | None = Field(
        default=None,
        description="File with lines NAME ROLE TOKEN, or sha256:DIGEST of the token; roles are read, register (its own endpoints) and admin.",
    )
    concurrency: int = Field(
        default=8, ge=1, le=1024,
        description="Packs worked on at the same time; those that only wait for endpoints and graders do not count.",
    )  # fmt: skip
    max_packs: int = Field(
        default=1024, ge=1, le=100_000,
        description="Packs held by this process, those that wait for endpoints and graders included.",
    )  # fmt: skip
    endpoint_attempts: int = Field(
        default=5, ge=1, le=1000, description="Deliveries after which a group that gets no reward is dead-lettered."
    )
    retry_delay_s: float = Field(
        default=2.0, gt=0, le=3600,
        description="First wait before a failed group is retried; doubles, at most 60 s or this.",
    )  # fmt: skip
    patience_s: float = Field(
        default=600.0, gt=0, le=86_400,
        description="Seconds a group waits for an endpoint that is not called (unregistered, drained, breaker open) until it is dead-lettered.",
    )  # fmt: skip
    allowed_targets: tuple[str, ...] = Field(
        default=PRIVATE_TARGETS,
        description="Networks (CIDR) and host names of allowed endpoints; loopback and private ranges "
        "unless given. Link-local and metadata addresses are always refused.",
    )
    max_response_bytes: int = Field(
        default=4 * 1024 * 1024, ge=1024, description="Longest answer of an endpoint that is read, in bytes."
    )
    max_request_bytes: int = Field(
        default=16 * 1024 * 1024, ge=1024, description="Longest request to the HTTP API that is read, in bytes."
    )
    max_requests_bytes: int = Field(
        default=128 * 1024 * 1024,
        ge=1024,
        description="Bytes of the bodies that the HTTP API holds at a time; a request beyond it is answered 503 with Retry-After.",
    )
    math_workers: int = Field(
        default=2, ge=1, le=256, description="Grader processes of the math reward, started on first use."
    )
    math_timeout_s: float = Field(
        default=5.0, gt=0, le=600, description="CPU seconds one answer may cost the math grader before it is killed."
    )
    pattern_workers: int = Field(
        default=1, ge=1, le=256, description="Grader processes of regex and json_schema, started on first use."
    )
    pattern_timeout_s: float = Field(
        default=2.0, gt=0, le=600, description="CPU seconds one answer may cost such a grader before it is killed."
    )
    user_workers: int = Field(
        default=2, ge=1, le=256, description="Processes for each reward that the run file names by import path or file."
    )
    user_timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="Seconds such a reward may take for one group before it is killed."
    )
    code_sandbox: Literal["auto", "bubblewrap", "landlock", "off"] = Field(
        default="auto",
        description="Sandbox of the code reward; auto takes the first that passes its attacks on this machine.",
    )
    code_workers: int = Field(default=2, ge=1, le=256, description="Programs of the code reward run at the same time.")
    code_cpu_s: float = Field(
        default=5.0, ge=1, le=600,
        description="CPU seconds a program may use for one test; six times that by wall clock.",
    )  # fmt: skip
    code_group_cpu_s: float = Field(
        default=600.0,
        ge=1,
        le=86_400,
        description="CPU seconds for the programs of one group together, in equal parts and at least code_cpu_s each; "
        "tests that a program has not reached by then count as failed. Keeps one group from occupying the sandboxes for hours.",
    )
    code_memory_mb: int = Field(default=1024, ge=64, le=65536, description="Address space of a program, in MiB.")
    code_score: Literal["share", "all"] = Field(
        default="share", description="share: the part of its tests a program passes; all: 1 for all of them, else 0."
    )
    drain_s: float = Field(
        default=10.0, ge=0, le=600,
        description="Seconds that packs in progress may take after SIGTERM; then they are requeued.",
    )  # fmt: skip
    log_level: str = Field(
        default="info", pattern="^(debug|info|warning|error)$", description="Least severe line that is shown."
    )

    @field_validator("allowed_targets")
    @classmethod
    def _valid_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        TargetPolicy(value, key="reward_service.allowed_targets")
        return value

    @model_validator(mode="after")
    def _token_unless_loopback(self) -> RewardServiceSection:
        if not tls.is_loopback(self.host) and not self.token and self.token_file is None and self.tokens_file is None:
            raise ValueError(
                f"reward_service.host {self.host} can be reached from other machines: set reward_service.token_file "
                "(or tokens_file), or listen on 127.0.0.1"
            )
        return self

    def access(self) -> Access:
        tokens = []
        if self.token_file is not None:
            tokens.append((ADMIN, Role.ADMIN, _read(self.token_file, "token_file").strip()))
        elif self.token:
            tokens.append((ADMIN, Role.ADMIN, self.token))
        if self.tokens_file is not None:
            try:
                tokens += read_tokens(_read(self.tokens_file, "tokens_file"))
            except ValueError as err:
                raise ConfigError(f"reward_service.tokens_file = {self.tokens_file}: {err}") from None
        return Access(tokens)


class RewardSettings(Section):
    """What the reward service reads of a run file."""

    run: RunSettings = Field(default_factory=RunSettings)
    nats: NatsSettings = Field(default_factory=NatsSettings)
    s3: S3Settings = Field(default_factory=S3Settings)
    reward: RewardChoice = Field(default_factory=RewardChoice)
    reward_service: RewardServiceSection = Field(default_factory=RewardServiceSection)


def _read(file: Path, key: str) -> str:
    text = content_of(file, f"reward_service.{key}")
    if not text.strip():
        raise ConfigError(f"reward_service.{key} = {file}: the file is empty")
    return text
