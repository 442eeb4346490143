"""A working directory with a file named like each module that a Penstock process could import."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("penstock", *sorted(link.name for link in (ROOT / "src" / "penstock").iterdir() if link.is_symlink()))

# Only what needs no import: every module of the standard library has such a file too.
_TRAP = """\
import sys
with open({log!r}, "a") as log:
    log.write(__file__ + " in " + " ".join(sys.orig_argv) + "\\n")
raise SystemExit("imported from the working directory")
"""


class HostileFolder:
    """A folder full of modules that record their import; ``path`` is meant as a working directory."""

    def __init__(self, path: Path, log: Path) -> None:
        """Write a module for each name that is imported anywhere, and a package for each of our folders."""
        self.path = path
        self._log = log
        path.mkdir()
        trap = _TRAP.format(log=str(log))
        installed = {name for name in metadata.packages_distributions() if name.isidentifier()}
        for name in sorted({*sys.stdlib_module_names, *installed, *OURS, "sitecustomize", "usercustomize"}):
            (path / f"{name}.py").write_text(trap)
        for name in OURS:
            (path / name).mkdir()
            (path / name / "__init__.py").write_text(trap)
            (path / name / "__main__.py").write_text(trap)

    def imported(self) -> str:
        """Return what was imported from the folder so far, one line each; empty when nothing was."""
        return self._log.read_text() if self._log.exists() else ""


@pytest.fixture
def hostile_folder(tmp_path: Path) -> HostileFolder:
    return HostileFolder(tmp_path / "here", tmp_path / "imported")
