"""`search`: passages of a local corpus, by BM25; read into memory once, when the worker starts."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from penstock.agents.environments.episode_environment import PlayOptions
from penstock.agents.environments.tools.built_in.bm25 import Bm25
from penstock.agents.environments.tools.built_in.corpus import Passage, read_corpus
from penstock.agents.environments.tools.tool import Tool, ToolArguments, ToolEpisode, ToolUnavailable

_LONGEST_QUERY = 1000  # characters


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
    """A question."""

    query: str = Field(max_length=_LONGEST_QUERY, description="Words to look for.")


class SearchTool(Tool):
    """The tool ``search``."""

    name = "search"
    description = "Search a collection of texts; return the passages that fit best."
    arguments = SearchArguments
    options = SearchOptions

    def __init__(self) -> None:
        """Start without a corpus."""
        super().__init__()
        self._passages: list[Passage] = []
        self._index: Bm25 | None = None

    def prepare(self) -> None:
        """Read the corpus; raises ConfigError for one that cannot be read."""
        chosen: SearchOptions = self.chosen
        self._passages = read_corpus(chosen.corpus, chosen.passage_chars)
        self._index = Bm25(f"{one.title}\n{one.text}" for one in self._passages)

    def call(self, arguments: SearchArguments, episode: ToolEpisode) -> str:
        """Return the best passages, numbered, with their titles."""
        if self._index is None:
            raise ToolUnavailable("the corpus was not read")
        chosen: SearchOptions = self.chosen
        found = [self._passages[place] for place, _ in self._index.best(arguments.query, chosen.top)]
        if not found:
            return "no passage holds any of these words"
        return "\n\n".join(f"[{n}] {f'{one.title}: ' if one.title else ''}{one.text}" for n, one in enumerate(found, 1))


SEARCH_TOOL = SearchTool()
