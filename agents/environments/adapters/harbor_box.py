"""Run a task of Harbor in a box: set it up, run the agent, then the verifier, and note what became of it in ``account.json``.

Run as ``python -I -S harbor_box.py FOLDER``, where ``FOLDER/box.json`` is what `harbor.py` wrote; exits with the agent's status. A box is a
root file system under an overlay in memory, which bubblewrap confines twice: for set-up and verifier, and inside of that for the agent, which
sees neither their processes, commands and variables nor what is mounted at their ``/tests`` and ``/logs/verifier``. Changes, processes and
network end with this process. What is done inside is done by the box's shells: a path that the agent made may lead anywhere, and is never
followed out here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NEWNS, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_PRIVATE = 0x4000 | 0x40000  # MS_REC | MS_PRIVATE
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_END_S = 10.0  # of a killed agent
_MOST_STATUS = 128  # greater ones are signals, as a shell says them
_KEPT_BYTES = 65_536
_SAID_CHARS = 2000
_MOST_LINE = 64
_SCRIPT = """
echo begun
copy() {{
    into=$1; shift
    for one; do
        if [ -d "$one" ]; then mkdir -p "$into" && cp -R "$one/." "$into" || return 1
        else case $#$into in 1*[!/]) mkdir -p "$(dirname "$into")";; *) mkdir -p "$into";; esac && cp "$one" "$into" || return 1; fi
    done
}}
read order || exit 0
( {setup} ) </dev/null >&2 || {{ echo failed; exit 1; }}
echo ready
read order || exit 0
chmod +x /tests/test.sh || {{ echo "no tests"; exit 1; }}
( cd {workdir} && exec /tests/test.sh ) </dev/null >/logs/verifier/test-stdout.txt 2>&1
echo $?
"""
_AGENT = """
read order || exit 0
( cd {workdir} && exec "$@" ) </dev/null >&2
echo $?
read order
"""
# Where something is mounted: bubblewrap would follow a link there.
_MOUNT_POINTS = ("proc", "dev", "run", "run/penstock", "tests", "logs", "logs/verifier")
_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
)  # fmt: skip
Shell = subprocess.Popen[bytes]


class BoxFailed(Exception):
    pass


def main() -> None:
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "box.json").read_text())
    sys.path.append(spec["modules"])
    account: dict[str, Any] = {"problem": "", "agent_s": 0.0, "over_time": False}
    status, base = 1, folder / "box"
    try:
        box, agent = begun(base, spec)
        status = play(box, agent, spec, account, base)
    except (OSError, ValueError, BoxFailed) as err:
        said = (read(base / "verifier" / "test-stdout.txt") or "")[-_SAID_CHARS:]
        account["problem"] = f"{err}; the end of its verifier's output:\n{said}" if said else str(err)
    (folder / "account.json").write_text(json.dumps(account))
    os._exit(status)  # bubblewrap ends with this process


def play(box: Shell, agent: Shell, spec: dict[str, Any], account: dict[str, Any], base: Path) -> int:
    """Return the agent's exit status, once the verifier has ended; raises BoxFailed."""
    if asked(box, spec["setup_s"]) != "ready":
        raise BoxFailed("its set-up failed, or was not over in time")
    started = time.monotonic()
    status = asked(agent, spec["agent_s"])
    account.update(agent_s=time.monotonic() - started, over_time=status is None)
    if status is None:
        status = kill_agent(agent)
    if spec["tests"]:
        shutil.copytree(spec["tests"], base / "tests", symlinks=True, dirs_exist_ok=True)
        verified = asked(box, seconds := spec["verifier_s"])
        if verified is None or not verified.isdecimal() or int(verified) > _MOST_STATUS:
            raise BoxFailed(f"its verifier ended with {verified or f'no status within {seconds:g} s'}")
        account["rewards"] = {name: read(base / "verifier" / name) for name in ("reward.json", "reward.txt")}
        account["said"] = (read(base / "verifier" / "test-stdout.txt") or "")[-_SAID_CHARS:]
    return int(status)


def asked(box: Shell, deadline_s: float) -> str | None:
    """Let a box's shell go on, and return what it says then, as `heard`."""
    assert box.stdin is not None
    box.stdin.write(b"go on\n")
    return heard(box, deadline_s)


def heard(box: Shell, deadline_s: float) -> str | None:
    """Return the next line of a box's shell; None: it did not come in time. Raises BoxFailed."""
    assert box.stdout is not None
    line, ends_at = b"", time.monotonic() + deadline_s
    while not line.endswith(b"\n"):
        if not select.select([box.stdout], [], [], max(0.0, ends_at - time.monotonic()))[0]:
            return None
        if not (byte := box.stdout.read(1)):
            raise BoxFailed("the box ended before its agent and its verifier")
        line += byte
        if len(line) > _MOST_LINE:
            raise BoxFailed(f"its shell wrote a line of more than {_MOST_LINE} bytes")
    return line.decode().strip()


def kill_agent(box: Shell) -> str:
    """Kill the agent with all that it waits for; what it left in the background goes on, as in a container."""
    from process_reaper import descendants  # pyright: ignore[reportMissingImports]  # noqa: PLC0415

    shell = descendants(box.pid)[1]  # behind bubblewrap's own init
    ends_at = time.monotonic() + _END_S
    while time.monotonic() < ends_at:
        for pid in descendants(shell):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if (status := heard(box, 0.1)) is not None:
            return status
    raise BoxFailed(f"its agent was not over {_END_S:g} s after it was killed")


