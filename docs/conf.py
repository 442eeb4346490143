"""How Sphinx builds the documentation: `make docs` writes it to build/docs; nothing is loaded from elsewhere at run time.

The source folder is the repository, so that the README of a package is a separate page and its links stay as they are.
Pages of reference are written by `docs/generate.py` from the code, where a page has a line
``<!-- generated: NAME -->``.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))

from docs import generate  # noqa: E402 - after the path above
from penstock import __version__  # noqa: E402

project = "Penstock"
release = version = __version__
author = "the Penstock authors"
copyright = "the Penstock authors"

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp, .go"

root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "benchmarks/**.md",
    "*/README.md",
    "*/*/README.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = ["src", "tests", "build", "dist", "runs", "data", ".*", "**/__pycache__", "**/node_modules"]

html_theme = "furo"
html_title = f"Penstock {release}"
html_static_path = ["_static"]
html_css_files = ["penstock.css"]
html_extra_path = ["_extra"]
html_copy_source = False
html_show_sphinx = False
html_favicon = "_static/penstock.svg"
html_theme_options = {"navigation_with_keys": True}

# Lines of the tables of contents that are left out while their page does not exist.
_WRITTEN_ELSEWHERE = re.compile(r"^(data|recipes|coming_from)\n", re.MULTILINE)
_GENERATED = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)


def _insert_generated(app: Any, document: str, source: list[str]) -> None:
    """Replace the marks of a page by the text that the code gives."""
    del app
    source[0] = _GENERATED.sub(lambda found: generate.text(found[1]), source[0])
    if document == root_doc:
        source[0] = _WRITTEN_ELSEWHERE.sub(_if_written, source[0])


def _if_written(line: re.Match[str]) -> str:
    return line[0] if (_ROOT / "docs" / f"{line[1]}.md").exists() else ""


def setup(app: Any) -> dict[str, bool]:
    """Connect the reference pages."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    app.connect("source-read", _insert_generated)
    return {"parallel_read_safe": True}
