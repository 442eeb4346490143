"""The guards of `guards.toml`: checks that refuse hostile or wrong input, and the tests that fail without them."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("guards.toml")


@dataclass(frozen=True)
class Guard:
    """One check, and the tests that are said to prove it."""

    check: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    @property
    def test_files(self) -> list[str]:
        return sorted({test.partition("::")[0] for test in self.tests})

    def without(self, source: str) -> str:
        """Return a file's text without the guard; raises ValueError unless it is there exactly once."""
        if (count := source.count(self.text)) != 1:
            raise ValueError(f"{self.file}: the text of the guard {self.check!r} is there {count} times, expected once")
        return source.replace(self.text, self.replacement)

    def digest(self, root: Path = ROOT) -> str:
        """Return a hash of the row, of the guarded file and of the tests' files: while it stays, so does a result."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode())
        for file in (self.file, *self.test_files):
            digest.update((root / file).read_bytes())
        return digest.hexdigest()


def read_table() -> list[Guard]:
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["guard"]
    return [Guard(**{**row, "tests": tuple(row["tests"])}) for row in rows]
