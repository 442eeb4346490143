"""``python -m penstock.agents.proxy MODEL_FOLDER``: print how agents' conversations with a model are continued."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from penstock.agents.proxy.renderer import ChatRenderer, format_table, probe, shows_tools
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.errors import PenstockError


def main(arguments: list[str] | None = None) -> int:
    """Print the table of a model; returns the exit status: 1 with ``--require-append-only`` where it is not."""
    parser = argparse.ArgumentParser(prog="python -m penstock.agents.proxy", description=__doc__)
    parser.add_argument("model", type=Path, help="folder with tokenizer.json and a chat template")
    parser.add_argument(
        "--require-append-only", action="store_true", help="exit with 1 unless every shape that renders is append-only"
    )
    given = parser.parse_args(arguments)
    try:
        renderer = ChatRenderer(ChatTokenizer.read(given.model))
    except PenstockError as err:
        sys.stderr.write(f"{err}\n")
        return 1
    reports = probe(renderer)
    shown = "shows tools" if shows_tools(renderer) else "does not show tools: the policy cannot know them"
    sys.stdout.write(f"{format_table(reports)}\n\nThe template {shown}.\n")
    changed = [report.shape for report in reports if report.renders and not report.append_only]
    return 1 if given.require_append_only and changed else 0


if __name__ == "__main__":
    sys.exit(main())
