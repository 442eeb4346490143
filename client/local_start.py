"""Start a run or a training on this machine from the arguments of a call; everything is checked before anything starts."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.client import data_files, run_settings
from penstock.client.local_backend import LocalBackend, LocalTraining
from penstock.client.processes import LocalProcess
from penstock.client.rewards import RegisteredReward, ServedFunction, reward_name, reward_of
from penstock.client.run_settings import DATA, MODEL, REWARD, Values
from penstock.console import launch
from penstock.console.connections import RUN_FILE
from penstock.console.tools.runs import unknown_run
from penstock.deploy import quickstart_task
from penstock.deploy.local_run import LocalRun
from penstock.fine_tuning.sections import DPO, SFT
from penstock.protocol import seals
from penstock.protocol.config.run_file import Loaded, load
from penstock.protocol.errors import ConfigError
from penstock.protocol.record import run_folder
from penstock.protocol.subjects import check_run_id
from penstock.trainer.data.inputs import resolve_inputs
from penstock.trainer.settings import GivenAnswersSettings

QUICKSTART = "quickstart"  # as a model: the tiny one of `penstock quickstart`

_COMMANDS = {"sft": SFT, "dpo": DPO}
_LATER = "chosen-later"  # stands for what is written once the other settings are right


def train(values: Values, runs: Path, *, workers: int | None) -> LocalBackend:
    """Start a run; raises ConfigError, UserFileError or another PenstockError, and leaves no process then.

    ``values`` are those of the run file; a reward may be a function, data rows, and a model "quickstart".
    """
    reward_value = values.get(REWARD)
    function = reward_of(reward_value) if callable(reward_value) else None
    endpoint = (
        RegisteredReward.of_url(reward_value) if isinstance(reward_value, str) and _is_url(reward_value) else None
    )
    name = (
        reward_name(reward_value) if callable(reward_value) else endpoint.name if endpoint is not None else reward_value
    )
    named = {**values, REWARD: name}
    settings = LocalRun(run_settings.overrides(_stand_ins(named, runs)), num_workers=workers).settings
    with _claimed(values, settings.run.dir.absolute(), "run") as folder:
        run_id = folder.name
        placed: Values = {**named, ("run", "id"): run_id, ("run", "dir"): str(folder.parent)}
        complete = _with_files(placed, folder, settings.run.seed)
        with LocalRun(run_settings.overrides(complete), num_workers=workers) as checked:
            checked.check()
        reward = endpoint if function is None else ServedFunction(function, str(name))
        command = shlex.join(["penstock", "train", str(folder / RUN_FILE), "--local"])
        seals.write(folder / RUN_FILE, run_settings.run_file_text(complete, command))
    backend = LocalBackend(run_id, folder, workers=workers, reward=reward)
    try:
        backend.start()
    except BaseException:
        backend.close()
        raise
    return backend


def existing(run_id: str, runs: Path) -> LocalBackend:
    """Return a run whose folder is here; raises ConfigError that lists the runs found."""
    folder = runs / check_run_id(run_id)
    if not folder.is_dir():
        raise unknown_run(run_id, runs)
    return LocalBackend(run_id, folder, workers=None)


def fine_tune(verb: str, values: Values, runs: Path) -> LocalTraining:
    """Start `penstock sft` or `penstock dpo`; raises ConfigError, and starts nothing then."""
    command = _COMMANDS[verb]
    overrides = run_settings.overrides(_stand_ins(values, runs))
    loaded: Loaded[Any] = load(GivenAnswersSettings, overrides=overrides, environ=os.environ)
    settings, _ = command.chosen_settings(loaded, overrides)
    with _claimed(values, settings.run.dir.absolute(), verb) as folder:
        placed: Values = {**values, ("run", "id"): folder.name, ("run", "dir"): str(folder.parent)}
        overrides = run_settings.overrides(_with_files(placed, folder, settings.run.seed))
        loaded = load(GivenAnswersSettings, overrides=overrides, environ=os.environ)
        settings, _ = command.chosen_settings(loaded, overrides)
        resolved_settings = resolve_inputs(settings)
        section = getattr(resolved_settings, verb)
        named = (
            ("model.path", (resolved_settings.model.path,)),
            (f"{verb}.data", section.files),
            (f"{verb}.eval_data", section.eval_files),
        )
        for key, paths in named:
            if missing := [str(path) for path in paths if not path.exists()]:
                raise ConfigError(f"{key}: there is no {', '.join(missing)}; check the path")
    started = launch.trainer(settings.trainer.num_ranks, verb, *overrides)
    process = LocalProcess(f"{verb} {folder.name}", started, folder / "logs" / f"{verb}.log")
    return LocalTraining(verb, folder, (getattr(settings, verb).output or folder / verb).absolute(), process)


def _is_url(name: str) -> bool:
    return urlsplit(name).scheme in {"http", "https"}


def _stand_ins(values: Values, runs: Path) -> Values:
    """Return the values as settings that can be checked, before files are written and a run's name is chosen."""
    stand_ins = {("run", "id"): _LATER, ("run", "dir"): str(runs), **values}
    for key, value in values.items():
        if key in DATA and not data_files.is_named(value):
            stand_ins[key] = f"{_LATER}.jsonl"
    return stand_ins


def _with_files(values: Values, folder: Path, seed: int) -> Values:
    """Return the values with the paths of rows and of the quickstart's model, which are written."""
    file_values = dict(values)
    for key, value in values.items():
        if key in DATA:
            name = "-".join(key) if key[0] != "data" else key[1]
            file_values[key] = data_files.stored(value, folder / "data", name)
    model = values.get(MODEL)
    if model == QUICKSTART and not Path(QUICKSTART).exists():
        file_values[MODEL] = str(folder / "start")
        if not (folder / "start" / "config.json").exists():
            quickstart_task.write_model(folder / "start", seed=seed)
    elif isinstance(model, str) and Path(model).exists():
        file_values[MODEL] = str(Path(model).absolute())
    return file_values


@contextlib.contextmanager
def _claimed(values: Values, runs: Path, stem: str) -> Iterator[Path]:
    """Give the folder of a run; one that is new is removed again when an error ends the block."""
    folder, is_new = claim(values, runs, stem)
    try:
        yield folder
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def claim(values: Mapping[tuple[str, ...], Any], runs: Path, stem: str) -> tuple[Path, bool]:
    """Return the run's folder, and True if it is new: of the name that is set, else of the first free one of stem, stem-2, …."""
    run_id = values.get(("run", "id"))
    if run_id is not None:
        folder = runs / check_run_id(str(run_id))
        if run_folder.is_lock_held(folder):
            raise ConfigError(f"run {run_id} is running already, in {folder}; stop it, or choose another run_id")
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        return folder, is_new
    number = 1
    while True:
        name = stem if number == 1 else f"{stem}-{number}"
        try:
            (runs / name).mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return runs / name, True
