"""`python -m penstock.trainer COMMAND`: imports only what the command needs, so that `config`, `data-check` and `data-rows` never load torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from penstock.protocol.errors import PenstockError

COMMANDS = {
    "config": "penstock.trainer.commands.show_config",
    "data-check": "penstock.trainer.commands.data_check",
    "data-rows": "penstock.trainer.commands.data_rows",
    "train": "penstock.trainer.commands.train_command",
    "replay": "penstock.trainer.commands.replay_command",
    "sft": "penstock.trainer.commands.sft_command",
}
USAGE_ERROR = 2  # exit code of an error that is explained on stderr, as of argparse


def main(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code, 2 for an error that is explained on stderr."""
    if not arguments or arguments[0] not in COMMANDS:
        sys.stderr.write(f"usage: python -m penstock.trainer {{{','.join(COMMANDS)}}} ...\n")
        return USAGE_ERROR
    try:
        return import_module(COMMANDS[arguments[0]]).main(arguments[1:])
    except PenstockError as err:
        sys.stderr.write(f"{err}\n")
        return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
