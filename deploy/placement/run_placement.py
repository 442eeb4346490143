"""The placement of a run on this machine: its GPUs and settings are read, then each process gets its GPUs and the settings that follow.

`penstock train` (with ``--local`` or without), `rollout`, `eval`, `placement`, `plan`, `doctor` and `init` all ask here.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.console import launch
from penstock.deploy.placement.needs import engine_need, server_settings, trainer_need, trainer_on_gpu
from penstock.deploy.placement.placement import DoesNotFit, Placement
from penstock.deploy.placement.planner import Role, place
from penstock.deploy.plan.memory.report import parse_size
from penstock.protocol import files
from penstock.protocol.config.run_file import Loaded, load, split_arguments
from penstock.protocol.config.shared_sections import SHARED
from penstock.protocol.errors import ConfigError
from penstock.protocol.metrics.gpu import ORDER, PCI_ORDER, VISIBLE, Gpu, visible_gpus
from penstock.protocol.record.run_folder import PLACEMENT
from penstock.protocol.shared_device import POLL_S, open_lock, try_lock
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.data.inputs import model_folder
from penstock.trainer.settings import TrainerSettings

_WORKERS = 2  # of `penstock train --local` whose engines need no GPU
_GPUS = re.compile(r"(\d{1,3})x(.+)")
_CLAIM_S = 1.0  # to claim a GPU at whose lock another command may just look


@dataclass(frozen=True, slots=True)
class RunPlacement:
    """Where the processes of one command go, and the settings that follow; without GPUs nothing follows."""

    placement: Placement = field(default_factory=Placement)
    overrides: tuple[str, ...] = ()  # SECTION.KEY=VALUE of what the run file does not set
    num_workers: int = _WORKERS
    lock_folder: Path | None = None  # None: nothing is claimed

    @property
    def num_processes(self) -> int:
        """Processes that compute on this machine besides the trainer's ranks: they share its cores."""
        return len(self.placement.engines) or self.num_workers

    def of_trainer(self) -> dict[str, str]:
        return _environ(self.placement.trainer)

    def of_worker(self, number: int) -> dict[str, str]:
        """Return the variables of a worker; none where its engine needs no GPU, or has GPUs that are not known here."""
        return _environ(self.placement.of_worker(number)) if self.placement.engines else {}

    def of_others(self) -> dict[str, str]:
        """Return the variables of a process that runs a user's code, such as a reward: it sees what engines and trainer leave."""
        return _environ(self.placement.rest) if self.placement.engines else {}

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other commands from these GPUs meanwhile, or while the program runs that replaces this one; raises DoesNotFit if one was faster.

        In the order of their names, each once: of two commands that start at once, one gets all that both want.
        """
        folder = self.lock_folder
        if folder is None:
            yield
            return
        given = {_name(gpu): gpu for gpu in itertools.chain(self.placement.trainer, *self.placement.engines)}
        claims: list[int] = []
        try:
            for name, gpu in sorted(given.items()):
                claims.append(claim := open_lock(folder, name, "given"))
                os.set_inheritable(claim, True)
                ends = time.monotonic() + _CLAIM_S
                while not try_lock(claim, fcntl.LOCK_EX):
                    if time.monotonic() > ends:
                        raise DoesNotFit(
                            f"GPU {gpu.number}: another command has just given it to its processes; start this one again"
                        )
                    time.sleep(POLL_S)
            yield
        finally:
            for claim in claims:
                os.close(claim)

    def document(self) -> dict[str, Any]:
        return {**self.placement.document(), "overrides": list(self.overrides)}

    def write(self, folder: Path) -> None:
        """Record it in the run's folder, where GPUs were given out."""
        if self.placement.gpus:
            document = {"host": socket.gethostname(), **self.document()}
            files.atomic_write(folder / PLACEMENT, f"{json.dumps(document, indent=1)}\n".encode())


