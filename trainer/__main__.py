"""`python -m trainer COMMAND`: imports only what the command needs; `config`, `data-check` and `data-rows` never load torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from protocol.errors import PenstockError

COMMANDS = {
    "config": "trainer.show_config",
    "data-check": "trainer.data_check",
    "data-rows": "trainer.data_rows",
    "train": "trainer.train_command",
    "replay": "trainer.replay_command",
    "sft": "trainer.sft_command",
}
MISTAKE = 2  # exit code of a refusal that is explained, as of argparse


def main(arguments: Sequence[str]) -> int:
    """Run one command; returns its exit code, 2 for a mistake that is explained on stderr."""
    if not arguments or arguments[0] not in COMMANDS:
        sys.stderr.write(f"usage: python -m trainer {{{','.join(COMMANDS)}}} ...\n")
        return MISTAKE
    try:
        return import_module(COMMANDS[arguments[0]]).main(arguments[1:])
    except PenstockError as err:
        sys.stderr.write(f"{err}\n")
        return MISTAKE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
