"""A copy of the working tree, in which tests run in forked processes that have imported them already."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutation.guards import ROOT, Guard
from tests.mutation.swap_code import swap

_QUIET = ("-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
_LARGE = (
    *("pyarrow.parquet", "torch", "transformers", "peft", "hypothesis"),
    *("fastapi", "uvicorn", "aiohttp", "httpx", "nats", "minio", "rich", "cryptography.x509"),
)
_POLL_S = 0.02


@dataclass(frozen=True)
class Ran:
    """What became of some tests: ``code`` is pytest's, None if they did not end; ``test`` is the first that failed."""

    code: int | None
    test: str
    error: str
    seconds: float

    @property
    def has_failed(self) -> bool:
        """True if a test itself failed; not its fixtures' setup, and not by the time it took."""
        return self.code == 1 and self.test != ""

    @property
    def has_passed(self) -> bool:
        """True if every test passed."""
        return self.code == 0


class TreeCopy:
    """A copy of every file that git knows, or would add; tests import the copied package."""

    def __init__(self, folder: Path) -> None:
        """Copy into a folder that does not exist."""
        self.folder = folder
        self._num_mutants = 0
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

    def enter(self, test_files: Sequence[str]) -> None:
        """Make this process one of the copy, and import the tests; it cannot be undone."""
        os.chdir(self.folder)
        self._forget()
        paths = [str(self.folder / "src"), str(self.folder)]
        sys.path[:] = [*paths, *(path for path in sys.path if path not in {"", str(ROOT), str(ROOT / "src")})]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        descriptor = os.open(self.folder / "collected.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        kept = os.dup(1)
        os.dup2(descriptor, 1)
        try:
            pytest.main([*_QUIET, "--collect-only", *test_files])
            sys.stdout.flush()
        finally:
            os.dup2(kept, 1)
        penstock = importlib.import_module("penstock")
        if not Path(str(penstock.__file__)).is_relative_to(self.folder):
            raise RuntimeError(f"the tests import {penstock.__file__}, not the copy in {self.folder}")

    def run(
        self,
        tests: Sequence[str],
        *,
        deadline_s: float,
        stop_at_first: bool = True,
        change: Callable[[], None] | None = None,
    ) -> Ran:
        """Run tests in a process forked from this one, after ``change`` there; it is killed after ``deadline_s`` seconds."""
        output, failures = self.folder / "pytest.out", self.folder / "failures.jsonl"
        failures.unlink(missing_ok=True)
        started = time.monotonic()
        if (pid := os.fork()) == 0:
            code = 98
            try:
                os.setsid()
                descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                if change is not None:
                    change()
                options = [
                    *_QUIET,
                    "--timeout",
                    "0",
                    "--basetemp",
                    str(self.folder / "tmp"),
                    *(["-x"] if stop_at_first else []),
                ]
                code = int(pytest.main([*options, *tests], plugins=[_Failures(failures)]))
                sys.stdout.flush()
            except BaseException:  # noqa: BLE001 this process must not go on as the one it was forked from
                traceback.print_exc()
            finally:
                os._exit(code)
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() - started > deadline_s:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return Ran(None, "", f"no end within {deadline_s:.0f} s", time.monotonic() - started)
            time.sleep(_POLL_S)
        seconds, code = time.monotonic() - started, os.waitstatus_to_exitcode(ended[1])
        found = [json.loads(line) for line in failures.read_text().splitlines()] if failures.exists() else []
        for failure in found:
            if "from pytest-timeout" in failure["error"]:
                return Ran(None, failure["test"], failure["error"], seconds)
            if failure["when"] != "setup":
                return Ran(code, failure["test"], failure["error"], seconds)
        tail = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-6:]
        return Ran(code, "", " | ".join([one["error"] for one in found] or tail), seconds)

    def run_without(self, guard: Guard, *, deadline_s: float) -> Ran:
        """Run a guard's tests without the guard; this process has imported them with it."""
        path = self.folder / guard.file
        source, times = path.read_text(encoding="utf-8"), path.stat()
        mutant = guard.without(source)
        path.write_text(mutant, encoding="utf-8")
        # Compiled modules are found by the second and the size of their source: no mutant has the second of another.
        self._num_mutants += 1
        os.utime(path, (times.st_atime, int(times.st_mtime) - 10 * self._num_mutants))

        def change() -> None:
            if not swap(source, mutant, self._imported_as(guard.file)):
                self._forget()  # pytest imports the tests, and with them the changed file, anew

        try:
            return self.run(guard.tests, deadline_s=deadline_s, change=change)
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _imported_as(self, file: str) -> str:
        """Return the path under which the package has a file: its folders are links to those of the tree."""
        inside = self.folder / "src" / "penstock" / file
        return str(inside if inside.exists() else self.folder / file)

    @staticmethod
    def _forget() -> None:
        for name in [
            name for name in sys.modules if name.partition(".")[0] in {"tests", "penstock", "benchmarks", "docs"}
        ]:
            del sys.modules[name]


class _Failures:
    """A plugin of pytest that writes each failure to a file as it happens."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write one line of JSON."""
        if not report.failed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        error = crash.message if crash is not None else report.longreprtext
        line = {"test": report.nodeid, "when": report.when, "error": error[:400]}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def import_large_libraries() -> None:
    """Import what most tests need and no test changes, once for all forked processes."""
    for name in _LARGE:
        importlib.import_module(name)
