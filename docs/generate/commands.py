"""Every verb of the penstock command, with the text of its --help."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console

from penstock.console.cli import verb_help
from penstock.console.cli.main import app
from penstock.protocol.command_line import App

_WIDTH = 100
_OF_EVERY_APP = {"--help", "-h", "--version"}


def text() -> str:
    """Return a heading and a code block for each verb."""
    verb_help.attach(app)
    return "\n".join(f"## {' '.join(('penstock', *words))}\n\n```text\n{help_text(words)}```\n" for words, _ in verbs())


def verbs(parent: App = app, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """Yield the words of every verb and its app, in the order of the help."""
    for name in parent:
        if name in _OF_EVERY_APP:
            continue
        child = parent[name]
        if child.default_command is not None:
            yield (*words, name), child
        if child is not parent and child.default_command is not child:
            yield from verbs(child, (*words, name))


def help_text(words: tuple[str, ...]) -> str:
    """Return what ``penstock WORDS --help`` prints."""
    written = io.StringIO()
    app.help_print(list(words), console=Console(file=written, width=_WIDTH, color_system=None))
    return "\n".join(line.rstrip() for line in written.getvalue().strip("\n").splitlines()) + "\n"
