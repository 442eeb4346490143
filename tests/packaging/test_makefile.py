"""The Makefile: what pages and programs tell to type exists, `make help` lists it, and `make lines` counts the tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, re.MULTILINE))
# "make it" is no command: it has backticks, an indentation or a prompt, or nothing but a value or a comment after it.
_COMMAND = re.compile(
    r"(?:`|^ {4}|^\$ |^(?=make \S+(?:$| +#| [A-Z]+=)))make ([a-z][a-z-]*)(?: NAME=([\w-]+))?", re.MULTILINE
)


def _make(*words: str) -> subprocess.CompletedProcess[str]:
    """Run make as from a terminal: the suite itself runs below `make test`, which tells the processes it starts so."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", "-o", ".venv/.installed", *words]
    return subprocess.run(command, cwd=ROOT, env=environ, check=False, capture_output=True, text=True)


def _named(kind: str) -> set[str]:
    printed = _make("help").stdout
    found = re.search(rf"^make {kind} NAME=... one of: (.*)$", printed, re.MULTILINE)
    assert found is not None
    return set(found[1].split())


def _files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md", "*.py"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [
        ROOT / name for name in listed.stdout.split("\0") if name and name != "CHANGELOG.md" and (ROOT / name).is_file()
    ]


def test_every_target_that_is_named_exists():
    """In every page and program, the names of benchmarks, proofs and more tests included."""
    names = {kind: _named(kind) for kind in ("bench", "proof", "test-more")}
    wrong = []
    for file in _files():
        for line in file.read_text(encoding="utf-8").splitlines():
            if "of 08765d2f" in line:  # a command of that commit
                continue
            for target, name in _COMMAND.findall(line):
                if target not in TARGETS or (name and name not in names.get(target, ())):
                    wrong.append(f"{file.relative_to(ROOT)}: make {target} {name}")
    assert wrong == []


@pytest.mark.parametrize("kind", ["bench", "proof"])
def test_every_name_starts_a_module(kind: str):
    for name in _named(kind):
        printed = _make("-n", kind, f"NAME={name}").stdout
        module = re.search(r"python -m ((?:benchmarks|tests)[\w.]+)", printed.splitlines()[-1])
        assert module is not None, printed
        assert (ROOT / f"{module[1].replace('.', '/')}.py").is_file(), module[1]


def test_a_name_that_does_not_exist_lists_those_that_do():
    done = _make("proof", "NAME=nothing")
    assert done.returncode == 2
    assert "upgrade" in done.stdout


def test_lines_are_counted_beside_the_budget():
    """Rigs are part of the tests, and the exit code is 0 whatever is counted."""
    printed = subprocess.run(
        [sys.executable, "tests/lines.py"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    counts = {
        name.strip(): int(count.replace(",", ""))
        for name, count in re.findall(r"^(.{42}) +([\d,]+)", printed, re.MULTILINE)
    }
    assert 0 < counts["of these tests/rigs, lines"] < counts["tests with tests/rigs, lines"]
    assert 0 < counts["core, lines"] < counts["source, lines"]
    assert counts["core, lines"] == sum(counts[name] for name in counts if name.endswith("/"))
