"""Runs the tests in several processes, ``pytest -n NUMBER``, that are forked after the tests were collected once.

Each process takes one group of tests after the other: those of a file, or of files that share what takes long to make. Its
reports go to the process that collected, which prints and counts them. A process that is killed is replaced; the test that
it ran has failed.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import selectors
import signal
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from _pytest.runner import SetupState


def add_option(parser: pytest.Parser) -> None:
    group = parser.getgroup("parallel", "several processes")
    group._addoption("-n", dest="num_processes", type=int, default=0, metavar="NUMBER", help="processes; 0: this one")


class _Process:
    """A process as the one that collected sees it."""

    def __init__(self, number: int, run: Callable[[int, socket.socket], None]) -> None:
        self.number = number
        self.given: list[int] = []  # tests without all their reports, in order
        self.socket, far = socket.socketpair()
        self._begun = b""
        self.pid = os.fork()
        if self.pid == 0:
            self.socket.close()
            run(number, far)
        far.close()

    def messages(self) -> list[Any] | None:
        """Return what has arrived; None when the process has ended."""
        received = self.socket.recv(1 << 16)
        *lines, self._begun = (self._begun + received).split(b"\n")
        return [json.loads(line) for line in lines] if received else None

    def give(self, tests: Sequence[int]) -> None:
        self.given += tests
        self.socket.sendall(json.dumps(tests).encode() + b"\n")

    def wait(self) -> int:
        self.socket.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def run_in_processes(session: pytest.Session, group_of: Callable[[str], str]) -> None:
    """Run all tests of a session; ``group_of`` a node id: tests of equal groups run in the same process, in their order."""
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(session.items):
        groups.setdefault(group_of(item.nodeid), []).append(number)
    _Run(session, list(groups.values())).run(session.config.option.num_processes)


class _Run:
    def __init__(self, session: pytest.Session, groups: list[list[int]]) -> None:
        self._session, self._hook = session, session.config.hook
        self._groups = groups[::-1]
        self._processes: list[_Process] = []
        self._ready = selectors.DefaultSelector()
        self._basetemp = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]

    def run(self, num_processes: int) -> None:
        try:
            for number in range(min(num_processes, len(self._groups))):
                self._start(number)
            while self._processes:
                for key, _ in self._ready.select():
                    self._read(key.data)
        except BaseException:
            for process in self._processes:
                os.kill(process.pid, signal.SIGINT)
            raise
        finally:
            for process in self._processes:
                process.wait()
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _stops(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _start(self, number: int) -> None:
        process = _Process(number, self._in_process)
        self._processes.append(process)
        self._ready.register(process.socket, selectors.EVENT_READ, process)

    def _in_process(self, number: int, channel: socket.socket) -> None:
        for other in self._processes:
            other.socket.close()
        self._ready.close()
        _Tests(self._session, channel).run(self._basetemp / f"process-{number}")

    def _read(self, process: _Process) -> None:
        messages = process.messages()
        for kind, value in messages or ():
            if kind == "next":
                process.give(self._groups.pop() if self._groups and not self._stops() else [])
            elif kind == "report":
                report = self._hook.pytest_report_from_serializable(config=self._session.config, data=value)
                self._hook.pytest_runtest_logreport(report=report)
            else:
                self._finish(process)
        if messages is None:
            self._end(process)

    def _finish(self, process: _Process) -> None:
        item = self._session.items[process.given.pop(0)]
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _end(self, process: _Process) -> None:
        self._ready.unregister(process.socket)
        self._processes.remove(process)
        code = process.wait()
        if process.given:
            item = self._session.items[process.given[0]]
            text = f"the process of this test ended with {signal.Signals(-code).name if code < 0 else code}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            self._hook.pytest_runtest_logreport(report=report)
            self._finish(process)
        if process.given:
            self._groups.append(process.given)
        if self._groups and not self._stops():
            self._start(process.number)


class _Tests:
    """The tests that one process runs; its reports go through a channel."""

    def __init__(self, session: pytest.Session, channel: socket.socket) -> None:
        self._session, self._lines, self._channel = session, channel.makefile("rb"), channel

    def run(self, basetemp: Any) -> None:
        """Run what the other side gives, and end the process."""
        code = 1
        try:
            self._separate(basetemp)
            self._run()
            code = 0
        except KeyboardInterrupt:
            pass
        finally:
            atexit._run_exitfuncs()
            os._exit(code)

    def _separate(self, basetemp: Any) -> None:
        """Have a folder and an output of its own, and leave to the first process what it has begun."""
        config = self._session.config
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # temporary folders of the first process
        random.seed()
        basetemp.mkdir(mode=0o700)
        config._tmp_path_factory._basetemp = basetemp  # type: ignore[attr-defined]
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the first process
        capture.start_global_capturing()
        capture.suspend_global_capture()
        terminal: Any = config.pluginmanager.getplugin("terminalreporter")
        terminal._tw._file = open(os.devnull, "w")  # noqa: PTH123, SIM115
        config.pluginmanager.register(self, "reports to the first process")

    def _run(self) -> None:
        state: SetupState = self._session._setupstate
        try:
            pending: tuple[pytest.Item | None, ...] = ()
            for item in self._items():
                if pending:
                    self._run_one(pending[0], item)
                pending = (item,)
            if pending:
                self._run_one(pending[0], None)
        finally:
            state.teardown_exact(None)

    def _items(self) -> Iterator[pytest.Item]:
        while not self._session.shouldfail and (numbers := self._next()):
            for number in numbers:
                if not self._session.shouldfail:
                    yield self._session.items[number]

    def _next(self) -> list[int]:
        self._send("next", None)
        line = self._lines.readline()
        return json.loads(line) if line else []

    def _run_one(self, item: pytest.Item | None, following: pytest.Item | None) -> None:
        assert item is not None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        self._send("finished", None)

    def _send(self, kind: str, value: object) -> None:
        self._channel.sendall(json.dumps([kind, value]).encode() + b"\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        self._send("report", config.hook.pytest_report_to_serializable(config=config, report=report))
