"""Landlock rules of a program: it may read some folders and write nothing.

Where the kernel supports it, TCP (ABI 4), ioctl on devices (5), abstract sockets and signals (6) are refused too;
the system call filter (`seccomp`) refuses the same on every kernel.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}  # the rights that each ABI can restrict
_LATEST = 5
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract sockets, signals


def version(libc: ctypes.CDLL) -> int:
    """Return the kernel's Landlock ABI, 0 if it has none."""
    return max(0, int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION)))


def ruleset(libc: ctypes.CDLL, readable: Sequence[str], writable: Sequence[str]) -> int:
    """Return a ruleset's descriptor: read beneath ``readable``, write the files ``writable``. Raises OSError."""
    abi = version(libc)
    if abi < 1:
        raise OSError("this kernel has no Landlock; use Linux 5.13 or later with Landlock enabled")
    rights = struct.pack("=QQQ", _FILE_RIGHTS[min(abi, _LATEST)], _TCP * (abi >= 4), _SCOPES * (abi >= 6))
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = libc.syscall(_CREATE, rights[:size], ctypes.c_size_t(size), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path in readable:
        _allow(libc, rules, path, _READ_FILE)
    for path in writable:
        _allow(libc, rules, path, _READ_FILE | _WRITE_FILE)
    return rules


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    try:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights |= _READ_DIR if os.path.isdir(path) else 0  # noqa: PTH112 pathlib costs every start 3 ms
        rule = struct.pack("=Qi", rights, folder)
        if libc.syscall(_ADD, rules, _PATH_BENEATH, rule, 0):
            raise OSError(ctypes.get_errno(), f"landlock_add_rule: {path}")
    finally:
        os.close(folder)


def restrict(libc: ctypes.CDLL, rules: int) -> None:
    """Apply the rules to this process, irrevocably; needs no_new_privs. Raises OSError."""
    if libc.syscall(_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
