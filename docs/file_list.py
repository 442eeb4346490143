"""The names of all files of the packages, folder by folder, in CONTRIBUTING.md: ``python -m docs.file_list`` writes them."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
PACKAGES = (
    "protocol", "serving", "trainer", "rollout_service", "reward_service", "agents", "fine_tuning", "reward_model", "sandbox",
    "console", "deploy", "forensics", "client",
)  # fmt: skip
_LIST = re.compile(r"(?<=<!-- files -->\n).*?(?=<!-- end of files -->)", re.DOTALL)


def file_list() -> str:
    """Return a line for each folder of the packages: the names of its Python files, without the ending."""
    names: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            names[path.parent.relative_to(ROOT).as_posix()].append(path.stem)
    return "".join(f"- `{folder}/`: {', '.join(names[folder])}\n" for folder in sorted(names))


def with_list(page: str) -> str:
    """Return the text of the page with the list as it is now; raises ValueError if the page has no place for it."""
    if not _LIST.search(page):
        raise ValueError(f"{PAGE.name} has no lines <!-- files --> and <!-- end of files -->: add them around the list")
    return _LIST.sub(lambda _: file_list(), page)


if __name__ == "__main__":
    PAGE.write_text(with_list(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"written: {PAGE.name}\n")