def read(path: Path) -> str | None:
    """Return the end of a file that the box wrote; None: there is none, or no regular file."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _KEPT_BYTES))
            return file.read(_KEPT_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def begun(base: Path, spec: dict[str, Any]) -> tuple[Shell, Shell]:
    """Start the shells of verifier and agent on a root that only this process and its children see; raises BoxFailed."""
    enter_namespaces()
    base.mkdir()
    mount("tmpfs", base, f"size={spec['storage_mb']}m,mode=755")
    names = ("root", "given", "logs", "tests", "verifier", "no-tests", "no-verifier")
    root, given, logs, *hidden = (base / name for name in names)
    for folder in (given, logs, *hidden):
        folder.mkdir()
    for name, path in spec["given"].items():
        if Path(path).exists():
            copy(Path(path), given / name)
    assemble(base, root, spec)
    if link := next((path for path in _MOUNT_POINTS if (root / path).is_symlink()), None):
        raise BoxFailed(f"/{link} is a link in its image, and a box mounts something there; make it a folder")
    listener = socket.create_server(("127.0.0.1", spec["port"]), backlog=128)
    from inside_sandbox import pass_on  # pyright: ignore[reportMissingImports]  # noqa: PLC0415

    threading.Thread(target=pass_on, args=(listener, spec["socket"]), daemon=True).start()
    box = confined(spec, _SCRIPT, {**spec["variables"], **spec["verifier_env"]}, base, hidden[:2])
    if heard(box, _END_S) != "begun":
        raise BoxFailed(f"its shell did not start within {_END_S:g} s")
    from process_reaper import descendants  # pyright: ignore[reportMissingImports]  # noqa: PLC0415

    with open(f"/proc/{descendants(box.pid)[0]}/ns/pid", "rb") as namespace:  # noqa: PTH123
        check(_LIBC.setns(namespace.fileno(), _NEWPID), "the box's processes")  # of which the agent's are some
    return box, confined(spec, _AGENT, spec["variables"], base, hidden[2:], spec["agent"])


def confined(
    spec: dict[str, Any],
    script: str,
    variables: dict[str, str],
    base: Path,
    own: Sequence[Path],
    agent: Sequence[str] = (),
) -> Shell:
    """Start a shell in a box. bubblewrap itself gets no variable of a task: ``LD_PRELOAD`` would load code out here. Raises ValueError."""
    options = [
        "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "box", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL", *(word for name in _CAPABILITIES for word in ("--cap-add", f"CAP_{name}")),
        "--bind", str(base / "root"), "/", "--proc", "/proc", "--dev", "/dev",
        *(word for path in spec["readable"] for word in ("--ro-bind", path, path)),
        "--ro-bind", str(base / "given"), "/run/penstock", "--bind", str(base / "logs"), "/logs",
        "--dir", "/logs/agent", "--dir", "/logs/artifacts", "--bind", str(own[0]), "/tests", "--bind", str(own[1]), "/logs/verifier",
        *(word for name, value in variables.items() for word in ("--setenv", name, value)),
    ]  # fmt: skip
    if any("\0" in word for word in options):
        raise ValueError("a variable has a zero byte, which would end its value")
    with os.fdopen(os.memfd_create("options"), "w+") as file:  # in arguments every user could read the variables
        file.write("\0".join(options))
        file.seek(0)
        command = [spec["bubblewrap"], "--args", str(file.fileno()), "--", "/bin/sh", "-c", script.format(**spec), "sh"]
        return subprocess.Popen([*command, *agent], bufsize=0, stdin=-1, stdout=-1, env={}, pass_fds=[file.fileno()])


def assemble(base: Path, root: Path, spec: dict[str, Any]) -> None:
    """Make the root: an image under an overlay, or the system's own programs under one each, and nothing else of this machine."""
    lowers = {root: Path(spec["image"])}
    if spec["image"] == "/":
        for name in ("etc", "root", "tmp", "var", "run"):
            (root / name).mkdir(parents=True)
        (root / "tmp").chmod(0o1777)
        (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        system = {root / path.lstrip("/"): Path(path) for path in spec["system"] if Path(path).exists()}
        lowers = {inside: path for inside, path in system.items() if path.is_dir() and not path.is_symlink()}
        for inside, path in system.items():
            if inside not in lowers:
                copy(path, inside)
    for number, (inside, lower) in enumerate(lowers.items()):
        upper, work = base / f"upper{number}", base / f"work{number}"
        for made in (upper, work, inside):
            made.mkdir(parents=True)
        mount("overlay", inside, f"lowerdir={lower},upperdir={upper},workdir={work},userxattr")


def enter_namespaces() -> None:
    """Leave this machine's users, mounts and network; files that an image has of other users than root cannot be changed then."""
    uid, gid = os.geteuid(), os.getegid()
    check(_LIBC.unshare(_NEWUSER | _NEWNS | _NEWNET), "user namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path(f"/proc/self/{name}").write_text(text)
    check(_LIBC.mount(b"none", b"/", None, _PRIVATE, None), "mount /")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as interface:
        fcntl.ioctl(interface, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP))


def mount(kind: str, target: Path, data: str) -> None:
    check(_LIBC.mount(kind.encode(), os.fsencode(target), kind.encode(), 0, os.fsencode(data)), f"{kind} ({data})")


def check(failed: int, what: str) -> None:
    if failed:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def copy(path: Path, target: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, target, symlinks=True)
    else:
        shutil.copy2(path, target, follow_symlinks=False)


if __name__ == "__main__":
    main()
