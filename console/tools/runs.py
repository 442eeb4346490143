"""`penstock runs`: the runs in the folder of runs, and those that have streams on NATS."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import filesize
from rich.console import Console
from rich.text import Text

from penstock.console import connections
from penstock.console.connections import NamedRun
from penstock.console.report import curves
from penstock.console.report.event_fields import number, read_object, setting
from penstock.console.terminal import one_line, print_table
from penstock.protocol import streams
from penstock.protocol.errors import BusError, ConfigError, MissingStream
from penstock.protocol.files import read_regular
from penstock.protocol.process_end import error_text, printable
from penstock.protocol.record.run_folder import FAILURE, RUN_LOCK, is_lock_held
from penstock.protocol.secret_values import hide
from penstock.protocol.subjects import RUN_ID, similar_run_id

if TYPE_CHECKING:
    from penstock.protocol.transport.bus import Bus

PLANNED = "planned-config.json"  # in the folder of a run that the Runs API created: the settings that it checked
_MARKS = (
    "metrics.jsonl",
    "config.json",
    "report.json",
    "model",
    "job.json",  # created by the Runs API, and perhaps not started yet
    connections.STORE,
    RUN_LOCK,
    *(f"{command}-training" for command in curves.COMMANDS),
)  # a folder with any of these is a run's


_MOST_BYTES = 1024**2  # of a report
_TYPED = re.compile(r"(\d+(?:p\d+)?(?:e-?\d+)?)(?:-|$)")  # a number in a run's name


@dataclass(frozen=True, slots=True)
class RunLine:
    """One run as a line of the table; ``when`` is ISO 8601, empty when the run has no folder here."""

    run: str
    state: str
    step: int | None = None
    accuracy: float | None = None
    reward: float | None = None
    when: str = ""
    folder: str = ""
    eval_reward: float | None = None  # held-out mean reward: what is shown where there is no accuracy
    loss: float | None = None  # of a training on given answers, which has no rewards
    eval_loss: float | None = None
    lr: float | None = None  # as set
    size_bytes: int | None = None  # of the folder, with the run's own store
    failure: str = ""  # why it failed


def failure_of(folder: Path) -> tuple[str, str] | None:
    """Return the reason and the end of the log of a run that failed, None for one that did not."""
    if (document := read_object(folder / FAILURE)) is None or state_of(folder) != "failed":
        return None
    return one_line(document.get("reason", "")), printable(document.get("log", ""))


def print_list(arguments: Sequence[str], environ: Mapping[str, str], *, as_json: bool) -> int:
    loaded = connections.find(arguments, environ)
    lines = [replace(line, size_bytes=size_bytes(Path(line.folder))) for line in list_folder(loaded.settings.run.dir)]
    for line in lines:
        if skipped := curves.num_unreadable(Path(line.folder)):
            print(f"penstock: run {line.run}: {skipped} lines of metrics.jsonl cannot be read", file=sys.stderr)
    if connections.is_configured(loaded):
        # imported here: a list of folders needs no NATS client
        from penstock.protocol import logs  # noqa: PLC0415
        from penstock.protocol.transport.bus import Bus  # noqa: PLC0415

        logs.configure("runs", level="error")
        try:
            with Bus.connect(loaded.settings.nats, name="runs", deadline_s=3.0) as bus:
                lines = merge(lines, list_broker(bus))
        except BusError as err:
            print(error_text(f"penstock: runs on NATS are not listed: {err}"), file=sys.stderr)
    if as_json:
        print(json.dumps([asdict(line) for line in lines]))
    elif lines:
        right = ("step", "held-out", "reward", "lr", "size")
        print_table(("run", "state", *right, "when"), map(_row, lines), right=right)
        print(*(f"\n{line.run} failed: {line.failure}" for line in lines if line.failure), sep="")
        print(f"\nnext: penstock runs show {lines[0].run}")
    else:
        print(
            f"no runs in {loaded.settings.run.dir}/; start one with: penstock quickstart; runs elsewhere: penstock runs run.toml"
        )
    return 0


def print_one(run: NamedRun) -> int:
    folder = existing_folder(run)
    if failed := failure_of(folder):
        print(
            f"run {run} failed: {failed[0]}",
            *([failed[1], f"logs: {folder / 'logs'}"] if failed[1] else ()),
            "",
            sep="\n",
        )
    try:
        text = printable(read_regular(folder / "report.md", _MOST_BYTES).decode("utf-8", "replace"))
    except FileNotFoundError:
        line = describe(folder)
        print(f"run {run} has no report yet: {line.state}, step {line.step if line.step is not None else '–'}")
        print(
            f"next: penstock {f'watch {run}' if line.state == 'running' else f'samples {run}' if line.step else 'runs'}"
        )
        return 0
    except OSError as err:
        raise ConfigError(f"{folder / 'report.md'} cannot be read ({err}); remove it") from None
    if sys.stdout.isatty():
        from rich.markdown import Markdown  # noqa: PLC0415 as slow to import as all else of this command

        Console().print(Markdown(text))
    else:
        print(text)
    return 0


def existing_folder(run: NamedRun) -> Path:
    """Return the folder of a run of this machine; raises ConfigError that lists the runs found."""
    folder = run.folder
    if not folder.is_dir():
        raise unknown_run(run.id, folder.parent)
    return folder


def unknown_run(run: str, folder: Path, *, more: str = "") -> ConfigError:
    run_ids = [line.run for line in list_folder(folder)]
    near = get_close_matches(run, run_ids, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return ConfigError(
        f"no run {run} in {folder}/; found: {', '.join(run_ids[:5]) or 'none'}; {meant}check the name{more}"
    )


def list_folder(folder: Path) -> list[RunLine]:
    lines = [describe(path) for path in run_folders(folder)]
    return sorted(lines, key=lambda line: line.when, reverse=True)


def run_folders(folder: Path) -> list[Path]:
    try:
        folders = [path for path in folder.iterdir() if RUN_ID.fullmatch(path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in folders if any((path / mark).exists() for mark in _MARKS)]


def list_broker(bus: Bus) -> list[RunLine]:
    """Return the runs that have streams on NATS; one with a trainer's heartbeat is running."""
    lines = []
    for name in sorted(bus.stream_names().wait()):
        run = name.removesuffix("-events")
        if run == name or not RUN_ID.fullmatch(run):
            continue
        try:
            heartbeats = bus.key_value(streams.live_bucket(run).bucket).wait().entries().wait()
        except MissingStream:  # the stream of another program, or of a run that is being removed
            lines.append(RunLine(run, "incomplete"))
            continue
        trainers = streams.heartbeat_key("trainer", "")
        is_running = any(entry.key.startswith(trainers) for entry in heartbeats)
        lines.append(RunLine(run, "running" if is_running else "idle"))
    return lines


