"""Sections of the run file that several services read: ``[metrics]``, ``[placement]``, ``[retention]``, ``[teacher]``.

``[metrics]`` says where trainer and rollout workers answer Prometheus, ``[placement]`` which GPUs of a machine they
use, ``[teacher]`` which model workers ask about sampled tokens, ``[retention]`` how long each part of a run is kept.
The rules are pure; the trainer with the lease deletes.

| what                          | how long                                                            |
|-------------------------------|---------------------------------------------------------------------|
| packs of trained groups       | `retention.trained_packs_h`; 0, the default: until the run is removed |
| log-probabilities of a step   | as long as its packs; those of a step that a crash rolled back: as unused packs |
| packs of a rescored input     | until it is removed by `penstock runs rm` of its name                |
| packs, task lists that nothing references | `retention.unused_packs_h` after they were written: dropped groups |
| events, dead letters          | `retention.events_h`, `retention.dead_letters_h`, the streams' age; 0: until full |
| checkpoints                   | `trainer.keep_checkpoints`                                          |
| weights                       | `trainer.keep_versions`, `keep_best`, `keep_milestones` (`weight_retention.py`) |
| the record (lineage)          | until the run is removed by `penstock runs rm`                      |

With the defaults a finished run can be replayed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from penstock.protocol.config.connection import Section, secret_of
from penstock.protocol.groups import MAX_TEACHER_TOP_K
from penstock.protocol.streams import StreamLimits

if TYPE_CHECKING:
    from penstock.protocol.transport.blobs import BlobStat

_HOUR_S = 3600.0


class MetricsSettings(Section):
    """Prometheus metrics of trainer and rollout workers at ``/metrics``; the reward service answers at its HTTP API."""

    host: str = Field(
        default="127.0.0.1",
        description="Address that /metrics listens on. There is no token: others than loopback should be reachable by "
        "Prometheus only.",
    )
    trainer_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port of the trainer's /metrics; 0 takes any free one, None is off."
    )
    rollout_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of a rollout worker's /metrics; 0 takes any free one, as several workers of one machine "
        "need; None is off.",
    )


SHARED = ("beside", "turns")


class PlacementSettings(Section):
    """Which GPUs of this machine engines and trainer use; what is not set is decided by their memory (penstock placement)."""

    engines: int | tuple[int, ...] | None = Field(
        default=None,
        description="GPUs of the engines: how many, or which, [0, 1], by their places among those that the command "
        "sees (CUDA_VISIBLE_DEVICES). None: those that the trainer leaves.",
    )
    trainer: int | tuple[int, ...] | None = Field(
        default=None,
        description="GPUs of the trainer, likewise. None: as many as trainer.num_ranks says, else as few as its memory "
        "fits on.",
    )
    shared: Literal["auto", "beside", "turns", "never"] = Field(
        default="auto",
        description="Whether engines and trainer use the same GPUs. 'beside': at once, each with a part of the memory; "
        "'turns': one has its memory there at a time, the engines release weights, keys and values, the trainer moves "
        "its states to host memory. 'auto': on a single GPU, beside each other where both fit, else in turns.",
    )
    devices: tuple[str, ...] = Field(
        default=(),
        description="UUIDs of the GPUs that this process shares in turns, in the order of CUDA_VISIBLE_DEVICES: the "
        "trainer's local rank r has the r-th, a worker all of them. None: "
        "those that it sees, as their driver names them.",
    )
    lock_dir: Path | None = Field(
        default=None,
        description="Folder for the locks of GPUs that are shared in turns, which every process of the host that uses "
        "one must see: containers need a common mount. Default: "
        "a folder of the user's in the system's folder for temporary files.",
    )
    turn_deadline_s: float = Field(
        default=3600.0,
        gt=0,
        description="Seconds to wait for the turn on a shared GPU before the error that names who has it.",
    )

    @property
    def takes_turns(self) -> bool:
        return self.shared == "turns"

    @property
    def lock_folder(self) -> Path:
        return self.lock_dir or Path(tempfile.gettempdir()) / f"penstock-gpus-{os.getuid()}"

    @model_validator(mode="after")
    def _can_be_had(self) -> PlacementSettings:
        for key in ("engines", "trainer"):
            wish = getattr(self, key)
            listed = () if wish is None or isinstance(wish, int) else wish
            if wish is not None and (wish == () or min(listed, default=1) < 0 or (isinstance(wish, int) and wish < 1)):
                raise ValueError(f"placement.{key} = {wish}: expected a number of at least 1, or a list of GPUs from 0")
            if len(set(listed)) < len(listed):
                raise ValueError(f"placement.{key} = {list(listed)} names a GPU twice; name each once")
        both = [set(wish) for wish in (self.engines, self.trainer) if isinstance(wish, tuple)]
        if len(both) == 2 and both[0] & both[1] and (self.shared not in SHARED or both[0] != both[1]):
            raise ValueError(
                f"placement.engines and placement.trainer both name GPU {min(both[0] & both[1])}: give each GPU to one "
                'of them, or all to both with placement.shared = "beside" or "turns"'
            )
        return self


class RetentionSettings(Section):
    """How long the parts of a run are kept."""

    trained_packs_h: float = Field(
        default=0.0,
        ge=0.0,
        description="Hours to keep the packs of trained groups, and the log-probabilities of their steps; 0: until the "
        "run is removed, so that it can be replayed.",
    )
    unused_packs_h: float = Field(
        default=24.0,
        ge=1.0,
        description="Hours to keep packs and task lists that no step, queue or dead letter references.",
    )
    events_h: float = Field(
        default=0.0, ge=0.0, description="Hours, at least 1, to keep events in their stream; 0: no limit."
    )
    dead_letters_h: float = Field(
        default=0.0,
        ge=0.0,
        description="Hours, at least 1, to keep dead letters, which can be sent again until then; 0: no limit.",
    )

    scored_messages: int = Field(
        default=StreamLimits().max_scored,
        ge=16,
        description="Messages of scored groups that NATS takes; the trainer holds each until a checkpoint, and makes "
        "one when half are held. `penstock bootstrap` sets it.",
    )

    @field_validator("events_h", "dead_letters_h")
    @classmethod
    def _at_least_the_duplicate_window(cls, value: float) -> float:
        if 0.0 < value < 1.0:
            raise ValueError(f"must be 0 or at least 1 hour, got {value}")
        return value

    def limits(self) -> StreamLimits:
        return StreamLimits(
            max_scored=self.scored_messages,
            events_age_s=self.events_h * _HOUR_S,
            dead_age_s=self.dead_letters_h * _HOUR_S,
        )


def expired(
    stored: Iterable[BlobStat],
    *,
    named: Collection[str],
    trained: Collection[str],
    settings: RetentionSettings,
    now: datetime,
) -> list[str]:
    """Return the keys of packs, task lists and log-probabilities to delete, of all ``stored`` ones of a run.

    ``named`` are keys that a message of a work queue or a dead letter references, kept at any age; ``trained`` those
    that a step of the committed record references, and of its log-probabilities. ``now`` is of the store's clock.
    """
    old_keys = []
    for stat in stored:
        if stat.key in named:
            continue
        hours = settings.trained_packs_h if stat.key in trained else settings.unused_packs_h
        if hours and (now - stat.modified).total_seconds() > hours * _HOUR_S:
            old_keys.append(stat.key)
    return old_keys


class TeacherSettings(Section):
    """A model of the policy's vocabulary that is not trained; rollout workers store its log-probabilities in every pack."""

    url: str = Field(
        default="",
        description="URL of the server that answers for the teacher; several with commas between them, of the same "
        "model.",
    )
    kind: str = Field(
        default="sglang",
        description="What the server speaks: 'sglang' (SGLang's /generate, which Penstock's embedded engine answers "
        "too), or your own as 'my_package.module:kind' or 'my_teacher.py:kind'.",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        le=MAX_TEACHER_TOP_K,
        description="Likeliest tokens that the teacher names in the place of each sampled one, for "
        "algorithm.distill_form = forward.",
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
        return tuple(url.strip().rstrip("/") for url in self.url.split(",") if url.strip())

    @field_validator("url")
    @classmethod
    def _is_http(cls, value: str) -> str:
        for url in filter(None, map(str.strip, value.split(","))):
            if not url.startswith(("http://", "https://")) or "@" in url:
                raise ValueError(f"expected an address such as http://127.0.0.1:30000, without a password, got {url!r}")
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
        return secret_of("", self.api_key_file, "teacher.api_key_file")
