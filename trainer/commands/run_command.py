"""Runs one command of a package that trains: `python -m penstock.trainer COMMAND`, and those of the packages above it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from penstock.protocol import internal_errors
from penstock.protocol.errors import PenstockError
from penstock.trainer import process_memory

STOPPED = 128 + 2  # exit code after Ctrl-C, as of a shell
USAGE_ERROR = 2  # exit code of an error that is explained on stderr

Commands = Mapping[str, tuple[str, str]]  # name -> arguments, description


def start_process() -> None:
    """Report internal errors, and set what torch reads when it is imported; to be called before anything else."""
    internal_errors.install("trainer")
    process_memory.use_huge_pages(os.environ)
    process_memory.keep_few_compiled_products(os.environ)


def run_command(
    module: str, commands: Commands, arguments: Sequence[str], run: Callable[[str, Sequence[str]], int]
) -> int:
    """Run one command; return its exit code, 2 for an error that is explained on stderr, 130 after Ctrl-C.

    Args:
        module: What follows ``python -m``, for the usage.
        commands: All of them.
        arguments: The command's name, then its arguments.
        run: Runs a command by its name, with the arguments after it; imports what the command needs.
    """
    if not arguments or arguments[0] not in commands:
        sys.stderr.write(_usage(module, commands))
        return USAGE_ERROR
    return with_errors_explained(arguments[0], arguments[1:], run)


def with_errors_explained(name: str, arguments: Sequence[str], run: Callable[[str, Sequence[str]], int]) -> int:
    """Run a command; return its exit code, 2 for an error that is explained on stderr, 130 after Ctrl-C."""
    try:
        return run(name, arguments)
    except PenstockError as err:
        sys.stderr.write(f"{err}\n")
        return USAGE_ERROR
    except KeyboardInterrupt:  # a training writes a checkpoint first, once it has started
        again = f"penstock {name.replace('-', ' ')} {shlex.join(arguments)}"
        sys.stderr.write(f"\nstopped on request; start it again with: {again.strip()}\n")
        return STOPPED


def _usage(module: str, commands: Commands) -> str:
    lines = [f"  {name} {arguments}\n      {about}\n" for name, (arguments, about) in commands.items()]
    return f"usage: python -m {module} COMMAND ...\n\n" + "".join(lines)
