"""Read the passages of a corpus: a folder of texts, or a file with one JSON object a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.protocol.errors import ConfigError

_SUFFIXES = (".txt", ".md", ".rst")
_PARAGRAPH = re.compile(r"\n\s*\n")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a text."""

    title: str
    text: str


def read_corpus(path: Path, passage_chars: int) -> list[Passage]:
    """Return the passages of a corpus, each of at most ``passage_chars`` characters; raises ConfigError.

    A folder's files (.txt, .md, .rst) are divided at empty lines. A line of a .jsonl file holds ``text`` or ``contents``, and may
    hold a ``title`` (the first line of ``contents`` else, as in Pyserini's Wikipedia); a ``text`` that is too long is divided too.
    """
    try:
        if path.is_dir():
            texts = list(_of_folder(path))
        elif path.suffix == ".jsonl":
            texts = list(_of_lines(path))
        else:
            raise ConfigError(f"corpus {path}: expected a folder, or a file that ends in .jsonl")
    except OSError as err:
        raise ConfigError(f"corpus {path}: not readable ({err.strerror})") from None
    except UnicodeDecodeError as err:
        raise ConfigError(f"corpus {path}: not UTF-8 ({err.reason})") from None
    passages = [Passage(title, piece) for title, text in texts for piece in divided(text, passage_chars)]
    if not passages:
        raise ConfigError(
            f"corpus {path}: no text in it; expected {', '.join(_SUFFIXES)} files, or lines of JSON with a text"
        )
    return passages


def divided(text: str, limit: int) -> Iterator[str]:
    """Yield the paragraphs of a text, joined while they fit into the limit, and cut where one alone does not."""
    held = ""
    for paragraph in _PARAGRAPH.split(text.strip()):
        piece = paragraph.strip()
        if held and len(held) + 2 + len(piece) > limit:
            yield held
            held = ""
        held = f"{held}\n\n{piece}" if held else piece
        while len(held) > limit:
            cut = held.rfind(" ", limit // 2, limit + 1)
            end = cut if cut > 0 else limit
            yield held[:end].rstrip()
            held = held[end:].lstrip()
    if held:
        yield held


def _of_folder(folder: Path) -> Iterator[tuple[str, str]]:
    for file in sorted(folder.rglob("*")):
        if file.suffix in _SUFFIXES and file.is_file():
            yield str(file.relative_to(folder)), file.read_text(encoding="utf-8")


def _of_lines(file: Path) -> Iterator[tuple[str, str]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _of_line(line, f"corpus {file}:{number}")


def _of_line(line: str, place: str) -> tuple[str, str]:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{place}: not JSON ({err})") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: expected an object, got {type(row).__name__}")
    text, title = row.get("text"), row.get("title", "")
    if text is None and isinstance(row.get("contents"), str):
        first, _, rest = row["contents"].partition("\n")
        title, text = (title or first.strip('"'), rest) if rest else (title, first)
    if not isinstance(text, str) or not isinstance(title, str):
        raise ConfigError(f'{place}: expected {{"title": ..., "text": ...}} or {{"contents": ...}} with texts')
    return title, text
