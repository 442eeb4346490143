"""``python -m penstock.reward_model PATH``: a reward model as a registered reward endpoint (``penstock reward serve-model``)."""

from __future__ import annotations

import sys

from penstock.protocol.command_line import program
from penstock.reward_model.commands import serve_model

if __name__ == "__main__":
    sys.exit(program("python -m penstock.reward_model", serve_model)())
