"""Count the lines, files and words of the tree beside its budget: ``make lines``. It is no gate: the exit code is 0.

Counted are the files that git knows or would add. Source is all Python but the tests; lines are those of the files, blank ones and
docstrings included.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ("protocol", "trainer", "rollout_service", "reward_service", "serving")
MOST_LINES_OF_A_FILE = 400


def tracked(ending: str) -> list[Path]:
    """Return the files with an ending, links left out, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", f"*{ending}"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    paths = [Path(name) for name in listed.stdout.split("\0") if name]
    return [path for path in paths if (ROOT / path).is_file() and not (ROOT / path).is_symlink()]


def lines(paths: Iterable[Path]) -> int:
    return sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in paths)


def words(paths: Iterable[Path]) -> int:
    return sum(len((ROOT / path).read_text(encoding="utf-8").split()) for path in paths)


def rows() -> list[tuple[str, int, int | None]]:
    """Return what is counted, how much it is, and the most it may be; None: no limit."""
    python = tracked(".py")
    tests = [path for path in python if path.parts[0] == "tests"]
    rigs = [path for path in tests if path.parts[:2] == ("tests", "rigs")]
    source = [path for path in python if path.parts[0] != "tests"]
    core = [path for path in source if path.parts[0] in CORE]
    benchmarks = [path for path in source if path.parts[0] == "benchmarks"]
    pages = [path for path in tracked(".md") if path.parts[0] == "docs"]
    parts = [(f"  of these {name}/", lines([path for path in core if path.parts[0] == name]), None) for name in CORE]
    return [
        ("source, lines", lines(source), 115_000),
        ("source, files", len(source), 800),
        (f"source, files of more than {MOST_LINES_OF_A_FILE} lines", sum(lines([path]) > MOST_LINES_OF_A_FILE for path in source), 0),
        ("core, lines", lines(core), 75_000),
        *[part for part in parts if part[1]],
        ("benchmarks, lines", lines(benchmarks), None),
        ("benchmarks, files", len(benchmarks), None),
        ("tests with tests/rigs, lines", lines(tests), 75_000),
        ("  of these tests/rigs, lines", lines(rigs), None),
        ("  of these tests/rigs, files", len(rigs), None),
        ("docs/, words", words(pages), 60_000),
    ]  # fmt: skip


def main() -> None:
    for name, count, most in rows():
        limit = "" if most is None else f"of {most:>7,}" + ("" if count <= most else f"   over by {count - most:,}")
        sys.stdout.write(f"{name:42} {count:>8,} {limit}\n".rstrip() + "\n")


if __name__ == "__main__":
    main()
