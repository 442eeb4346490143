"""The zygote, which has common modules imported and forks the processes of programs, and what such a process does.

    service ── socket: limits as JSON, with the pipes' descriptors ──▶ zygote ── fork ──▶ program, confined
            ◀── {"pid"}, then {"status", "cpu_s"} ──

The zygote reads no program, test or output. Forking takes a tenth of the time of starting an interpreter, and the child inherits only this
module's state: the program is read from a pipe by the child, after it is confined. One program runs at a time; any message meanwhile, or
the end of the socket, kills it.

All output of a program's process is untrusted, because the program may have written it. Descriptors: 0 to 2 the standard ones, 3 the job
(JSON), 4 answers, 5 calls. Modes (and ``tests``, see `tests`):

- ``stdin``: run the program as ``__main__``; its output is the answer.
- ``function``: define the program, call one function with JSON arguments, write the JSON result to 4.
- ``serve``: define the program, then answer the calls of a test process, one JSON text per line (`values`).
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import gc
import inspect
import io
import json
import operator
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
import types
from typing import Any

from penstock.sandbox.inside import confine, tests, values

WARM = "array decimal threading"  # imported in advance, besides the modules of `_IMPORTS`
# What the judges of LiveCodeBench, APPS and TACO put before every program, in LiveCodeBench's order.
_STARRED = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json typing"
_IMPORTS = "".join(f"from {name} import *\n" for name in _STARRED.split()) + (
    f"import {', '.join(_STARRED.split())}, fractions, time\nquit = exit\n"
)
_RECURSION = 50_000  # the limit that LiveCodeBench's judge sets
_STACK = 64 * 1024**2  # bytes, for that depth in C
_MAX_DESCRIPTORS = 16
_MAX_MESSAGE = 4096
JOB, ANSWERS, CALLS = 3, 4, 5
FILE = "program.py"


def main(descriptor: int, settings: str) -> None:
    """Serve the socket ``descriptor`` until it ends; ``settings`` is the JSON text of the confinement's arguments."""
    for name in WARM.split():
        __import__(name)
    sys.set_int_max_str_digits(0)  # the limits on CPU time bound conversions
    usual: dict[str, Any] = {}
    exec(_IMPORTS, usual)  # noqa: S102 a constant
    builtins.open = _open
    usual = {name: thing for name, thing in usual.items() if not hasattr(builtins, name) and name != "__builtins__"}
    sys.argv[:] = [FILE]
    sys.path[:] = [path for path in sys.path if path.startswith(sys.base_prefix)]
    line = socket.socket(fileno=descriptor)
    try:
        confinement = confine.Confinement(**json.loads(settings))
    except OSError as err:
        line.send(json.dumps({"failed": str(err)}).encode())
        return
    gc.freeze()  # a collection in a program would copy the pages of all these objects
    line.send(b'{"ready": true}')
    while True:
        message, pipes, _, _ = socket.recv_fds(line, _MAX_MESSAGE, _MAX_DESCRIPTORS)
        if not message:
            return
        if pipes:  # without pipes it is a kill that arrived after the program had exited
            request = json.loads(message)
            _offer(usual, offered=request["mode"] != "tests")
            _fork_program(line, confinement, request, pipes)


def _offer(usual: dict[str, Any], *, offered: bool) -> None:
    """Let programs use the usual names without an import, unless they define them; test code decides by what is defined.

    Done before the fork, and once for a zygote that forks one kind: in each child it would copy the pages of all these objects.
    """
    if offered and "quit" not in builtins.__dict__:
        builtins.__dict__.update(usual)
    elif not offered and "quit" in builtins.__dict__:
        for name in usual:
            del builtins.__dict__[name]


def _fork_program(
    line: socket.socket, confinement: confine.Confinement, request: dict[str, Any], pipes: list[int]
) -> None:
    confirmed, confirm = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(confinement, request, [*pipes, confirm])
    os.close(confirm)
    for fd in pipes:
        os.close(fd)
    with os.fdopen(confirmed, "rb") as pipe:
        problem = pipe.read()
    watch = os.pidfd_open(pid)
    line.send(json.dumps({"pid": pid}).encode())
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    poll.register(line, select.POLLIN)
    while not any(fd == watch for fd, _ in poll.poll()):
        os.kill(pid, signal.SIGKILL)
        poll.unregister(line)
    _, status, usage = os.wait4(pid, 0)
    os.close(watch)
    ended = {"status": status, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024}
    if problem != b"confined":
        ended["failed"] = problem.decode(errors="replace") or "the process exited before it was confined"
    line.send(json.dumps(ended).encode())


def _child(confinement: confine.Confinement, request: dict[str, Any], pipes: list[int]) -> None:
    mode = str(request.pop("mode"))
    confirm = len(pipes) - 1
    code = 1
    try:
        confinement.enter(confine.Limits(**request), pipes)  # type: ignore[arg-type]
        os.write(confirm, b"confined")
    except BaseException as err:
        for fd in (pipes[confirm], confirm):  # its number before and after `enter`
            with contextlib.suppress(OSError):
                os.write(fd, f"{type(err).__name__}: {err}".encode())
        os._exit(1)
    os.close(confirm)
    try:
        code = tests.run() if mode == "tests" else run_program(mode)
    finally:
        os._exit(code)


