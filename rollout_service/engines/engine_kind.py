"""One value describes one kind of engine; `ENGINES` finds it by the name in ``worker.engine``.

A new engine is one package, or one file, with an `EngineKind` at its top level: here, in an installed package with an
entry point in the group ``penstock.engines``, or in any file that a run names as ``my_engine.py:kind``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, get_args

from pydantic import field_validator, model_validator

from penstock.protocol.config.connection import Section
from penstock.protocol.extensions import Registry
from penstock.rollout_service.engines.attached_engine import AttachedEngine
from penstock.rollout_service.engines.engine import Engine
from penstock.rollout_service.engines.engine_client import (
    EngineClient,
    GeneratesRedundantly,
    UpdateMode,
)
from penstock.rollout_service.engines.engine_pool import EnginePool
from penstock.rollout_service.engines.engine_process import LaunchCommand
from penstock.rollout_service.engines.managed_engine import ManagedEngine


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
    """Checks of a section whose ``python`` or ``command`` starts servers with ``extra_args``; a subclass has the fields."""

    section: ClassVar[str]
    reserved: ClassVar[frozenset[str]]  # flags that the worker sets, and flags that the contract forbids
    of_adapters: ClassVar[tuple[str, ...]]  # settings without effect unless ``max_lora_rank`` is set
    if TYPE_CHECKING:
        python: Path | None
        command: tuple[str, ...]
        max_lora_rank: int | None

    @field_validator("extra_args", check_fields=False)
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


def flags_of(valued: Mapping[str, object]) -> list[str]:
    """Return the words of a command line for flags with values; a flag without one (None) is left out."""
    return [word for flag, value in valued.items() if value is not None for word in (flag, str(value))]


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
    # Its client says which experts of a mixture computed each token, where a request asks for it.
    returns_experts: bool = False

    @property
    def is_attached(self) -> bool:
        return self.launches is None

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
            environ=launch.environ,
            context_length=launch.context_length,
            prepare=launch.prepare,
        )
        for launch in launches
    ]