def place_run(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    role: Role = "both",
    workers: int | None = None,
    nodes: int = 1,
    gpus: Sequence[Gpu] | None = None,
    fetch: bool = False,
) -> RunPlacement:
    """Return the placement of the processes of ``role``, which one command starts on this machine.

    Args:
        arguments: Run files and overrides.
        environ: Variables of this process: which GPUs it sees, and settings.
        role: ``both`` for `penstock train --local`.
        workers: How many; None: as many as follow.
        nodes: Machines among which the trainer's ranks are divided.
        gpus: GPUs to plan with; None: those that this process sees.
        fetch: Download a model that is named by its id on the hub, as the run will.

    Raises:
        DoesNotFit: The roles do not fit, with numbers and the setting to change.
        ConfigError: The settings cannot be read.
        GpusUnknown: The driver does not answer.
    """
    seen = visible_gpus(environ) if gpus is None else gpus
    lock_folder = None
    if not seen:
        if any(launch.given(arguments, environ, "placement", key) for key in ("engines", "trainer")):
            place((), load_engines(arguments, environ).settings.placement, None, None)
        return RunPlacement(num_workers=_WORKERS if workers is None else workers)
    engines = load_engines(arguments, environ)
    trains = _load_trainer(arguments, environ, needed=role != "engines")
    if fetch and trains is not None:
        trains = _fetched(trains)
    wishes = engines.settings.placement
    both = role == "both" or wishes.engines is not None or wishes.trainer is not None or wishes.shared in SHARED
    from_run = trains is not None and trains.settings.data.from_run is not None
    engine = trainer = None
    if (both or role == "engines") and not from_run:
        engine = engine_need(engines, trains and trains.settings, workers)
    if trains is not None and (both or role == "trainer"):
        trainer = trainer_need(trains, nodes=nodes, takes_all=not both)
    if gpus is None and (engine or trainer):
        lock_folder = wishes.lock_folder
        seen = [replace(gpu, is_given=_is_given(lock_folder, gpu)) for gpu in seen]
    placement = place(seen, wishes, engine, trainer, role)
    if placement.is_shared and role != "both":
        lock_folder = None  # the command of the other role has the same GPUs
    num_workers = placement.num_workers or (_WORKERS if workers is None else workers)
    return RunPlacement(placement, tuple(_overrides(placement, engines, trains, nodes)), num_workers, lock_folder)


def _name(gpu: Gpu) -> str:
    return gpu.uuid or gpu.id


def _is_given(folder: Path, gpu: Gpu) -> bool:
    """Return True while another command has the GPU for its processes."""
    handle = open_lock(folder, _name(gpu), "given")
    try:
        return not try_lock(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


def load_engines(arguments: Sequence[str], environ: Mapping[str, str]) -> Loaded[RolloutSettings]:
    run_files, overrides = split_arguments(arguments)
    return load(RolloutSettings, files=run_files, overrides=overrides, environ=environ)


def _load_trainer(
    arguments: Sequence[str], environ: Mapping[str, str], *, needed: bool
) -> Loaded[TrainerSettings] | None:
    """Return the trainer's settings; None on the machine of a worker, whose run file may lack them."""
    run_files, overrides = split_arguments(arguments)
    try:
        return trainer_on_gpu(run_files, overrides, environ)
    except ConfigError:
        if needed:
            raise
        return None


def _fetched(loaded: Loaded[TrainerSettings]) -> Loaded[TrainerSettings]:
    model = loaded.settings.model
    path = model_folder(model.path, "model.path")
    return Loaded(loaded.settings.model_copy(update={"model": model.model_copy(update={"path": path})}), loaded.origins)


def _overrides(
    placement: Placement, engines: Loaded[RolloutSettings], trains: Loaded[TrainerSettings] | None, nodes: int
) -> Iterator[str]:
    """Yield the settings that follow from the placement, of those that no source sets."""
    if placement.trainer and trains is not None:
        follow = {"num_ranks": len(placement.trainer) * nodes, "zero_stage": placement.zero_stage}
        for key, value in follow.items():
            if trains.origins[f"trainer.{key}"] == "default" and getattr(trains.settings.trainer, key) != value:
                yield f"trainer.{key}={value}"
    if placement.takes_turns and not engines.settings.placement.takes_turns:
        yield "placement.shared=turns"
    servers = server_settings(engines.settings)
    if not placement.engines or servers is None:
        return
    section = servers.section
    if placement.engines_of_worker != servers.engines:
        yield f"{section}.engines={placement.engines_of_worker}"
    if placement.engine_size != servers.gpus:
        yield f"{section}.{servers.size_key}={placement.engine_size}"
    if placement.is_shared and servers.fraction is None:
        yield f"{section}.{servers.fraction_key}={placement.engine_fraction}"


def _environ(gpus: Sequence[Gpu]) -> dict[str, str]:
    order = {ORDER: PCI_ORDER} if any(gpu.id.isdecimal() for gpu in gpus) else {}
    return {VISIBLE: ",".join(gpu.id for gpu in gpus), **order}


def parse_gpus(text: str) -> list[Gpu]:
    """Return the GPUs that a text such as 8x80GB describes, which nobody uses; raises ConfigError for another text."""
    parts = _GPUS.fullmatch(text)
    if parts is None or not int(parts[1]):
        raise ConfigError(f"--gpus {text}: expected the number of GPUs and the memory of each, such as 8x80GB")
    size = parse_size(parts[2], "--gpus")
    return [Gpu(number, str(number), parts[2], size, 0) for number in range(int(parts[1]))]
