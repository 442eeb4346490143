"""The pages of the documentation: their code blocks with marks, commands, settings, links and quoted messages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_ELSEWHERE = (".pytest_cache", "src", "build", ".venv")  # with .venv-sglang and others that make targets install
READMES = tuple(
    sorted(path for path in ROOT.glob("*/**/README.md") if not path.relative_to(ROOT).parts[0].startswith(_ELSEWHERE))
)

_FENCE = re.compile(r"^(`{3,})(\{?[\w-]*\}?)[^\n]*\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (run|not run|file)(?:: ([^>]*?))? -->")
_SHELL = {"", "sh", "bash", "console"}


@dataclass(frozen=True, slots=True)
class Block:
    """A code block; ``mark`` is run, not run, file or "", ``note`` what follows it."""

    page: Path
    line: int
    language: str
    text: str
    mark: str
    note: str

    @property
    def is_shell(self) -> bool:
        return self.language in _SHELL

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[str]:
        """Return its commands, one for each: continued lines and quotes over several lines are joined."""
        found: list[str] = []
        held = ""
        for line in self.text.splitlines():
            held = f"{held}\n{line}" if held else line
            if not held.strip() or held.lstrip().startswith("#"):
                held = ""
            elif held.endswith("\\") or not _is_closed(held):
                continue
            else:
                found.append(held.replace("\\\n", " ").strip())
                held = ""
        return [*found, held] if held else found


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, each with the last mark between the block before and it."""
    text, end = page.read_text(encoding="utf-8"), 0
    for match in _FENCE.finditer(text):
        marks = _MARK.findall(text[end : match.start()])
        mark, note = marks[-1] if marks else ("", "")
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[2], match[3], mark, note.strip())
        end = match.end()


def words(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def penstock_commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield place and words of every penstock command in the blocks of a page."""
    for block in blocks(page):
        if block.is_shell or block.language == "text":  # where a page opens with its commands
            for command in (one for one in block.commands() if block.is_shell or one.startswith("penstock ")):
                for part in re.split(r"\s(?:&&|;)\s", command):
                    given = words(part)
                    while given and ("=" in given[0] and "." not in given[0].partition("=")[0]):
                        given = given[1:]  # variables before the command
                    if given and given[0] == "penstock":
                        yield block.where, [word for word in given[1:] if word not in {"&", "|"}]


def inline_code(page: Path) -> set[str]:
    """Return the texts between single back quotes, outside of code blocks."""
    return set(re.findall(r"(?<!`)`([^`\n]+)`(?!`)", _FENCE.sub("", page.read_text(encoding="utf-8"))))


def _is_closed(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True