def run_program(mode: str) -> int:
    # That of the zygote has found out of another file whether it can seek.
    sys.stdout = sys.__stdout__ = io.open(  # noqa: SIM115, UP020 ends with the process
        1, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False
    )
    code, outputs = 0, (sys.stdout, sys.stdout.buffer)
    sys.setrecursionlimit(_RECURSION)
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if 0 <= soft < _STACK and (hard < 0 or hard >= _STACK):
        resource.setrlimit(resource.RLIMIT_STACK, (_STACK, hard))
    try:
        with os.fdopen(JOB, "rb") as pipe:
            job = json.load(pipe)
        {"stdin": lambda job: _define(job, "__main__"), "function": _function, "serve": _serve}[mode](job)
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException:  # reported with its traceback
        code = 1
        _report()
    return _finish(code, outputs)


def _open(file: Any, *arguments: Any, **named: Any) -> Any:
    """Open a file as `io.open`; /dev/stdin in every kind of sandbox, of which one has no /proc."""
    return io.open(0 if file == "/dev/stdin" else file, *arguments, **named)  # noqa: UP020


def _define(job: dict[str, Any], name: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__file__ = FILE
    exec(compile(job["program"], FILE, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 its purpose
    return module.__dict__


def _function(job: dict[str, Any]) -> None:
    names = _define(job, "program")
    function = _find(names, job["function"])
    arguments = job["arguments"]
    if arguments and isinstance(arguments[0], dict):
        with contextlib.suppress(ValueError):  # as the judge of APPS does
            arguments[0] = {int(key): value for key, value in arguments[0].items()}
    result = function(*arguments)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    _write(ANSWERS, json.dumps(result).encode())


def _find(names: dict[str, Any], function: str) -> Any:
    if function in names:
        return names[function]
    if "Solution" not in names:
        raise NameError(f"the program does not define {function}")
    return getattr(names["Solution"](), function)


def _serve(job: dict[str, Any]) -> None:
    names = _define(job, "program")
    handles: dict[int, Any] = {}
    with os.fdopen(CALLS, "rb") as calls:
        for line in calls:
            call = json.loads(line)
            _write(ANSWERS, json.dumps(_answer(call, names, handles)).encode() + b"\n")


def _answer(call: dict[str, Any], names: dict[str, Any], handles: dict[int, Any]) -> dict[str, Any]:
    def keep(thing: Any) -> int:
        handles[len(handles)] = thing
        return len(handles) - 1

    try:
        target = _target(call, names, handles)
        if "arguments" not in call:
            return {"value": values.encode(target, keep), **_kind(target)}
        passed: list[Any] = []
        arguments, named = values.decode(call["arguments"], handles.__getitem__, passed)
        num_passed = len(passed)
        result = target(*arguments, **named)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        value = values.encode(result, keep, passed)
        return {"value": value, "changed": [values.contents(held, keep, passed) for held in passed[:num_passed]]}
    except BaseException as err:
        raised = {"raised": type(err).__name__, "text": _text(err), "types": _names(type(err))}
        with contextlib.suppress(BaseException):
            raised["attributes"] = values.encode(dict(vars(err)), keep)
        return raised


def _kind(target: Any) -> dict[str, Any]:
    """Return whether tests must await a function, and an exception class's ancestors, which tests expect by name."""
    if isinstance(target, type) and issubclass(target, BaseException):
        return {"exception": _names(target)}
    return {"async": True} if inspect.iscoroutinefunction(target) else {}


def _names(kind: type) -> list[str]:
    return [str(base.__name__) for base in kind.__mro__]


def _text(err: BaseException) -> str:
    try:
        return str(err)[:1000]
    except BaseException as other:
        return f"(its text cannot be shown: {type(other).__name__})"


def _operator(name: str) -> Any:
    """Return the function of an operator that a test applies to an object of the program."""
    if name == "enter":
        return lambda context: context.__enter__()
    if name == "exit":
        return lambda context: context.__exit__(None, None, None)
    return getattr(operator, name, None) or getattr(builtins, name)


def _target(call: dict[str, Any], names: dict[str, Any], handles: dict[int, Any]) -> Any:
    if "operator" in call:
        return _operator(call["operator"])
    if "name" in call:
        return _find(names, call["name"])
    target = handles[call["handle"]]
    return getattr(target, call["attribute"]) if call.get("attribute") else target


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _report() -> None:
    try:
        traceback.print_exc()
    except BaseException:
        os.write(2, b"the program raised, and its error cannot be printed\n")


def _finish(code: int, outputs: tuple[Any, Any]) -> int:
    """Run the interpreter's exit handlers and write what open files hold, without its finalization."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        code = code or 1
    try:
        _flush(sys.stdout)
    except BaseException:
        code = code or 1
    things = gc.get_objects()  # without those that `main` froze
    for kind, output in zip(
        (io.TextIOBase, io.BufferedIOBase), outputs, strict=True
    ):  # a text file writes into a buffered one
        for file in [output, *(thing for thing in things if issubclass(type(thing), kind))]:
            with contextlib.suppress(BaseException):
                _flush(file)
    return code


def _flush(file: Any) -> None:
    """Flush a file; one that is closed or detached has nothing left to write."""
    if file is None:
        return
    try:
        is_open = not file.closed
    except ValueError:
        return
    if is_open:
        file.flush()
