"""Check that a built site loads nothing from elsewhere: ``python -m docs.self_contained build/docs``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# What a browser loads by itself; a link that a reader clicks on (<a href>) may lead anywhere.
_LOADS = (
    re.compile(r"<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?\b(?:src|srcset|data)=[\"']?\s*((?:https?:)?//[^\"'\s>]+)", re.IGNORECASE),
    re.compile(r"<link\b(?![^>]*\brel=[\"']?canonical)[^>]*?\bhref=[\"']?\s*((?:https?:)?//[^\"'\s>]+)", re.IGNORECASE),
    re.compile(r"url\(\s*[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE),
    re.compile(r"\bimport\s*\(?\s*[\"']((?:https?:)?//[^\"']+)"),
)  # fmt: skip
_SUFFIXES = {".html", ".css", ".js", ".svg"}


def loads(text: str) -> Iterator[str]:
    """Yield the addresses of other hosts that a page, style sheet or script makes a browser load."""
    yield from dict.fromkeys(address for pattern in _LOADS for address in pattern.findall(text))


def main(folder: Path) -> int:
    """Print what the site loads from elsewhere; returns 1 if there is anything, or no site."""
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in _SUFFIXES]
    references = [f"{file}: {address}" for file in files for address in loads(file.read_text(encoding="utf-8"))]
    sys.stderr.write("".join(f"loaded from elsewhere: {reference}\n" for reference in references))
    if not files:
        sys.stderr.write(f"no site in {folder}; build it: make docs\n")
    return 1 if references or not files else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
