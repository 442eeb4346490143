"""The settings of a run of which every process is on this machine, and the copy of its rescored input.

A local run on a rescored input gets a copy in its store. The store of a local run is a folder, which its S3 server serves
unchanged: bucket, then key. An input is immutable and its index is written last, so that it can be copied while the run it was
made from is stopped, running or being rescored. The copy belongs to the new run: either run can be removed without the other.
"""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console.connections import COPIED_INPUTS, STORE
from penstock.deploy.bootstrap import ConnectionSettings
from penstock.deploy.early_checks import check_reward_files
from penstock.protocol import blob_keys, files
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.errors import ConfigError
from penstock.reward_service.settings import RewardSettings
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.data.data_order import known_steps
from penstock.trainer.settings import TrainerSettings

_OBJECTS = "objects"


@dataclass(frozen=True, slots=True)
class LocalSettings:
    arguments: tuple[str, ...]  # with absolute paths of run files
    trainer: TrainerSettings
    rollout: RolloutSettings
    connection: ConnectionSettings
    total_steps: int | None
    num_workers: int  # 0 for a run on a rescored input, of which nothing is generated or scored
    reward_files: tuple[Path, ...]  # absolute
    starts_servers: bool  # NATS and S3, because the settings name no others
    chooses_reward_port: bool
    worker_overrides: tuple[str, ...]
    names_keys: bool  # of signed weights


def read_local_settings(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    num_workers: int,
    reward_files: Sequence[Path],
    starts_servers: bool | None,
    tls: bool,
) -> LocalSettings:
    """Return the settings; raises ConfigError, with file and line, for those that a service would refuse."""
    if num_workers < 1:
        raise ConfigError(f"--workers {num_workers}: a run needs at least one rollout worker")
    files, overrides = split_arguments(arguments)
    files = [file.absolute() for file in files]
    connection = load(ConnectionSettings, files=files, overrides=overrides, environ=environ)
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=environ)
    reward = load(RewardSettings, files=files, overrides=overrides, environ=environ)
    rollout = load(RolloutSettings, files=files, overrides=overrides, environ=environ).settings
    trainer = loaded.settings
    starts = _names_no_servers(connection.origins) if starts_servers is None else starts_servers
    if tls and not starts:
        raise ConfigError(
            "--tls is for servers that --local starts, and the settings name others: write nats.url = tls://... and "
            "s3.endpoint = https://..., or leave out --tls"
        )
    if trainer.data.from_run is not None and reward_files:
        raise ConfigError(
            f"--serve: the groups of data.from_run = {trainer.data.from_run} have their rewards; leave out --serve, or give them "
            "others first (penstock rescore RUN --serve FILE)"
        )
    served = tuple(file.absolute() for file in reward_files)
    names_keys = _names_keys(trainer, rollout)
    check_reward_files(served)
    return LocalSettings(
        arguments=(*map(str, files), *overrides),
        trainer=trainer,
        rollout=rollout,
        connection=connection.settings,
        total_steps=known_steps(loaded),
        num_workers=num_workers if trainer.data.from_run is None else 0,
        reward_files=served,
        starts_servers=starts,
        chooses_reward_port=reward.origins["reward_service.port"] == "default",
        worker_overrides=tuple(worker_overrides(trainer, rollout)),
        names_keys=names_keys,
    )


def worker_overrides(trainer: TrainerSettings, rollout: RolloutSettings) -> list[str]:
    """Return overrides that let the workers' SGLang servers load the adapters that the trainer publishes, and compute logits as it does.

    A worker does not read the trainer's settings, but this process reads both. What the run file sets stays.
    """
    if rollout.worker.engine != "sglang":
        return []
    found = []
    if trainer.publishes_adapters and rollout.sglang.max_lora_rank is None:
        found.append(f"sglang.max_lora_rank={trainer.model.lora.rank}")
    if trainer.model.head_dtype == "float32" and "fp32_lm_head" not in rollout.sglang.model_fields_set:
        found.append("sglang.fp32_lm_head=true")
    return found


def _names_keys(trainer: TrainerSettings, rollout: RolloutSettings) -> bool:
    signing_key, trusted_keys = trainer.trainer.signing_key_file, rollout.worker.trusted_keys_file
    if trusted_keys is not None and signing_key is None:
        raise ConfigError(
            f"worker.trusted_keys_file = {trusted_keys}, and no trainer.signing_key_file: no worker would load the trainer's "
            "weights; set both, or neither"
        )
    return signing_key is not None


def _names_no_servers(origins: Mapping[str, str]) -> bool:
    set_keys = [key for key in ("nats.url", "s3.endpoint") if origins[key] != "default"]
    if len(set_keys) == 1:
        missing = "s3.endpoint" if set_keys == ["nats.url"] else "nats.url"
        raise ConfigError(
            f"{origins[set_keys[0]]}: {set_keys[0]} is given but {missing} is not: name both servers, "
            "or neither, to start both here"
        )
    return not set_keys


def copy_input(name: str, run_folder: Path) -> None:
    """Copy an input into the store of a run's folder, unless it is there; raises ConfigError when no run here has it."""
    source = find_input(name, run_folder)
    store = run_folder / STORE
    target = store / _OBJECTS / source.parent.parent.name / blob_keys.run_prefix(name)
    if source == target:
        return
    (store / COPIED_INPUTS).mkdir(parents=True, exist_ok=True)
    (store / COPIED_INPUTS / name).touch()
    partial = store / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, symlinks=True)  # a store with links is refused by its servers
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    files.replace(partial, target)


def find_input(name: str, run_folder: Path) -> Path:
    """Return the folder of an input's objects: that of the run, else that of a run beside it.

    Raises ConfigError when there is none; it names the inputs that there are.
    """
    others = sorted(run_folder.parent.iterdir()) if run_folder.parent.is_dir() else []
    inputs = {run: path for folder in (*others, run_folder) for run, path in _inputs_of(folder)}
    if name in inputs:
        return inputs[name]
    near = difflib.get_close_matches(name, inputs, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"data.from_run = {name}: no local run in {run_folder.parent} has a rescored input of that name; found: "
        f"{', '.join(sorted(inputs)) or 'none'}{hint}; make it with `penstock rescore RUN --reward NAME --into {name}`, or set "
        "nats.url and s3.endpoint to the servers that have it"
    )


def _inputs_of(run_folder: Path) -> Iterator[tuple[str, Path]]:
    for objects in sorted((run_folder / STORE / _OBJECTS).glob("*/runs/*")):
        rescored = objects / Path(blob_keys.rescored_prefix(objects.name)).name
        keys = (f"{blob_keys.rescored_prefix(objects.name)}{file.name}" for file in rescored.glob("*"))
        if any(blob_keys.rescored_sha256(objects.name, key) for key in keys):
            yield objects.name, objects
