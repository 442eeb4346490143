"""``python -m penstock.agents.proxy MODEL_FOLDER``: print how agents' conversations with a model are continued."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from penstock.agents.proxy.renderer import ChatRenderer, format_table, probe, shows_tools
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.command_line import Help, program


def print_table(
    model: Annotated[Path, Help("Folder with tokenizer.json and a chat template.")],
    *,
    require_append_only: Annotated[bool, Help("Exit with 1 unless every shape that renders is append-only.")] = False,
) -> int:
    """Print how agents' conversations with a model are continued."""
    renderer = ChatRenderer(ChatTokenizer.read(model))
    reports = probe(renderer)
    shown = "shows tools" if shows_tools(renderer) else "does not show tools: the policy cannot know them"
    sys.stdout.write(f"{format_table(reports)}\n\nThe template {shown}.\n")
    changed = [report.shape for report in reports if report.renders and not report.append_only]
    return 1 if require_append_only and changed else 0


main = program("python -m penstock.agents.proxy", print_table)


if __name__ == "__main__":
    sys.exit(main())
