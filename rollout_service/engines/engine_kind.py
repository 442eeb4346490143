"""One value describes one kind of engine; `ENGINES` finds it by the name in ``worker.engine``.

A new engine is one package, or one file, with an `EngineKind` at its top level: here, in an installed package with an
entry point in the group ``penstock.engines``, or in any file that a run names as ``my_engine.py:kind``.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, get_args

from pydantic import Field, field_validator, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.extensions import Registry
from penstock.rollout_service.engines.attached_engine import AttachedEngine
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.engines.engine_client import (
    EngineClient,
    GeneratesRedundantly,
    ReleasesMemory,
    UpdateMode,
)
from penstock.rollout_service.engines.engine_pool import EnginePool
from penstock.rollout_service.engines.engine_process import Inherited, LaunchCommand, with_parent
from penstock.rollout_service.engines.managed_engine import ManagedEngine

_FLAG = re.compile(r"(--[a-z-]+): ")


class Connect(Protocol):
    def __call__(self, url: str, *, api_key: str, request_deadline_s: float) -> EngineClient:
        """Return a client; nothing is sent yet."""
        ...


@dataclass(frozen=True, slots=True)
class ServerLaunch:
    command: LaunchCommand
    log_name: str  # of the file in the worker's cache folder that takes its output
    environ: Mapping[str, str] | None = None  # its whole environment; None: the worker's
    context_length: int | None = None  # the limit it is started with, where less than the model's
    # its program and a flag with which it reads the words after these from stdin (`PreparedProcess`)
    prepare: Sequence[str] = ()
    api_key: str = ""  # that the server asks for; it reads it from its environment


class StartedServerSettings(Section):
    """The settings of servers that the worker starts, whatever their kind; a subclass adds those of its server.

    A setting whose description begins with a flag and a colon is passed to the server as that flag, unless it is None.
    """

    section: ClassVar[str]
    reserved: ClassVar[frozenset[str]]  # flags that the worker sets, and flags that the contract forbids
    of_adapters: ClassVar[tuple[str, ...]]  # settings without effect unless ``max_lora_rank`` is set
    size_key: ClassVar[str]  # the setting of how many GPUs share every layer
    fraction_key: ClassVar[str]  # the setting of the share of a GPU's memory for weights, keys and values
    multiplying_flags: ClassVar[tuple[str, ...]] = ()  # of extra_args, by whose value a server has more GPUs

    python: Path | None = Field(
        None,
        description="Python of the server's own environment, such as /opt/sglang/bin/python; none: the worker's own.",
    )
    command: tuple[str, ...] = Field(
        (),
        description="Instead of python: the words that start the server, before its flags, such as a container's "
        "['docker', 'run', …, 'python3', '-m', 'sglang.launch_server'].",
    )
    environ: dict[str, str] = Field(
        {}, description="Environment variables of the server, besides the worker's own without PYTHON* and PENSTOCK_*."
    )
    engines: int = Field(1, ge=1, le=64, description="Servers of this worker; a group's samples all go to one of them.")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="--dtype: that of the weights."
    )
    quantization: str | None = Field(None, description="--quantization: 'fp8', 'w8a8_int8', …")
    memory_saver: bool = Field(
        False,
        description="Start servers so that they can release their GPU's memory (SGLang: --enable-memory-saver, vLLM: "
        "--enable-sleep-mode); on where placement.shared = 'turns'.",
    )
    max_lora_rank: int | None = Field(
        None,
        ge=1,
        description="--max-lora-rank: largest rank of an adapter, for a run whose versions are adapters (model.lora.rank at "
        "least), with --enable-lora; none: the server takes no adapters.",
    )
    extra_args: tuple[str, ...] = Field((), description="Further flags, as they are: ['--trust-remote-code', …].")

    @field_validator("extra_args")
    @classmethod
    def _not_reserved(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        taken = sorted({word.split("=", 1)[0] for word in value} & cls.reserved)
        if taken:
            raise ValueError(f"{', '.join(taken)} cannot be passed on: the worker sets it, or the contract forbids it")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        chosen, name = self.model_fields_set, self.section
        if self.command and self.python is not None:
            raise ValueError(
                f"{name}.command and {name}.python are both set; the command names its own Python, drop one"
            )
        unused = [setting for setting in self.of_adapters if setting in chosen]
        if unused and self.max_lora_rank is None:
            raise ValueError(f"{name}.{unused[0]} has no effect without {name}.max_lora_rank; set that too")
        return self

    @property
    def gpus(self) -> int:
        """GPUs of one server."""
        return getattr(self, self.size_key) * self._times_of_flags()

    @property
    def fraction(self) -> float | None:
        return getattr(self, self.fraction_key)

    def _times_of_flags(self) -> int:
        words = [part for word in self.extra_args for part in word.split("=", 1)]
        values = (value for flag, value in itertools.pairwise(words) if flag in self.multiplying_flags)
        return math.prod(int(value) for value in values if value.isdecimal())

    def start_words(self, port_file: Path, *program: str) -> list[str]:
        """Return the words that start the server, which ends with this worker; ``program`` is what its Python runs."""
        start = self.command or (str(self.python or sys.executable), *program)
        return [*with_parent(os.getpid(), port_file), *start]

    def flags(self) -> list[str]:
        words = ["--host", "127.0.0.1", "--port", "{port}"]
        for name in type(self).model_fields:
            flag, value = self.flag_of(name), getattr(self, name)
            if flag is not None and value is not None:
                words += [flag, str(value)]
        return words

    @classmethod
    def flag_of(cls, name: str) -> str | None:
        flag = _FLAG.match(cls.model_fields[name].description or "")
        return None if flag is None else flag[1]


class NoOptions(Section):
    """The options of an engine that has none."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    name: str
    connect: Connect
    # Options and the worker's environment → one launch for each server; None: servers run at worker.engine_url.
    launches: Callable[[Any, Mapping[str, str]], Sequence[ServerLaunch]] | None = None
    options: type[Section] = NoOptions  # validates worker.engine_options
    section: str = ""  # section of the run file that holds the options instead
    update_modes: tuple[UpdateMode, ...] = get_args(UpdateMode)
    long_mode: UpdateMode = (
        "retract"  # of worker.update_mode = "auto" while long completions run, where it has that mode
    )
    # Its client says which experts of a mixture computed each token, where a request asks for it.
    returns_experts: bool = False

    @property
    def is_attached(self) -> bool:
        return self.launches is None

    @property
    def may_release(self) -> bool:
        """Whether its servers can take turns with a trainer on a GPU: the worker starts them, and their client can free memory."""
        if self.is_attached:
            return False
        return not isinstance(self.connect, type) or issubclass(self.connect, ReleasesMemory)

    @property
    def may_abandon(self) -> bool:
        """Whether its client can end single completions, as redundant ones need; True also where only a running client can tell."""
        return not isinstance(self.connect, type) or issubclass(self.connect, GeneratesRedundantly)


