"""Build the seccomp filter of a program, in classic BPF.

Allowed calls pass; those in `syscalls.CONDITIONAL` pass with harmless arguments; those in `syscalls.FATAL` kill the
process (SIGSYS); every other call fails with EPERM. There is no fork, no exec and no socket, so a program stays one
process that has only its pipes; signals reach only itself, and not SIGKILL (a SIGKILL must come from another process).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

from penstock.sandbox.inside import syscalls

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}

_LOAD, _EQUAL, _AT_LEAST, _MASK, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000
_THREAD_FLAGS = (0x3D0F00, 0x7D0F00)  # the flags that pthread_create of glibc and musl passes to clone
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
# duplicate and flags; not F_SETOWN, which sends signals, and no record locks, which other programs see
_FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)
_PRIVATE, _CLOCK = 0x80, 0x100
# Within the process every operation; across processes (pages of files are shared) waiting alone, as pthread_join does.
_FUTEXES = (0, 9, 9 | _CLOCK, *(op | _PRIVATE | clock for clock in (0, _CLOCK) for op in range(14)))
_PRCTLS = (15, 16, 0x53564D41)  # names of threads and mappings
_AF_UNIX, _SOCK_STREAM = 1, 1
_SIGKILL = 9

_Line = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def machine() -> str:
    """Return the machine's name in the tables; raises OSError if they do not have it."""
    name = os.uname().machine
    if name not in ARCHITECTURES or sys.maxsize < 2**32:
        raise OSError(f"no table of system calls for {name}; supported: {', '.join(ARCHITECTURES)}")
    return name


def program(name: str, pid: int) -> bytes:
    """Return the filter for process ``pid`` on a machine, as an array of struct sock_filter."""
    numbers = syscalls.numbers(syscalls.CONDITIONAL, name)
    lines: list[_Line] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[name]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    for number in syscalls.numbers(syscalls.ALLOWED, name).values():
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for number in syscalls.numbers(syscalls.FATAL, name).values():
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _KILL)]
    lines += [(_EQUAL, 0, 1, numbers["clone3"]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]  # libc then uses clone
    for call, checks in _conditions(pid).items():
        block = _block(checks)
        lines += [(_EQUAL, 0, len(block), numbers[call]), *block]
    lines.append((_RETURN, 0, 0, _ERRNO | _EPERM))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _conditions(pid: int) -> dict[str, list[tuple[int, int, tuple[int, ...], bool]]]:
    """Return the conditions on the arguments of each call: (argument, mask, values, whether it must be one of them)."""
    own = (0, 0xFFFFFFFF, (pid,), True)
    return {
        "kill": [own, (1, 0xFFFFFFFF, (_SIGKILL,), False)],
        "tgkill": [own, (2, 0xFFFFFFFF, (_SIGKILL,), False)],
        "clone": [(0, 0xFFFFFFFF, _THREAD_FLAGS, True)],
        "ioctl": [(1, 0xFFFFFFFF, _IOCTLS, True)],
        "fcntl": [(1, 0xFFFFFFFF, _FCNTLS, True)],
        "futex": [(1, 0xFFFFFFFF, _FUTEXES, True)],
        "prctl": [(0, 0xFFFFFFFF, _PRCTLS, True)],
        "prlimit64": [(0, 0xFFFFFFFF, (0, pid), True)],
        "socketpair": [
            (0, 0xFFFFFFFF, (_AF_UNIX,), True),
            (1, 0xF, (_SOCK_STREAM,), True),
        ],  # used by asyncio to wake its loop
    }


def _block(checks: list[tuple[int, int, tuple[int, ...], bool]]) -> list[_Line]:
    """Return the lines that allow a call if all checks hold and fail it with EPERM otherwise."""
    refuse: _Line = (_RETURN, 0, 0, _ERRNO | _EPERM)
    lines: list[_Line] = []
    for argument, mask, values, wanted in checks:
        lines += [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_MASK, 0, 0, mask)]
        rest = len(values)
        if wanted:  # a match skips the other comparisons and the refusal
            lines += [(_EQUAL, rest - place, 0, value) for place, value in enumerate(values)]
        else:  # a match reaches the refusal; if none matches, it is skipped
            lines += [(_EQUAL, rest - 1 - place, int(place == rest - 1), value) for place, value in enumerate(values)]
        lines.append(refuse)
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def apply(libc: ctypes.CDLL, name: str) -> None:
    """Apply the filter to this process, irrevocably; needs no_new_privs. Raises OSError."""
    code = program(name, os.getpid())
    lines = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: unsigned short len, then an aligned pointer
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(lines))
    if libc.syscall(_SYS_SECCOMP[name], 1, 0, ctypes.create_string_buffer(header, len(header))):
        raise OSError(ctypes.get_errno(), "seccomp refused the filter")
