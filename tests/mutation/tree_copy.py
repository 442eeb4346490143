"""A copy of the working tree, in which tests run in processes that are forked after the tests were collected.

So imports and collection, which take longer than most of the tests, are made once for all guards.
"""

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutation.guards import ROOT, Guard
from tests.mutation.swap_code import swap

_OPTIONS = (
    *("-q", "--no-header", "-p", "no:cacheprovider", "--timeout", "0", "--continue-on-collection-errors"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
_OURS = {"tests", "penstock", "benchmarks", "docs"}
_POLL_S = 0.02


@dataclass(frozen=True)
class Ran:
    """What became of some tests: ``code`` is 0 or 1 as pytest's, None if they did not end; ``test`` is the first that failed."""

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
        return self.code == 0


class TreeCopy:
    """A copy of every file that git knows, or would add; tests import the copied package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num_mutants = 0
        self._collected: list[pytest.Item] = []
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        compiled: set[Path] = set()
        for name in filter(None, listed.stdout.decode().split("\0")):
            source, target = ROOT / name, folder / name
            if source.is_symlink() or source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
                compiled.add(Path(name).parent / "__pycache__")
        for name in compiled:  # valid for the copies, which have the times of the originals
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name)

    def collect(self, test_files: Sequence[str], then: Callable[[], None]) -> int:
        """Make this process one of the copy, collect tests, call ``then``, and return pytest's exit code.

        The process is of no other use afterwards.
        """
        os.chdir(self.folder)
        _forget(ROOT, self.folder)
        paths = [str(self.folder / "src"), str(self.folder)]
        sys.path[:] = [*paths, *(path for path in sys.path if path not in {"", str(ROOT), str(ROOT / "src")})]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        return self._pytest(test_files, _Collected(self, then))

    def _pytest(self, arguments: Sequence[str], plugin: object) -> int:
        return int(pytest.main([*_OPTIONS, "--basetemp", str(self.folder / "tmp"), *arguments], plugins=[plugin]))

    def run(self, tests: Sequence[str], *, deadline_s: float, change: Callable[[], bool] = lambda: True) -> Ran:
        """Run tests in a forked process, after ``change`` there, up to the first that fails; it is killed after ``deadline_s`` seconds.

        If ``change`` returns False, the process imports the tests anew.
        """
        items = [item for item in self._collected if any(_is_of(item.nodeid, test) for test in tests)]
        if not items:
            return Ran(1, "", f"not collected: {' '.join(tests)}", 0.0)
        report = self.folder / "report.jsonl"
        report.unlink(missing_ok=True)
        started = time.monotonic()
        if (pid := os.fork()) == 0:
            try:
                os.setsid()
                if change():
                    _run_items(items, _Report(report))
                else:
                    _forget(ROOT, self.folder)
                    self._pytest(["-x", *tests], _Report(report))
            except BaseException:  # noqa: BLE001 this process must not go on as the one it was forked from
                _Report(report).write("", "process", traceback.format_exc(limit=-3))
            finally:
                os._exit(0)
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() - started > deadline_s:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return Ran(None, "", f"no end within {deadline_s:.0f} s", time.monotonic() - started)
            time.sleep(_POLL_S)
        return _ran(report, time.monotonic() - started)

    def run_without(self, guard: Guard, *, deadline_s: float) -> Ran:
        path = self.folder / guard.file
        source, times = path.read_text(encoding="utf-8"), path.stat()
        mutant = guard.without(source)
        inside = self.folder / "src" / "penstock" / guard.file  # the package's folders are links to those of the tree
        imported_as = str(inside if inside.exists() else path)
        path.write_text(mutant, encoding="utf-8")
        # Compiled modules are found by the second and the size of their source: no mutant has the second of another.
        self._num_mutants += 1
        os.utime(path, (times.st_atime, int(times.st_mtime) - 10 * self._num_mutants))
        try:
            return self.run(guard.tests, deadline_s=deadline_s, change=lambda: swap(source, mutant, imported_as))
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _ran(report: Path, seconds: float) -> Ran:
    found = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    for one in found:
        if "from pytest-timeout" in one["error"]:
            return Ran(None, one["test"], one["error"], seconds)
        if one["when"] in ("call", "teardown"):
            return Ran(1, one["test"], one["error"], seconds)
    if [one["when"] for one in found] == ["passed"]:
        return Ran(0, "", "", seconds)
    return Ran(1, "", " | ".join(one["error"] for one in found) or "no test was run", seconds)


class _Collected:
    """A plugin of pytest that calls a function in place of the loop over the tests."""

    def __init__(self, copy: TreeCopy, then: Callable[[], None]) -> None:
        self._copy, self._then = copy, then

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Take the collected tests; runs none."""
        penstock = importlib.import_module("penstock")
        if not Path(str(penstock.__file__)).is_relative_to(self._copy.folder):
            raise RuntimeError(f"the tests import {penstock.__file__}, not the copy in {self._copy.folder}")
        self._copy._collected = list(session.items)
        self._then()
        return True


class _Report:
    """A plugin of pytest that writes each failure to a file as it happens, and at the end a line if there was none."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.num_failed = self.num_passed = 0

    def write(self, test: str, when: str, error: str) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, "when": when, "error": error[:600]}) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_passed += report.passed and report.when == "call"
        if report.failed:
            self.num_failed += 1
            crash = getattr(report.longrepr, "reprcrash", None)
            self.write(report.nodeid, report.when, crash.message if crash is not None else report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        if self.num_passed and not self.num_failed:
            self.write("", "passed", "")


def _run_items(items: Sequence[pytest.Item], report: _Report) -> None:
    items[0].config.pluginmanager.register(report)
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if report.num_failed:
            item.session._setupstate.teardown_exact(None)  # ends the servers of the session
            return
    report.pytest_sessionfinish()


def _is_of(nodeid: str, test: str) -> bool:
    """Return True if a collected test is the one that a row names: a file, a function with all its parameters, or one of them."""
    return nodeid == test or nodeid.startswith((f"{test}::", f"{test}["))


def _forget(*roots: Path) -> None:
    for name in names_of(sys.modules, roots):
        del sys.modules[name]


def names_of(modules: Mapping[str, object], roots: Sequence[Path]) -> list[str]:
    """Return the names of the modules of trees, without those of an environment in them and the program itself.

    Pytest names a test after the nearest folders that are packages (`proxy.test_tree`): one that stayed would use the packages
    that it had imported, whose registries find nothing in those that are imported anew.
    """
    found = []
    for name, module in modules.items():
        file = Path(getattr(module, "__file__", None) or os.devnull)
        if name.partition(".")[0] in _OURS or (
            name != "__main__"  # torch and multiprocessing look it up
            and any(file.is_relative_to(root) for root in roots)
            and not file.is_relative_to(sys.prefix)
        ):
            found.append(name)
    return found
