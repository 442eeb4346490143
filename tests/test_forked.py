"""A forked process is to itself, and to whoever starts it, as a started one."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.servers import wait_for

_FIELDS = ("PPid", "SigBlk", "SigIgn", "SigCgt", "Umask", "Threads")


def _is_of_imports(file: Path) -> bool:
    """Return whether it is an unnamed file, as libffi opens one: what other tests had the fork server import may have done so."""
    try:
        return file.readlink().name.endswith(" (deleted)")
    except FileNotFoundError:  # the listing itself
        return False


def main() -> object:
    """Tell what this process was given, and end as the first argument says."""
    own, end = Path("/proc/self"), sys.argv[1]
    given = {file.name for file in (own / "fd").iterdir() if int(file.name) < forked._HIGH}
    files = sorted(name for name in given if not _is_of_imports(own / "fd" / name))
    status = [line for line in (own / "status").read_text().splitlines() if line.startswith(_FIELDS)]
    ids = [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()]
    words = [sys.argv[1:], (own / "cmdline").read_text().rstrip("\0")]
    found = [words, ids, files, status, str(Path.cwd()), dict(os.environ), sys.stdin.read()]
    print(json.dumps(found), flush=True)
    if end == "interrupted":
        raise KeyboardInterrupt
    os.kill(os.getpid(), signal.SIGKILL if end == "killed" else 0)
    return {"text": "no such thing", "nothing": None}.get(end, 7)


@pytest.mark.parametrize("end", ["code", "text", "nothing", "interrupted", "killed"])
def test_it_is_as_a_started_one(end: str) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=forked.ROOT, env=environ,
            input="typed", capture_output=True, text=True, check=False, timeout=300, start_new_session=end == "code", pass_fds=[write],
        )  # fmt: skip

    command = forked.call("tests.test_forked", end, "--option=1")
    environ = {**os.environ, "GIVEN": "é\udcff", **dict.fromkeys(forked._SET_MEANWHILE, "cpu")}
    assert forked._how(command, environ), "it would be started, too"
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write):
        started = run()
        with forked.children():
            found = run()
    assert json.loads(found.stdout) == json.loads(started.stdout)
    assert found.returncode == started.returncode
    assert found.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_its_fork_server_ends_with_it() -> None:
    command = forked.call("tests.test_forked", "waits")
    with forked.children(), subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_for(children.read_text, "the fork server of the forked process")
        ended = os.pidfd_open(int(children.read_text()))
        process.kill()
    assert select.select([ended], [], [], 60.0)[0]
    os.close(ended)