def merge(folders: Sequence[RunLine], broker: Sequence[RunLine]) -> list[RunLine]:
    """Return the runs of both lists; one of a folder is running too if its trainer runs on another machine."""
    running = {line.run for line in broker if line.state == "running"}
    known = {line.run for line in folders}
    lines = [
        replace(line, state="running", failure="") if line.run in running and line.state != "finished" else line
        for line in folders
    ]
    return [*lines, *(line for line in broker if line.run not in known)]


def describe(folder: Path) -> RunLine:
    state, failed = state_of(folder), failure_of(folder)
    more: dict[str, Any] = {"folder": str(folder), "failure": failed[0] if failed else ""}
    if (trained := curves.read_training(folder)) is not None:
        when = datetime.fromtimestamp(curves.metrics_file(folder).stat().st_mtime, UTC).isoformat(timespec="seconds")
        losses = {"loss": trained.loss, "eval_loss": trained.eval_loss, "reward": trained.reward}
        return RunLine(folder.name, state, trained.step, when=when, **losses, **more)
    run_curves = curves.read(folder)
    held_out = run_curves.held_out
    accuracy = held_out.now if held_out.measure == "accuracy" else None
    eval_reward = run_curves.eval_rewards[-1][1] if run_curves.eval_rewards else None
    times = [p.stat().st_mtime for p in (folder / mark for mark in _MARKS[:4]) if p.exists()]
    when = datetime.fromtimestamp(max(times, default=folder.stat().st_mtime), UTC)
    return RunLine(
        run=folder.name,
        state=state,
        step=run_curves.last_step,
        accuracy=accuracy,
        reward=run_curves.recent_reward,
        when=when.isoformat(timespec="seconds"),
        eval_reward=eval_reward,
        lr=number(setting(read_object(folder / "config.json"), "trainer", "lr")),
        **more,
    )


