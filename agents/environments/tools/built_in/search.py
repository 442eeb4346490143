"""`search`: passages of a local corpus, by BM25; read into memory once, when the worker starts.

BM25: Robertson and Zaragoza, "The probabilistic relevance framework", 2009; the idf of Lucene. A corpus is a folder of texts, or a
file with one JSON object a line.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from penstock.agents.environments.episode_environment import PlayOptions
from penstock.agents.environments.tools.tool import Tool, ToolArguments, ToolEpisode, ToolUnavailable
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import json_value, target_outside

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75  # of Lucene
_SUFFIXES = (".txt", ".md", ".rst")
_PARAGRAPH = re.compile(r"\n\s*\n")
_LONGEST_QUERY = 1000  # characters


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


class Bm25:
    """An index of passages. A passage of 100 words takes about 800 bytes."""

    def __init__(self, passages: Iterable[str]) -> None:
        postings: dict[str, tuple[array[int], array[int]]] = {}  # by word: passages, and how often it is in each
        lengths = array("i")
        for number, text in enumerate(passages):
            words = words_of(text)
            lengths.append(len(words))
            for word, count in Counter(words).items():
                places, counts = postings.setdefault(word, (array("i"), array("i")))
                places.append(number)
                counts.append(count)
        self._found = postings
        self.num_passages = len(lengths)
        mean = sum(lengths) / max(self.num_passages, 1)
        sizes = np.frombuffer(lengths, dtype=np.int32) if self.num_passages else np.zeros(0, dtype=np.int32)
        self._norms = _K1 * (1.0 - _B + _B * sizes / max(mean, 1e-9))

    def best(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return the numbers and scores of the best passages, best first; those without a word of the query are none.

        ``score = sum over the query's different words of idf c (k1 + 1) / (c + k1 (1 - b + b length / mean length))`` with
        ``idf = ln(1 + (N - n + 0.5) / (n + 0.5))``, c the word's count in the passage, n the passages that have it. Of equal
        scores the earlier passage is first.
        """
        scores = np.zeros(self.num_passages)
        for word in dict.fromkeys(words_of(query)):
            if word not in self._found:
                continue
            places = np.frombuffer(self._found[word][0], dtype=np.int32)
            counts = np.frombuffer(self._found[word][1], dtype=np.int32)
            idf = math.log(1.0 + (self.num_passages - len(places) + 0.5) / (len(places) + 0.5))
            scores[places] += idf * counts * (_K1 + 1.0) / (counts + self._norms[places])
        hits = np.flatnonzero(scores)
        order = hits[np.argsort(-scores[hits], kind="stable")[:count]]
        return [(int(number), float(scores[number])) for number in order]


@dataclass(frozen=True, slots=True)
class Passage:
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
            if (target := target_outside(file, folder)) is not None:
                raise ConfigError(
                    f"corpus {folder}: {file} links to {target}, outside of the folder, and the policy would read it; copy the file there"
                )
            yield str(file.relative_to(folder)), file.read_text(encoding="utf-8")


def _of_lines(file: Path) -> Iterator[tuple[str, str]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _of_line(line, f"corpus {file}:{number}")


def _of_line(line: str, place: str) -> tuple[str, str]:
    try:
        row: Any = json_value(line.encode())
    except ValueError as err:
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


class SearchOptions(PlayOptions):
    """Options of ``search``."""

    corpus: Path = Field(
        description='A folder of .txt, .md and .rst files, or a .jsonl file with {"title", "text"} or {"contents"} in each line.'
    )
    top: int = Field(3, ge=1, le=100, description="Passages of an answer.")
    passage_chars: int = Field(
        1000, ge=50, le=100_000, description="Characters of a passage; longer texts are divided."
    )


class SearchArguments(ToolArguments):
    query: str = Field(max_length=_LONGEST_QUERY, description="Words to look for.")


class SearchTool(Tool):
    name = "search"
    description = "Search a collection of texts; return the passages that fit best."
    arguments = SearchArguments
    options = SearchOptions

    def __init__(self) -> None:
        super().__init__()
        self._passages: list[Passage] = []
        self._index: Bm25 | None = None

    def prepare(self) -> None:
        chosen: SearchOptions = self.chosen
        self._passages = read_corpus(chosen.corpus, chosen.passage_chars)
        self._index = Bm25(f"{passage.title}\n{passage.text}" for passage in self._passages)

    def call(self, arguments: SearchArguments, episode: ToolEpisode) -> str:
        if self._index is None:
            raise ToolUnavailable("the corpus was not read")
        chosen: SearchOptions = self.chosen
        passages = [self._passages[place] for place, _ in self._index.best(arguments.query, chosen.top)]
        if not passages:
            return "no passage holds any of these words"
        return "\n\n".join(
            f"[{n}] {f'{passage.title}: ' if passage.title else ''}{passage.text}"
            for n, passage in enumerate(passages, 1)
        )


SEARCH_TOOL = SearchTool()
