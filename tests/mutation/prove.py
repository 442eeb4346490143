"""Prove that a test fails when a guard is removed: ``python -m tests.mutation.prove [WORD...] [--write PAGE]``.

`guards.toml` names each guard with its file, its exact text and a replacement without the guard. In a copy of the working
tree the named tests must pass; with the replacement at least one of them must fail. A text that is not in its file exactly
once is an error: the guard has moved, and its row must follow.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("guards.toml")
_DEADLINE_S = 240  # for the tests of one guard, on a busy machine; a test that waits for what never comes has failed
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of the large libraries, which hold no tests
_LARGE = ("pyarrow.parquet", "torch", "transformers", "fastapi", "uvicorn", "nats", "rich")
_BEGIN, _END = "<!-- guards: written by `make mutation-proof` -->", "<!-- end of guards -->"


@dataclass(frozen=True)
class Guard:
    """One check, and the tests that are said to prove it."""

    check: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]

    def without(self, source: str) -> str:
        """Return a file's text without the guard; raises ValueError unless it is there exactly once."""
        if (count := source.count(self.text)) != 1:
            raise ValueError(f"{self.file}: the text of the guard {self.check!r} is there {count} times, expected once")
        return source.replace(self.text, self.replacement)


def read_table() -> list[Guard]:
    """Return the rows of `guards.toml`."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["guard"]
    return [Guard(**{**row, "tests": tuple(row["tests"])}) for row in rows]


class Copy:
    """A copy of the working tree, in which tests import the copied package."""

    def __init__(self, folder: Path) -> None:
        """Copy every file that git knows, or would add."""
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            source, target = ROOT / name, folder / name
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)

    def fails(self, tests: Sequence[str]) -> tuple[bool, str]:
        """Run tests; return whether one failed, and the last line of the output. Raises ValueError for tests that are not there."""
        output = self.folder / "pytest.out"
        pid = os.fork()
        if pid == 0:
            try:
                self._run(tests, output)
            except BaseException:  # noqa: BLE001 this process must not go on as the one it was forked from
                traceback.print_exc()
            finally:
                os._exit(98)
        deadline = time.monotonic() + _DEADLINE_S
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return True, f"no end within {_DEADLINE_S} s"
            time.sleep(0.02)
        code = os.waitstatus_to_exitcode(ended[1])
        lines = output.read_text(encoding="utf-8").strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED ", "ERROR tests/"))]
        if code not in {0, 1}:
            raise ValueError(f"pytest ended with {code}: {' '.join(tests)}\n" + "\n".join(lines[-15:]))
        return code == 1, failed[0] if failed else lines[-1]

    def _run(self, tests: Sequence[str], output: Path) -> NoReturn:
        """Run tests in this process, which was forked with the large libraries imported and nothing of the project."""
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(self.folder)
        for name in [name for name in sys.modules if name.partition(".")[0] in {"tests", "penstock"}]:
            del sys.modules[name]
        paths = [str(self.folder / "src"), str(self.folder)]
        sys.path[:] = [*paths, *(path for path in sys.path if path not in {"", str(ROOT), str(ROOT / "src")})]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        code = int(pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", *_QUIET, *tests]))
        import penstock

        sys.stdout.flush()
        os._exit(code if Path(str(penstock.__file__)).is_relative_to(self.folder) else 99)

    def prove(self, guard: Guard) -> tuple[bool, str]:
        """Return whether the tests fail without the guard, and how."""
        path = self.folder / guard.file
        source = path.read_text(encoding="utf-8")
        path.write_text(guard.without(source), encoding="utf-8")
        try:
            return self.fails(guard.tests)
        finally:
            path.write_text(source, encoding="utf-8")


def page(results: Sequence[tuple[Guard, bool, str]]) -> str:
    """Return the results as a table."""
    lines = ["| check | file | fails without it |", "|---|---|---|"]
    for guard, is_proven, how in results:
        test = _name(how) if is_proven else "**no test**"
        lines.append(f"| {guard.check} | `{guard.file}` | {test} |")
    return "\n".join(lines)


def _name(how: str) -> str:
    if not how.startswith(("FAILED ", "ERROR tests/")):
        return how
    file, _, test = how.split(" ")[1].partition("::")
    return f"`{Path(file).name}` {test.partition('[')[0]}"


def main() -> int:
    """Prove the guards whose name has one of the words, all without words; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    options = parser.parse_args()
    guards = [one for one in read_table() if not options.words or any(word in one.check for word in options.words)]
    results: list[tuple[Guard, bool, str]] = []
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder:
        copy = Copy(Path(folder))
        sys.dont_write_bytecode = True  # a mutant may have the size and the second of the original
        for name in _LARGE:
            importlib.import_module(name)
        is_broken, how = copy.fails(sorted({test for one in guards for test in one.tests}))
        if is_broken:
            sys.stderr.write(f"the tests fail with all guards in place, so they prove nothing: {how}\n")
            return 2
        for guard in guards:
            results.append((guard, *copy.prove(guard)))
            _, is_proven, how = results[-1]
            sys.stdout.write(f"{'ok  ' if is_proven else 'HOLE'} {guard.check}: {how}\n")
            sys.stdout.flush()
    if options.write is not None:
        text = options.write.read_text(encoding="utf-8")
        before, after = text.partition(_BEGIN)[0], text.partition(_END)[2]
        options.write.write_text(f"{before}{_BEGIN}\n\n{page(results)}\n\n{_END}{after}", encoding="utf-8")
    holes = [guard.check for guard, is_proven, _ in results if not is_proven]
    sys.stdout.write(f"{len(results) - len(holes)} of {len(results)} guards are proven\n")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
