"""`python -m penstock.fine_tuning sft|dpo|rm run.toml [overrides]`: one rank of a training, from a run file to a model folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from penstock.fine_tuning.fine_tune import fine_tune
from penstock.fine_tuning.sections import DPO, RM, SFT
from penstock.protocol.process_end import ends_quietly
from penstock.trainer.commands.run_command import run_command, start_process

_SECTIONS = {section.section: section for section in (SFT, DPO, RM)}
COMMANDS = {
    "sft": ("RUN.TOML [SECTION.KEY=VALUE ...]", "supervised fine-tuning into a model folder"),
    "dpo": ("RUN.TOML [SECTION.KEY=VALUE ...]", "training on preferences into a model folder"),
    "rm": ("RUN.TOML [SECTION.KEY=VALUE ...]", "training of a reward model on preferences"),
}


def main(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code, 2 for an error that is explained on stderr."""
    start_process()
    return run_command("penstock.fine_tuning", COMMANDS, arguments, _run)


def _run(name: str, arguments: Sequence[str]) -> int:
    return fine_tune(_SECTIONS[name], arguments)


if __name__ == "__main__":
    with ends_quietly():
        code = main(sys.argv[1:])
    sys.exit(code)