def state_of(folder: Path) -> str:
    if is_lock_held(folder):
        return "running"
    if curves.command_of(folder) == curves.LOG:
        return curves.logged_state(folder)[0]
    return "finished" if is_finished(folder) else "failed" if (folder / FAILURE).is_file() else "stopped"


def size_bytes(folder: Path) -> int:
    """Return what a run takes on this disk; links are not followed."""
    sizes = 0
    for path, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                sizes += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118  a run has ten thousands of files
    return sizes


def is_finished(folder: Path) -> bool:
    """Return True if the trainer ended with all steps of the settings it was last started with.

    A run without ``trainer.json`` is finished when it has a report, a training on given answers when it has its model.
    """
    if (command := curves.command_of(folder)) is not None:
        return curves.is_training_finished(folder, command)
    if (ended := read_object(folder / "trainer.json")) is None:
        return (folder / "report.json").exists()
    steps = number(setting(read_object(folder / "config.json"), "trainer", "steps"))
    done = number(ended.get("steps"))
    if ended.get("complete", ended.get("finished")) is not True:  # older runs have no "complete"
        return False
    return steps is None or (done is not None and done >= steps)


def stored_config(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a run with their origins, from its folder; None if it has none that can be read.

    ``source`` is started for those that the trainer was last started with, planned for those that the Runs API checked.
    """
    own = curves.training_folder(Path(), curves.command_of(folder) or "") / "config.json"  # of sft, dpo and rm
    for source, name in (("started", "config.json"), ("planned", PLANNED), ("started", own)):
        if (document := read_object(folder / name)) is not None:
            return {"source": source, **document, "settings": hide((), document.get("settings"))}
    return None


def varied(folder: Path) -> dict[str, Any]:
    """Return the settings that a run's name has with their values, as `penstock sweep` writes them: NAME-lr-1e-6-seed-0."""
    found: dict[str, Any] = {}
    for section, settings in ((stored_config(folder) or {}).get("settings") or {}).items():
        for key, value in settings.items() if isinstance(settings, Mapping) and section != "tracking" else ():
            _, word, text = folder.name.partition(f"-{key.replace('_', '-')}-")
            typed = _TYPED.match(text) if isinstance(value, int | float) else None
            word = similar_run_id(str(value).replace(".", "p")) if word and (section, key) != ("run", "id") else ""
            if word and (
                float(typed[1].replace("p", ".")) == abs(value) if typed else f"{text}-".startswith(f"{word}-")
            ):
                found[f"{section}.{key}"] = value
    return found


def sweep_of(folder: Path) -> str:
    """Return the name of the sweep that a run is of, by its own name; empty for none."""
    places = [folder.name.index(f"-{key.rpartition('.')[2].replace('_', '-')}-") for key in varied(folder)]
    return folder.name[: min(places)] if places else ""


def _held_out(line: RunLine) -> str:
    if line.accuracy is not None:
        return f"{line.accuracy:.3f}"
    if line.eval_loss is not None:
        return f"loss {line.eval_loss:.3f}"
    return "–" if line.eval_reward is None else f"reward {line.eval_reward:.2f}"


def _row(line: RunLine) -> tuple[object, ...]:
    when = datetime.fromisoformat(line.when).astimezone().strftime("%Y-%m-%d %H:%M") if line.when else "–"
    state = Text(line.state, style={"running": "green", "stopped": "yellow", "failed": "red"}.get(line.state, ""))
    reward = "–" if line.reward is None else f"{line.reward:.2f}"
    reward = reward if line.loss is None or line.reward is not None else f"loss {line.loss:.3f}"
    lr, size = f"{line.lr:g}" if line.lr else "–", filesize.decimal(line.size_bytes) if line.size_bytes else "–"
    return line.run, state, "–" if line.step is None else line.step, _held_out(line), reward, lr, size, when
