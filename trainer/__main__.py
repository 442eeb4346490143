"""`python -m penstock.trainer COMMAND`: imports only what the command needs, so that `config`, `data-check` and `data-rows` never load torch.

With ``--prepare`` before the command it imports everything that a training needs, and begins when it reads a line from stdin.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from penstock.protocol import internal_errors
from penstock.protocol.errors import PenstockError
from penstock.protocol.internal_errors import ends_quietly
from penstock.trainer import process_memory

COMMANDS = {  # name -> arguments, description; the module is commands/NAME.py
    "train": ("RUN.TOML [SECTION.KEY=VALUE ...]", "train a run (one rank)"),
    "replay": ("RUN [RUN.TOML] [--from A] [--to B]", "train a run again from its record and compare the weights"),
    "sft": ("RUN.TOML [SECTION.KEY=VALUE ...]", "supervised fine-tuning into a model folder"),
    "dpo": ("RUN.TOML [SECTION.KEY=VALUE ...]", "training on preferences into a model folder"),
    "rm": ("RUN.TOML [SECTION.KEY=VALUE ...]", "training of a reward model on preferences"),
    "config": ("RUN.TOML [SECTION.KEY=VALUE ...] [--json]", "print every setting with its origin"),
    "data-check": ("FILE ... [--model FOLDER]", "check what data files can train"),
    "data-rows": ("FILE [--number N]", "print rows of a data file as the input of a reward"),
}
STOPPED = 128 + 2  # exit code after Ctrl-C, as of a shell
USAGE_ERROR = 2  # exit code of an error that is explained on stderr, as of argparse


def main(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code, 2 for an error that is explained on stderr."""
    internal_errors.install("trainer")
    process_memory.use_huge_pages(os.environ)
    process_memory.keep_few_compiled_products(os.environ)
    if arguments[:1] == ["--prepare"]:
        import_module("penstock.trainer.prepare").import_everything()
        if not sys.stdin.readline():  # whoever started this process has exited
            return STOPPED
        arguments = arguments[1:]
    if not arguments or arguments[0] not in COMMANDS:
        sys.stderr.write(usage())
        return USAGE_ERROR
    try:
        return import_module(f"penstock.trainer.commands.{arguments[0].replace('-', '_')}").main(arguments[1:])
    except PenstockError as err:
        sys.stderr.write(f"{err}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:  # a training writes a checkpoint first, once it has started
        again = f"penstock {arguments[0].replace('-', ' ')} {shlex.join(arguments[1:])}"
        sys.stderr.write(f"\nstopped on request; start it again with: {again.strip()}\n")
        return STOPPED


def usage() -> str:
    """Return the commands with their arguments."""
    lines = [f"  {name} {arguments}\n      {about}\n" for name, (arguments, about) in COMMANDS.items()]
    return "usage: python -m penstock.trainer COMMAND ...\n\n" + "".join(lines)


if __name__ == "__main__":
    with ends_quietly():
        code = main(sys.argv[1:])
    sys.exit(code)
