"""Python processes that cost little to start: forked from one that has imported what they need.

Within ``children()``, ``subprocess.Popen``, so also ``subprocess.run`` and asyncio, forks what would start a module of Penstock:
``python [-P] -m penstock.NAME ...``, also behind `parent_death`. A fork server imports what is asked for, and forks with
CLONE_PARENT: the new process is a child of the one that asked, which signals it, waits for it and counts its CPU time as of any
other. It has the command line, environment, files, folder and session it is given, runs the module as ``__main__``, and has a
fork server of its own, so that what it starts is forked, too. Anything else, such as ``python -c``, is started as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module, util
from pathlib import Path
from typing import Any

from penstock.protocol import parent_death

ROOT = Path(__file__).resolve().parents[1]
_PYTHON = sys.executable
_NEVER = ("LD_PRELOAD", "PYTHONPATH")  # variables that a forked process comes too late for
_READ_AT_IMPORT = ("CUDA", "DS_", "HF_", "LANG", "LC_", "LD_", "NVIDIA", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS")
_SET_MEANWHILE = (
    "DS_ACCELERATOR",
    "TORCHINDUCTOR_CACHE_DIR",
)  # by `import_deepspeed` and torch's compiler, in any process alike
_ENVIRON = {  # of a fork server: torch has no threads, Arrow none
    **os.environ, "OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false", "PYTHONDONTWRITEBYTECODE": ""
}  # fmt: skip
_CALL = "import sys; from {} import main as called; sys.exit(called({}))"
TRAINER = "tests.trainer.learner.loaded"
_ENGINE = "penstock.rollout_service.embedded_engine.run_engine"
_REWARD = "penstock.reward_service.service"
_CONSOLE = tuple(f"penstock.{name}" for name in (
    "console.cli.main", "forensics.audit.audit", "console.record.lineage", "forensics.rescore", "console.tools.dead_letters",
    "console.tools.removal", "console.tools.rewards",
))  # fmt: skip
_EVERYTHING = (TRAINER, _ENGINE, _REWARD, "penstock.deploy.local_run", *_CONSOLE)
_IMPORTED_LATER: Mapping[str, Sequence[str]] = {  # than at its start, by a module
    "penstock": _CONSOLE,
    "penstock.trainer": (TRAINER,),
    "penstock.fine_tuning": (TRAINER,),
    "penstock.forensics.replay": (TRAINER,),
    "penstock.reward_service": (_REWARD,),
    "penstock.rollout_service.embedded_engine": (_ENGINE,),
}
_BY_ITS_CHILDREN: Mapping[str, Sequence[str]] = {  # by a module or a verb
    "penstock.deploy.train": _EVERYTHING,
    "penstock.rollout_service": (_ENGINE,),
    "train": _EVERYTHING,
    "replay": (TRAINER,),
    "chat": (_ENGINE,),
    **dict.fromkeys(("sft", "dpo", "rm"), (TRAINER,)),
}
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine()) if sys.platform == "linux" else None
_PARENT, _SET_TID, _CLEAR_TID = 0x8000, 0x01000000, 0x00200000
_PR_GET_TID_ADDRESS = 40
_DEADLINE_S = 300.0  # for an answer: everything is imported before the first one
_USUAL = (None, None, True, None, 0, False, True, None, None, None, -1, -1)  # what else subprocess.Popen can be given
_SPACE = 16_000  # bytes of a command line: where the kernel reads it cannot be moved
_HIGH = 300  # the least number of a file of a fork server, so that it is none that a process is given
_STOPPING = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)  # to a group: for those who stop, and a fork server ends after them


class Server:
    """A fork server, which is a child of this process."""

    def __init__(self, asked: socket.socket, later: Sequence[str] | None = None) -> None:
        self._asked = asked
        asked.settimeout(_DEADLINE_S)
        self._lock = threading.Lock()
        self.later = later

    @classmethod
    def start(cls, later: Sequence[str] | None = None) -> Server:
        """Start one that imports these modules, whatever is asked for; None: what the processes import."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [_PYTHON, "-c", f"from tests.forked import serve; serve({far.fileno()})", "." * _SPACE]
        given = {"cwd": ROOT, "env": _ENVIRON, "pass_fds": [far.fileno()], "stdin": subprocess.DEVNULL}
        made = cls(near, later)
        with far:  # the parent is a thread, for the kernel
            process = _starter().submit(subprocess.Popen, command, **given).result()
        atexit.register(process.wait)
        atexit.register(process.kill)  # first
        return made

    def close(self) -> None:
        self._asked.close()

    def ask(self, request: Mapping[str, Any], files: Sequence[int]) -> int:
        with self._lock:
            try:
                socket.send_fds(self._asked, [json.dumps(request).encode()], files)
                answer = self._asked.recv(100)
            except OSError:
                self.close()  # else the next one is given a late answer
                raise
        assert answer, f"the fork server ended instead of starting {request['words']}"
        return int(answer)


