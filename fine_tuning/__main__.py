"""`python -m penstock.fine_tuning sft|dpo|rm run.toml [overrides]`: one rank of a training, from a run file to a model folder."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import structlog

from penstock.console.tracking import trackers
from penstock.fine_tuning.sections import DPO, RM, SFT, OwnSection, check_ranks
from penstock.protocol import logs
from penstock.protocol.config.run_file import Loaded, load, split_arguments
from penstock.protocol.process_end import ends_quietly
from penstock.protocol.record import run_folder
from penstock.trainer.commands.run_command import (
    end_with_torchrun,
    explained,
    run_command,
    start_process,
    stop_on_signals,
)
from penstock.trainer.data.inputs import resolve_inputs
from penstock.trainer.learner.gguf_model import with_model_folders
from penstock.trainer.learner.model_folder_check import check_adapters, refuse_vision
from penstock.trainer.settings import GivenAnswersSettings

log = structlog.get_logger("trainer.fine_tuning")

_ERROR = 2  # exit code of an error that is explained on stderr
_SECTIONS = {section.section: section for section in (SFT, DPO, RM)}
COMMANDS = {
    "sft": ("RUN.TOML [SECTION.KEY=VALUE ...]", "supervised fine-tuning into a model folder"),
    "dpo": ("RUN.TOML [SECTION.KEY=VALUE ...]", "training on preferences into a model folder"),
    "rm": ("RUN.TOML [SECTION.KEY=VALUE ...]", "training of a reward model on preferences"),
}


def fine_tune(command: OwnSection, arguments: Sequence[str]) -> int:
    """Train, and print the folder of the result; returns 130 or 143 after a signal. Raises PenstockError before it starts.

    A request to pause (`run_folder`) ends it with a checkpoint and exit code 0; one from before the start is withdrawn.
    """
    end_with_torchrun(os.environ)
    name = command.section
    files, overrides = split_arguments(arguments)
    loaded: Loaded[Any] = load(GivenAnswersSettings, files=files, overrides=overrides, environ=os.environ)
    settings, unread = command.chosen_settings(loaded, overrides)
    check_ranks(loaded, name, int(os.environ.get("WORLD_SIZE", "1")))
    settings = resolve_inputs(settings)
    if unread and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"penstock {name} reads the section [{name}]; it does not use {', '.join(unread)}\n")
    logs.configure(name)
    settings = with_model_folders(settings)
    refuse_vision(settings, name)
    check_adapters(settings, name)
    # run file errors are reported without importing torch
    task = import_module(f"penstock.fine_tuning.{name}")
    from penstock.fine_tuning.loop import train  # noqa: PLC0415
    from penstock.trainer.ranks import Ranks  # noqa: PLC0415

    ranks = Ranks()
    if ranks.is_leader:
        run_folder.begin(settings.run.folder)
    stop = threading.Event()
    signals = stop_on_signals(stop, is_leader=ranks.is_leader)
    try:
        with contextlib.ExitStack() as stack:
            if ranks.is_leader:
                stack.enter_context(run_folder.hold_lock(settings.run.folder))
                stack.enter_context(trackers.beside(name, arguments, os.environ))
            result = train(settings, ranks, stop, name, task.open_rows, task.open_task)
        code = 128 + signals[0] if result is None and signals else 0
        if ranks.is_leader:
            sys.stdout.write("" if result is None else f"{result.folder}\n")
            ended = "" if result is not None else "stopped on request" if code else "paused"
            sys.stderr.write(f"{ended}; start it again to continue from its checkpoint\n" if ended else "")
    except Exception as err:
        text = explained(err)
        log.debug("training failed", exc_info=True)
        sys.stderr.write(text)
        if ranks.is_leader:
            run_folder.write_failure(settings.run.folder, text)
        code = _ERROR
    ranks.leave(code)
    return code


def main(arguments: Sequence[str]) -> int:
    start_process()
    return run_command(
        "penstock.fine_tuning", COMMANDS, arguments, lambda name, given: fine_tune(_SECTIONS[name], given)
    )


if __name__ == "__main__":
    with ends_quietly():
        code = main(sys.argv[1:])
    sys.exit(code)
