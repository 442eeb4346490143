"""Everything the rollout worker may be told."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from penstock.protocol.config.connection import NatsSettings, RunSettings, S3Settings, Section
from penstock.protocol.errors import ConfigError
from penstock.protocol.facts import Split
from penstock.rollout_service.engines.sglang.settings import SglangSettings
from penstock.rollout_service.engines.update_mode import UpdateMode

_WORKER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def default_worker_id() -> str:
    """Return ``<host>-<process id>``, which no other living worker has."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', socket.gethostname())[:48] or 'worker'}-{os.getpid()}"


class WorkerSettings(Section):
    """The worker and its engine."""

    id: str = Field(
        default_factory=default_worker_id,
        description="Name of this worker in messages, heartbeats and folders; no two living workers share one.",
    )
    engine: Literal["embedded", "sglang", "sglang-url"] = Field(
        "embedded",
        description="'embedded': our own torch engine as a child; 'sglang': SGLang as a child, see [sglang]; "
        "'sglang-url': SGLang servers that somebody else runs.",
    )
    engine_url: str = Field(
        "", description="URL of the SGLang server, for engine = 'sglang-url'; several with commas between them."
    )
    engine_api_key_file: Path | None = Field(
        None, description="File with the key that the SGLang server was started with (its admin key if it has one)."
    )
    packs_in_flight: int = Field(
        2, ge=1, le=64, description="Packs worked on at once: one is stored and announced while the next generates."
    )
    max_running: int = Field(256, ge=1, description="Sequences the embedded engine decodes at once.")
    device: str = Field("cpu", description="Where the embedded engine computes: 'cpu' or 'cuda'.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Number format of the embedded engine.")
    cache_dir: Path | None = Field(
        None,
        description="Folder for local copies of weights; an SGLang server must see the same path. "
        "Default: 'cache' in the run's folder.",
    )
    roles: Annotated[tuple[Split, ...], Field(min_length=1)] = Field(
        ("train", "eval"), description="Which tasks to take: 'train', 'eval' or both; evaluation goes first."
    )
    request_deadline_s: float = Field(
        600.0, gt=0, description="Seconds one engine request may take before its pack is given back."
    )
    start_deadline_s: float = Field(300.0, gt=0, description="Seconds an engine may take to load and answer.")
    max_paused_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the run's living workers whose engines may stop for a new version at once; at least one. "
        "Engines that stop for less than half a second do not wait for each other.",
    )
    update_mode: UpdateMode = Field(
        "drain",
        description="What becomes of running generations when a newer version is loaded: 'drain': the load waits for "
        "them; 'retract': they are computed again under the new weights and go on; 'in_place': they go on with the keys "
        "and values of the old weights; 'abort': the worker takes what they have and asks for the rest.",
    )
    check_weights_every: int = Field(
        1,
        ge=0,
        description="Every so many versions the engine's checksum of its weights is compared with the other engines'; 0: "
        "never. It is asked for while generation goes on, and not at all where the answer to an update holds it.",
    )
    finish_s: float = Field(
        30.0,
        ge=0,
        description="Seconds a worker that was told to stop gives the packs in flight; then it gives them back.",
    )
    task_attempts: int = Field(5, ge=1, description="Deliveries after which a failing pack goes to the dead letters.")
    retry_delay_s: float = Field(
        1.0, ge=0, description="Seconds before a failed pack is delivered again; doubles with every attempt."
    )

    @field_validator("id")
    @classmethod
    def _valid_id(cls, value: str) -> str:
        if not _WORKER_ID.fullmatch(value):
            raise ValueError(f"must be 1 to 64 characters of a-z, A-Z, 0-9, '_' and '-', got {value!r}")
        return value

    @model_validator(mode="after")
    def _engine_is_named(self) -> WorkerSettings:
        urls = self.engine_urls
        if self.engine == "sglang-url" and not (urls and all(url.startswith(("http://", "https://")) for url in urls)):
            raise ValueError(
                "worker.engine = 'sglang-url' needs worker.engine_url, such as 'http://127.0.0.1:30000', "
                f"got {self.engine_url!r}"
            )
        if len(set(urls)) < len(urls):
            raise ValueError(f"worker.engine_url names a server twice: {self.engine_url!r}")
        if self.engine != "sglang-url" and self.engine_url:
            raise ValueError("worker.engine_url is set, so set worker.engine = 'sglang-url' too, or leave both out")
        return self

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """The URLs of the SGLang servers."""
        return tuple(url.strip().rstrip("/") for url in self.engine_url.split(",") if url.strip())

    def engine_api_key(self) -> str:
        """Return the SGLang server's key, empty when none is needed; raises ConfigError when unreadable."""
        if self.engine_api_key_file is None:
            return ""
        try:
            return self.engine_api_key_file.read_text().strip()
        except OSError as err:
            raise ConfigError(
                f"worker.engine_api_key_file = {self.engine_api_key_file}: not readable ({err.strerror})"
            ) from None


class RolloutSettings(Section):
    """The sections of a run file that the rollout worker reads."""

    run: RunSettings = RunSettings()  # pyright: ignore[reportCallIssue]
    nats: NatsSettings = NatsSettings()  # pyright: ignore[reportCallIssue]
    s3: S3Settings = S3Settings()  # pyright: ignore[reportCallIssue]
    worker: WorkerSettings = WorkerSettings()  # pyright: ignore[reportCallIssue]
    sglang: SglangSettings = SglangSettings()  # pyright: ignore[reportCallIssue]

    @property
    def cache_dir(self) -> Path:
        """Folder below which this worker, and no other, keeps its copies of weights."""
        base = self.worker.cache_dir or self.run.folder / "cache"
        return (base / self.run.id / self.worker.id).absolute()