@functools.cache
def _starter() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "fork-server")


@functools.cache
def _shared() -> Server:
    return Server.start()


class Popen(subprocess.Popen[Any]):
    """A process that is forked if it can be; what it starts is not."""

    server: Server | None = None  # none: that of all tests of this process
    later: Sequence[str] = ()  # modules that are imported before
    nested = False

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any, *more: Any
    ) -> None:
        pipes, session = more[3:9], more[14]
        environ = dict(os.environ if env is None else env)
        folder = Path(cwd or ".").absolute()
        how = None
        usual = (executable, preexec_fn, close_fds, *more[:3], *more[9:14], *more[15:]) == _USUAL
        if usual and not isinstance(args, (str, Path)) and folder.is_dir():
            how = _how([os.fspath(word) for word in args], environ)
        if how is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)  # type: ignore[misc]
            return
        server = self.server or _shared()
        later = {*self.later, *_IMPORTED_LATER.get(how["module"], ())} if server.later is None else {*server.later}
        for word in (how["module"], *how["arguments"]) if self.nested else ():
            later |= {*_BY_ITS_CHILDREN.get(word, ())}
        standard = [number if file == -1 else file for number, file in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {
            **how, "environ": environ, "cwd": str(folder), "session": session, "pass_fds": list(pass_fds),
            "later": sorted(later), "nested": self.nested,
        }  # fmt: skip
        self.pid = server.ask(request, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _Nested(Popen):
    nested = True


def _how(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return how a command line is run without a new interpreter; None if it needs one."""
    before, command = 0, list(words)
    if command[:4] == parent_death.command_words(0)[:4]:
        before, command = 7, command[7:]
    safe = "-P" in command[1:2]
    program, kind, module, *arguments = [command[0], *command[2 if safe else 1 :], "", ""][
        : max(3, len(command) - safe)
    ]
    late = any(
        name in _NEVER or (name.startswith(_READ_AT_IMPORT) and value != _ENVIRON.get(name))
        for name, value in environ.items() if value and name not in _SET_MEANWHILE
    )  # fmt: skip
    is_module = kind == "-m" and module.partition(".")[0] == "penstock"
    is_call = kind == "-c" and module.startswith(_CALL.partition("{")[0])
    if _CLONE is None or program != _PYTHON or late or not (is_module or is_call):
        return None
    return {
        "words": command, "bound": words[4:before], "safe": safe, "arguments": arguments,
        "module": module.split()[3] if is_call else module, "code": module if is_call else "",
    }  # fmt: skip


def call(module: str, *arguments: str, given: str = "") -> list[str]:
    """Return the command line that calls ``main`` of a module; ``given`` are its arguments as written in Python."""
    return [_PYTHON, "-c", _CALL.format(module, given), *arguments]


@contextlib.contextmanager
def children(*, nested: bool = True) -> Iterator[None]:
    """Fork the processes that this one starts meanwhile and, if ``nested``, those that they start."""
    before, subprocess.Popen = subprocess.Popen, _Nested if nested else Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


def run(
    command: Sequence[str], *, cwd: Path, environ: Mapping[str, str], deadline_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end, as ``subprocess.run`` does; raises TimeoutExpired."""
    pipe = subprocess.PIPE
    popen = subprocess.Popen if issubclass(subprocess.Popen, Popen) else Popen
    with popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=environ) as process:
        try:
            out, err = process.communicate(timeout=deadline_s)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def serve(number: int) -> None:
    """Fork for each request that comes from a socket; return in no process."""
    handlers = {name: signal.signal(name, signal.SIG_IGN) for name in _STOPPING}
    asked = _high(socket.socket(fileno=number))
    ends, (request, files) = True, _next_request(asked)
    while True:
        if request["session"]:
            os.setsid()
        if ends:  # with the tests that started it, however they end
            parent_death.end_with_parent(os.getppid())
        if not request["nested"]:
            break
        near, far = map(_high, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        if os.fork():
            far.close()
            Popen.server = Server(near)
            subprocess.Popen = _Nested  # type: ignore[misc]
            break
        for file in (near.detach(), asked.detach(), *files):
            os.close(file)
        parent_death.end_with_parent(os.getppid())
        ends, asked, (request, files) = False, far, _next_request(far)
    try:
        for name, handler in handlers.items():
            signal.signal(name, handler)
        _become(request, files)
    finally:
        asked.send(str(os.getpid()).encode())
        asked.close()
    _end(_run(request))


def _high(made: socket.socket) -> socket.socket:
    with made:
        return socket.socket(fileno=fcntl.fcntl(made.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH))


def _next_request(asked: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request; return it, with its files, in the process that is to carry it out, and answers with its id."""
    while True:
        sent, given, _, _ = socket.recv_fds(asked, 1 << 20, 100)
        if not sent:
            os._exit(0)
        files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH) for file in given]
        for file in given:
            os.close(file)
        request = json.loads(sent)
        _import(request)
        if _fork_sibling() == 0:
            return request, files
        for file in files:
            os.close(file)


def _import(request: Mapping[str, Any]) -> None:
    module = request["module"]
    with contextlib.suppress(ImportError):  # the process fails with it, and not the fork server
        for name in (_program_of(module), *request["later"]):
            if name not in sys.modules:
                import_module(name)
                gc.collect()
                gc.freeze()  # else each process looks through, and so copies, what all of them share
    num_threads = len(list(Path("/proc/self/task").iterdir()))
    assert num_threads == 1, (
        f"{num_threads} threads after the import of {module}: a forked process would have one of them"
    )


def _program_of(module: str) -> str:
    found = util.find_spec(module)
    return module if found is None or found.submodule_search_locations is None else f"{module}.__main__"


def _fork_sibling() -> int:
    """Fork a process whose parent is the parent of this one; return 0 in it."""
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi
    libc.syscall.argtypes, libc.syscall.restype = [ctypes.c_long] * 6, ctypes.c_long
    place = ctypes.c_void_p()  # where the C library keeps the id of this thread: fork() sets it
    flags = _PARENT | signal.SIGCHLD
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(place), 0, 0, 0) == 0 and place.value:
        flags |= _SET_TID | _CLEAR_TID
    tid = place.value or 0
    python.PyOS_BeforeFork()
    pid = libc.syscall(_CLONE, flags, 0, 0, *((tid, 0) if platform.machine() == "x86_64" else (0, tid)))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    assert pid >= 0, "clone failed"
    return pid


def _become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """Take what a new process would have been started with."""
    for file, number in zip(files, (0, 1, 2, *request["pass_fds"]), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    time.tzset()
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    _rename(request["words"])
    sys.path[:1] = [] if request["safe"] else [request["cwd"]]
    arguments = request["arguments"]
    if request["bound"]:
        parent, death_signal, port_file = request["bound"]
        if not parent_death.end_with_parent(int(parent), int(death_signal)):
            os._exit(0)
        if port_file:
            arguments = parent_death._with_port(arguments, port_file)
    sys.argv = ["-c" if request["code"] else "-m", *arguments]


def _rename(words: Sequence[str]) -> None:
    """Let ``/proc/PID/cmdline`` be the words."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = b"\0".join(word.encode() for word in words)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _run(request: Mapping[str, Any]) -> int:
    """Run the program as ``__main__``; return its exit code, negative for a signal."""
    import __main__

    try:
        if request["code"]:
            exec(request["code"], __main__.__dict__)
        else:
            sys.modules.pop(_program_of(request["module"]), None)
            runpy._run_module_as_main(request["module"])  # type: ignore[attr-defined]
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except BaseException as err:  # noqa: BLE001 it is printed, as Python does
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT if isinstance(err, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> None:
    """End as Python does, but for taking all modules apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
