"""`python -m penstock.forensics.replay RUN [run.toml] [section.key=value] [--from A] [--to B] | --batch STEP`: one rank of a replay."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from penstock.protocol.process_end import ends_quietly
from penstock.trainer.commands.run_command import start_process, with_errors_explained


def main(arguments: Sequence[str]) -> int:
    start_process()
    return with_errors_explained("replay", arguments, _run)


def _run(_: str, arguments: Sequence[str]) -> int:
    return import_module("penstock.forensics.replay.replay_command").main(arguments)


if __name__ == "__main__":
    with ends_quietly():
        code = main(sys.argv[1:])
    sys.exit(code)
