"""Render a model's chat template, which is code from outside.

The sandbox of Jinja keeps a template from reaching Python, but not from using all memory or never ending, and counting what a
template makes misses what C code makes inside of one call. So `template_process` renders it, a process that is kept: the kernel
bounds its memory and, for each rendering, its CPU time. The price is the way there and back, less than counting costs.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.protocol.errors import TemplateRefused

MAX_TEMPLATE_CHARS = 1024**2  # templates of published models have less than 20,000
MAX_CHARS = 8 * 1024**2  # of a rendered text: the longest contexts have fewer
MAX_BYTES = 512 * 1024**2  # of the process that renders, Python included
MAX_CPU_S = 5.0
_MAX_WALL_S = 120.0  # the process waits for nothing, but the machine may have other work
_NUM_KEPT = 4  # processes of 25 MB, one for each template
_PROGRAM = Path(__file__).with_name("template_process.py")
_OUT_OF_MEMORY = 3  # exit code of `template_process`


class ChatTemplate:
    """One compiled template. Thread-safe."""

    def __init__(self, text: str) -> None:
        """Compile; raises TemplateRefused for invalid Jinja, and for a text that is too long."""
        if len(text) > MAX_TEMPLATE_CHARS:
            raise TemplateRefused(f"{len(text)} characters, the limit is {MAX_TEMPLATE_CHARS}")
        self.marks_answers = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text) is not None
        """Whether the template marks what an assistant says, by ``{% generation %}`` blocks."""
        self._text = text
        with _LOCK:
            _process_of(text)

    def render(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
        """Return the text of a chat; raises TemplateRefused if the template refuses it, or uses more than the limits."""
        return self._rendered(messages, names)

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any], opening: str = "", closing: str = ""
    ) -> str:
        shown = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {**names, "messages": shown}
        try:
            request = marshal.dumps((MAX_CPU_S, (opening, closing, variables)))
        except ValueError:  # a class of its own, such as a mapping
            request = marshal.dumps((MAX_CPU_S, (opening, closing, _plain(variables))))
        with _LOCK:
            try:
                return _process_of(self._text).ask(request)
            except _ProcessEnded:  # by the kernel or by somebody else, while it was idle: the template may be blameless
                return _process_of(self._text).ask(request)

    def render_marked(self, messages: Sequence[Mapping[str, Any]], **names: Any) -> list[tuple[str, bool]]:
        """Return the texts that make up a chat, each with whether it is inside a ``{% generation %}`` block.

        Raises TemplateRefused as `render` does, and if the template changes the text of its blocks afterwards.
        """
        mark = secrets.token_hex(8)
        opening, closing = f"\ue000{mark}\ue001", f"\ue002{mark}\ue003"
        marked = self._rendered(messages, names, opening, closing)
        segments, is_inside = [], False
        for number, part in enumerate(re.split(f"({opening}|{closing})", marked)):
            if number % 2:
                is_inside = part == opening
            elif part:
                segments.append((part, is_inside))
        if "".join(text for text, _ in segments) != self.render(messages, **names):
            raise TemplateRefused("it changes the text inside its generation blocks after it marked it")
        return segments


class _ProcessEnded(TemplateRefused):
    """The process has ended, and not by a limit."""


class _Process:
    """A process that renders one template."""

    def __init__(self, text: str) -> None:
        """Start it and compile; raises TemplateRefused for invalid Jinja."""
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM), str(MAX_BYTES), str(MAX_CHARS)],
                stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip
        self.stop = weakref.finalize(self, _stop, self._process, self._connection)
        try:
            self.ask(marshal.dumps((MAX_CPU_S, text)))
        except TemplateRefused as err:
            reason = f"it is not valid Jinja ({err})" if self.stop.alive else str(err)
            raise TemplateRefused(reason) from None

    def ask(self, request: bytes) -> str:
        """Return the answer to a request; raises TemplateRefused, and _ProcessEnded where the process is gone."""
        deadline = time.monotonic() + _MAX_WALL_S
        try:
            self._connection.settimeout(_MAX_WALL_S)
            self._connection.sendall(len(request).to_bytes(8, "little") + request)
            size = int.from_bytes(self._read(8, deadline), "little")
            if not 0 < size <= 1 + 4 * MAX_CHARS:
                raise EOFError
            answer = self._read(size, deadline)
        except (ConnectionError, EOFError):
            raise self._ended() from None
        except TimeoutError:
            self.stop()
            raise TemplateRefused(f"the rendering did not end within {_MAX_WALL_S:.0f} s") from None
        except BaseException:  # too late, or interrupted: what comes next would be the answer to this request
            self.stop()
            raise
        if answer[:1] == b"-":
            raise TemplateRefused(answer[1:].decode())
        return answer[1:].decode()

    def _ended(self) -> Exception:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        code = self._process.returncode
        self.stop()
        if code == _OUT_OF_MEMORY:
            return TemplateRefused(f"the rendering uses more than {MAX_BYTES >> 20} MiB of memory")
        if code == -signal.SIGPROF:
            return TemplateRefused(f"the rendering uses more than {MAX_CPU_S:g} s of CPU time")
        return _ProcessEnded(f"the process that renders it ended with code {code}")

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._connection.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


def _stop(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    process.kill()
    process.wait()
    connection.close()


_LOCK = threading.RLock()
_PROCESSES: OrderedDict[str, _Process] = OrderedDict()  # by the template's text, used longest ago first


def _process_of(text: str) -> _Process:
    process = _PROCESSES.pop(text, None)
    if process is None or not process.stop.alive:
        process = _Process(text)
    _PROCESSES[text] = process
    while len(_PROCESSES) > _NUM_KEPT:
        _PROCESSES.popitem(last=False)[1].stop()
    return process


def _forget() -> None:
    """Leave the processes of the parent to it: two writers to one pipe would mix their requests."""
    global _LOCK  # noqa: PLW0603  a thread that is not in the fork may hold it
    _LOCK = threading.RLock()
    for process in _PROCESSES.values():
        process.stop.detach()
    _PROCESSES.clear()


os.register_at_fork(after_in_child=_forget)


def _plain(value: Any) -> Any:
    """Return a value of JSON as the types of JSON; raises TemplateRefused for any other."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return str(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            raise TemplateRefused(f"a chat holds texts, numbers, lists and objects, got {type(value).__name__}")