@dataclass(frozen=True, slots=True)
class EngineSite:
    """Where and how a worker's engines run, whatever their kind."""

    urls: Sequence[str]
    api_key: str
    cache_dir: Path
    request_deadline_s: float
    start_deadline_s: float
    environ: Mapping[str, str]  # the worker's
    inherited: Sequence[int] = ()  # open files that every server's process inherits: its locks of shared GPUs


ENGINES = Registry("engine", EngineKind, package="penstock.rollout_service.engines", group="penstock.engines")


def create_engine(kind: EngineKind, options: object, site: EngineSite) -> Engine:
    """Return the engine of a worker; several servers are a pool. Nothing is started or asked yet."""
    engines = (
        _attached(kind, site) if kind.launches is None else _managed(kind, kind.launches(options, site.environ), site)
    )
    return engines[0] if len(engines) == 1 else EnginePool(engines)


def _attached(kind: EngineKind, site: EngineSite) -> list[Engine]:
    return [
        AttachedEngine(
            kind.connect(url, api_key=site.api_key, request_deadline_s=site.request_deadline_s),
            start_deadline_s=site.start_deadline_s,
        )
        for url in site.urls
    ]


def _managed(kind: EngineKind, launches: Sequence[ServerLaunch], site: EngineSite) -> list[Engine]:
    return [
        ManagedEngine(
            launch.command,
            functools.partial(kind.connect, api_key=launch.api_key, request_deadline_s=site.request_deadline_s),
            log_file=site.cache_dir / launch.log_name,
            start_deadline_s=site.start_deadline_s,
            inherited=Inherited(launch.environ, site.inherited),
            context_length=launch.context_length,
            prepare=launch.prepare,
            kind=kind.name,
        )
        for launch in launches
    ]
