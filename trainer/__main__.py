"""`python -m penstock.trainer COMMAND`: imports only what the command needs, so that `config` never loads torch.

With ``--prepare`` before the command it imports everything that a training needs, and begins when it reads a line from stdin.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from penstock.protocol.config.run_file import config_document, format_config, load, split_arguments
from penstock.protocol.process_end import ends_quietly
from penstock.protocol.secret_values import hide
from penstock.trainer.commands.run_command import STOPPED, run_command, start_process

COMMANDS = {  # name -> arguments, description
    "train": ("RUN.TOML [SECTION.KEY=VALUE ...]", "train a run (one rank)"),
    "config": ("RUN.TOML [SECTION.KEY=VALUE ...] [--json]", "print every setting with its origin"),
    "data-check": ("FILE ... [--model FOLDER]", "check what data files can train"),
    "data-rows": ("FILE [--number N]", "print rows of a data file as the input of a reward"),
}


def main(arguments: Sequence[str]) -> int:
    start_process()
    if arguments[:1] == ["--prepare"]:
        import_everything()
        if not sys.stdin.readline():  # whoever started this process has exited
            return STOPPED
        arguments = arguments[1:]
    return run_command("penstock.trainer", COMMANDS, arguments, _run)


def import_everything() -> None:
    """Import torch, transformers, DeepSpeed and the trainer: most of the time from a trainer's start to its first step."""
    gc.disable()  # until `process_memory.end_start`, as in a training that is started at once
    from transformers import AutoModelForCausalLM  # noqa: F401, PLC0415  seconds of import

    import penstock.trainer.assemble  # noqa: PLC0415
    import penstock.trainer.commands.train  # noqa: F401, PLC0415
    from penstock.trainer.learner.trainable import import_deepspeed  # noqa: PLC0415

    import_deepspeed()


def _run(name: str, arguments: Sequence[str]) -> int:
    if name in ("data-check", "data-rows"):  # of a package that the trainer does not import: a program of its own
        program = [sys.executable, "-P", "-m", "penstock.deploy.data_check.commands", name, *arguments]
        os.execv(sys.executable, program)  # noqa: S606  replacing this process is the purpose
    if name == "train":
        return import_module("penstock.trainer.commands.train").main(arguments)
    return _print_settings(arguments)


def _print_settings(arguments: Sequence[str]) -> int:
    from penstock.trainer.settings import TrainerSettings  # noqa: PLC0415

    files, overrides = split_arguments([argument for argument in arguments if argument != "--json"])
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ)
    document = {"settings": hide((), config_document(loaded)["settings"]), "origins": loaded.origins}
    sys.stdout.write(json.dumps(document) + "\n" if "--json" in arguments else format_config(loaded))
    return 0


if __name__ == "__main__":
    with ends_quietly():
        code = main(sys.argv[1:])
    sys.exit(code)
